"""Services in a sandbox: made, started, watched until they are ready, looked at, removed.

Owns: how systemd in the guest is driven. The verbs on a sandbox wake it; the functions below them work on any guest, for
builds do the same in theirs. Never does: what a unit file says (`units`).
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from forkyard.control import machine_image, units
from forkyard.control.commands import Finished, run
from forkyard.control.sandboxes import Sandboxes
from forkyard.errors import CommandNotFound, Conflict, InvalidRequest, ServiceNotFound, ServiceNotReady
from forkyard.guest.base import ExecSpec, Guest
from forkyard.models.builds import ServiceInfo, ServiceLogs, UnitState
from forkyard.models.specs import Service, start_order

#: For what systemd itself does.
SYSTEMD_S = 120.0
LOG_LINES = 40
LIST_BYTES = LOG_BYTES = 4 * 2**20
#: There if systemd is what booted the machine.
_BOOTED = "/run/systemd/system"
Verb = Literal["start", "stop", "restart"]


class Services:
    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def list(self, sandbox_id: str) -> list[ServiceInfo]:
        async with self._sandboxes.use(sandbox_id) as guest:
            return await listed(guest)

    async def get(self, sandbox_id: str, name: str) -> ServiceInfo:
        async with self._sandboxes.use(sandbox_id) as guest:
            return await _found(guest, name)

    async def add(self, sandbox_id: str, service: Service, *, wait: bool = True) -> ServiceInfo:
        """One of the same name is replaced."""
        if service.exec is None:  # what the image runs has what its Dockerfile said, and not what the sandbox was given
            said = await self._sandboxes.said_by_spec(sandbox_id)
            service = service.model_copy(update={"env": {**said, **service.env}})
        async with self._sandboxes.use(sandbox_id) as guest:
            await put(guest, [service], wait=wait)
            return await _found(guest, service.name)

    async def remove(self, sandbox_id: str, name: str) -> None:
        async with self._sandboxes.use(sandbox_id) as guest:
            await _found(guest, name)
            unit = shlex.quote(units.unit_name(name))
            await _systemd(
                guest,
                f"systemctl disable --now --no-reload -q -- {unit}; rm -f -- {units.UNITS}/{unit} "
                f"{units.SCRIPTS}/{shlex.quote(name)}.sh; systemctl daemon-reload; systemctl reset-failed -q -- {unit}; true",
            )

    async def turn(self, sandbox_id: str, name: str, verb: Verb) -> ServiceInfo:
        """Start, stop or restart it; if it was started, it is ready when this returns."""
        async with self._sandboxes.use(sandbox_id) as guest:
            info = await _found(guest, name)
            if verb == "stop":
                await _systemd(guest, f"systemctl stop -- {shlex.quote(units.unit_name(name))}")
            else:
                await _start(guest, info.service or Service(name=name, exec="true"), verb)
            return await _found(guest, name)

    async def logs(self, sandbox_id: str, name: str, lines: int = 100) -> ServiceLogs:
        async with self._sandboxes.use(sandbox_id) as guest:
            await _found(guest, name)
            return ServiceLogs(name=name, log=await journal(guest, name, lines))


async def put(guest: Guest, services: Sequence[Service], *, wait: bool = True) -> None:
    """Make these services and start them, those first that others wait for."""
    if not await guest.exists(_BOOTED):
        raise CommandNotFound(
            "there is no systemd in this machine, and so no services; start the program with `run`, in the background "
            "(`serve > /tmp/log 2>&1 &`), and wait for it with `wait_for`: it is saved while it runs"
        )
    image = await machine_image.read(guest)
    services = [units.completed(service, image) for service in services]
    shell = "/bin/bash" if await guest.exists("/bin/bash") else "/bin/sh"
    found = await listed(guest)
    there = {info.name for info in found}
    _no_circle([*(info.service for info in found if info.service), *services])
    for service in services:
        path = f"{units.UNITS}/{units.unit_name(service.name)}"
        if service.name not in there and await guest.exists(path):
            raise Conflict(f"the machine has a unit {service.name} that is not ours; choose another name")
        await guest.write_file(f"{units.SCRIPTS}/{service.name}.sh", _bytes(units.script(service, shell)), mode=0o755)
        await guest.write_file(path, _bytes(units.unit(service, shell)), mode=0o644)
    names = " ".join(shlex.quote(units.unit_name(service.name)) for service in services if service.enabled)
    # To enable a unit reloads all of them too, which takes seconds on an emulated CPU.
    await _systemd(guest, f"systemctl enable -q -- {names}" if names else "systemctl daemon-reload")
    for service in start_order(services):
        await _start(guest, service, "restart", wait=wait)


def _no_circle(services: Sequence[Service]) -> None:
    """systemd would start them all the same, and leave one of them out."""
    try:
        start_order(services)
    except ValueError as error:
        raise InvalidRequest(
            f"{error}; remove one of them, or say less in `after` and `requires`", field="after"
        ) from None


async def _start(guest: Guest, service: Service, verb: Verb, *, wait: bool = True) -> None:
    unit = shlex.quote(units.unit_name(service.name))
    # Returns when it is up as far as systemd can tell, or has failed to be in TimeoutStartSec.
    deadline_s = service.ready_timeout_s + SYSTEMD_S if wait else SYSTEMD_S
    command = f"systemctl {verb} {'' if wait else '--no-block '}-- {unit}"
    done = await run(guest, ExecSpec(command, timeout_s=deadline_s, label=f"{verb} {service.name}"))
    if not done.ok:
        raise await _not_ready(guest, service, "did not start", systemctl=done.tail)
    if not wait:
        return
    ready = service.ready or (f"systemctl is-active -q -- {unit}" if service.type == "simple" else None)
    if ready is None:
        return
    # Where there is no bus, systemd answers root alone.
    env, cwd, user = (service.env, service.workdir, service.user) if service.ready else ({}, None, None)
    spec = ExecSpec(
        units.wait_script(service),
        env={**env, "FORKYARD_READY": ready},
        cwd=cwd,
        user=user or "root",
        timeout_s=service.ready_timeout_s,
        label=f"ready? {service.name}",
    )
    try:
        waited = await run(guest, spec)
    except CommandNotFound as error:  # its directory is not there, say
        raise await _not_ready(guest, service, f"cannot be asked whether it is ready ({error.message})") from None
    if not waited.ok:
        late = f"was not ready within {service.ready_timeout_s:g} s: `{ready}` did not succeed"
        early = (
            "ended before it was ready" if waited.exit_code != 4 else f"ended {units.CRASHES} times before it was ready"
        )
        raise await _not_ready(guest, service, late if waited.timed_out else early)


async def _not_ready(guest: Guest, service: Service, what: str, *, systemctl: str = "") -> ServiceNotReady:
    """With what it said last, or else what `systemctl` has to say of it."""
    state = await unit_state(guest, service.name)
    said = [line for line in state.log.strip().splitlines() if " systemd[1]: " not in line]
    last = said[-1:] or systemctl.strip().splitlines()[:1] or ["it printed nothing"]
    return ServiceNotReady(
        f"service {service.name} {what}; it is {state.active} ({state.sub}, {state.result}): {last[0][:300]}",
        service=service.name,
        unit=state.model_dump(mode="json"),
    )


async def listed(guest: Guest) -> list[ServiceInfo]:
    spec = ExecSpec(units.LIST, timeout_s=SYSTEMD_S, label="services")
    return units.listed((await run(guest, spec, keep_bytes=LIST_BYTES)).tail)


async def _found(guest: Guest, name: str) -> ServiceInfo:
    for info in await listed(guest):
        if info.name == name:
            return info
    raise ServiceNotFound(f"there is no service {name!r} here; `forkyard services ls` lists those there are")


async def journal(guest: Guest, name: str, lines: int = LOG_LINES) -> str:
    unit = shlex.quote(units.unit_name(name))
    command = f"journalctl --no-pager -q -o short-iso -n {lines} -u {unit}"
    return (await run(guest, ExecSpec(command, timeout_s=SYSTEMD_S, label="services"), keep_bytes=LOG_BYTES)).tail


async def unit_state(guest: Guest, name: str) -> UnitState:
    info = await _found(guest, name)
    log = await journal(guest, name)
    return UnitState(name=name, active=info.active, sub=info.sub, result=info.result, exit_code=info.exit_code, log=log)


async def unit_states(guest: Guest) -> list[UnitState]:
    """Of all services, with what they last said."""
    return [await unit_state(guest, info.name) for info in await listed(guest)]


async def _systemd(guest: Guest, command: str) -> Finished:
    return await run(guest, ExecSpec(command, timeout_s=SYSTEMD_S, label="services"))


async def _bytes(text: str) -> AsyncIterator[bytes]:
    yield text.encode()
