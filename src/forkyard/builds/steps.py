"""Doing the steps of one layer in a guest.

Owns: what each kind of step means there. Never does: machines (`builds`), or what a unit says (`control.units`).
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from forkyard.builds import copies, managers, runtimes
from forkyard.builds.copies import Materials
from forkyard.builds.dockerfile.instructions import DirectoryMount, MountedRun, SecretMount
from forkyard.builds.layers import Context, Layer, shown
from forkyard.control import code, machine_image, services
from forkyard.control.commands import run
from forkyard.errors import FileMissing, ForkyardError, InvalidRequest, ServiceNotReady
from forkyard.guest.base import ExecSpec, Guest, Stream
from forkyard.images.hostconfig import read_uv_python
from forkyard.models.builds import UnitState
from forkyard.models.code import ContextCreate, context_language
from forkyard.models.specs import FileStep, GitRepo, InstallStep, Service, Step, WaitStep

SETUP_S = 300.0
APT_S = 3600.0
INSTALL_S = 3600.0
_MAX_TEXT_BYTES = 2**18

#: Clones a repository into the guest.
Clone = Callable[[GitRepo], Awaitable[None]]


@dataclass
class StepFailed(Exception):
    """A step did not do what it should. Caught by `builds`, which adds what only it knows."""

    number: int
    what: str
    message: str
    exit_code: int | None = None
    log: str = ""
    units: list[UnitState] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)


class Telling:
    """Where a layer's progress goes."""

    def __init__(
        self,
        on_output: Callable[[Stream, bytes], None],
        on_step: Callable[[int, str, float | None], None],
        on_stop: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`on_stop`: called between two steps, with how many of them are done."""
        self.output = on_output
        self.step = on_step
        self.stop = on_stop


async def do_steps(guest: Guest, layer: Layer, tell: Telling, clone: Clone, materials: Materials) -> None:
    context = layer.context
    number, waiting = 0, list(layer.steps)
    while waiting:
        number, step = waiting.pop(0)
        context = context.after(step)
        together = [(number, step)]
        while step.service is not None and waiting and waiting[0][1].service is not None:
            together.append(waiting.pop(0))  # one may need the next: systemd must know them all first
        began = time.monotonic()
        tell.step(number, shown(step), None)
        try:
            await _Doing(guest, context, tell, clone, number, step, materials).do([one for _, one in together])
        except ServiceNotReady as error:
            unit = UnitState.model_validate(error.details["unit"])
            number, step = next(
                (pair for pair in together if pair[1].service and pair[1].service.name == unit.name), (number, step)
            )
            raise StepFailed(number, shown(step), error.message, unit.exit_code, unit.log) from error
        except ForkyardError as error:
            raise StepFailed(number, shown(step), f"`{shown(step)}`: {error.message}") from error
        tell.step(number, shown(step), (time.monotonic() - began) * 1000)
        if waiting and tell.stop is not None:
            await tell.stop(len(layer.steps) - len(waiting))


@dataclass
class _Doing:
    guest: Guest
    context: Context
    tell: Telling
    clone: Clone
    number: int
    step: Step
    materials: Materials

    async def do(self, together: list[Step]) -> None:
        step, context = self.step, self.context
        if step.apt is not None:
            await self._run(
                _apt(step.apt),
                user="root",
                cwd="/",
                timeout_s=APT_S,
                env={"DEBIAN_FRONTEND": "noninteractive"},
            )
        elif step.files is not None:
            for path, file in step.files.items():
                await self._write(path, file)
        elif step.git is not None:
            await self.clone(step.git.model_copy(update={"user": step.git.user or context.user}))
        elif step.run is not None:
            one = step.run
            secrets: Sequence[SecretMount] = ()
            if isinstance(one, MountedRun):
                secrets = one.secrets
                await self._made(one.directories)
            async with self._secrets(secrets) as more:
                env = {**one.env, **more}
                await self._run(one.command, user=one.user, cwd=one.cwd, timeout_s=one.timeout_s, env=env)
        elif step.add is not None:
            await copies.add(self.guest, step.add, self.context.workdir, self.materials)
        elif step.config is not None:
            await machine_image.configure(self.guest, step.config)
        elif step.install is not None:
            await self._install(step.install)
        elif step.python is not None:
            await self._python(step.python)
        elif step.node is not None:
            await self._run(runtimes.node(step.node), user="root", cwd="/", timeout_s=INSTALL_S)
        elif step.bun is not None:
            await self._run(runtimes.bun(step.bun), user="root", cwd="/", timeout_s=INSTALL_S)
        elif step.uv is not None:
            await self._run(runtimes.uv(step.uv), user="root", cwd="/", timeout_s=INSTALL_S)
        elif step.context is not None:
            wanted = ContextCreate(language=step.context, cwd=context.workdir, user=context.user, env=dict(context.env))
            await code.start(self.guest, context_language(step.context), wanted)
        elif step.workdir is not None:
            if not await self.guest.exists(step.workdir):
                await self.guest.mkdir(step.workdir, user=context.user)
        elif step.user is not None:
            await self._run(new_user(step.user), user="root", cwd="/", timeout_s=SETUP_S)
        elif step.wait_for is not None:
            await self._wait(step.wait_for)
        elif step.service is not None:
            await services.put(self.guest, [self._completed(one.service) for one in together if one.service])

    def _completed(self, service: Service) -> Service:
        context = self.context
        return service.model_copy(
            update={
                "env": {**dict(context.env), **service.env},
                "user": service.user or context.user,
                "workdir": service.workdir or context.workdir,
            }
        )

    @asynccontextmanager
    async def _secrets(self, mounts: Sequence[SecretMount]) -> AsyncIterator[dict[str, str]]:
        """Variables; and files, for as long as the block lasts. Only what stands for a secret is ever inside."""
        env: dict[str, str] = {}
        async with AsyncExitStack() as stack:
            for mount in mounts:
                placeholder = self.materials.secrets.get(mount.id)
                if placeholder is None:
                    if mount.required:
                        raise InvalidRequest(
                            f"the secret {mount.id} is required, and was not given to this build; name it, with the hosts it "
                            f"is for: forkyard build --secret {mount.id}=HOST"
                        )
                    continue
                if mount.env is not None:
                    env[mount.env] = placeholder
                if mount.target is not None:
                    if await self.guest.exists(mount.target):
                        raise InvalidRequest(f"{mount.target} is there already; give the secret another target")
                    content = _once(placeholder.encode())
                    await self.guest.write_file(mount.target, content, mode=mount.mode, user=mount.owner)
                    stack.push_async_callback(self._unmounted, mount.target)
            yield env

    async def _made(self, mounts: Sequence[DirectoryMount]) -> None:
        for mount in mounts:
            if not await self.guest.exists(mount.target):
                await self.guest.mkdir(mount.target, mode=mount.mode, user=mount.owner)

    async def _unmounted(self, path: str) -> None:
        with suppress(FileMissing):  # the command has removed it
            await self.guest.remove(path)

    async def _run(
        self,
        command: str | list[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        timeout_s: float,
        env: dict[str, str] | None = None,
    ) -> None:
        spec = ExecSpec(
            command,
            cwd=cwd or self.context.workdir or "~",
            env={**dict(self.context.env), **(env or {})},
            user=user or self.context.user,
            timeout_s=timeout_s,
            label=f"build step {self.number}",
        )
        done = await run(self.guest, spec, self.tell.output)
        if not done.ok:
            what = shown(self.step)
            raise StepFailed(self.number, what, f"`{what}` {done.why(timeout_s)}", done.exit_code, done.tail)

    async def _python(self, version: str) -> None:
        try:
            host = await asyncio.to_thread(read_uv_python)
            env = {name: url for name, url in host.items() if name not in dict(self.context.env)}
            await self._run(runtimes.python(version), user="root", cwd="/", timeout_s=INSTALL_S, env=env)
        except StepFailed as failed:
            if failed.exit_code == runtimes.NOT_TO_BE_HAD:
                failed.message = (
                    f"Python {version} cannot be had: the base has another, and uv could not download it (its words are in "
                    "the log); use the base's own, or let the build reach what uv downloads from: a mirror that the daemon is "
                    "told of (UV_PYTHON_INSTALL_MIRROR), or the host that the log names, in the network of the build"
                )
            raise

    async def _write(self, path: str, file: FileStep, directory: str | None = None) -> None:
        there = posixpath.join(directory or self.context.workdir or "/root", path)
        user = file.user or self.context.user
        await self.guest.write_file(there, _once(file.data()), mode=file.mode, user=user)

    async def _install(self, install: InstallStep) -> None:
        place = posixpath.join(self.context.workdir or "/root", install.path or "")
        for path, file in install.files.items():
            await self._write(path, file, place)
        below, lockfile = posixpath.split(install.lockfile)
        directory = posixpath.normpath(posixpath.join(place, below))
        if not install.files and not await self.guest.exists(posixpath.join(directory, lockfile)):
            raise FileMissing(
                f"there is no {posixpath.join(directory, lockfile)} in the machine, and there was no {install.lockfile} where "
                "the spec was made; bring it in by a step before (`git`, `add`, `files`), or name one that is there"
            )
        tool = managers.wanted(install.program(), await self._texts(directory))
        if tool.fetch is not None:
            await self._run(tool.fetch, user="root", cwd="/", timeout_s=INSTALL_S)
        command = tool.install(lockfile)
        if tool.manager == "uv":
            command += " --no-install-project"  # which may not be there yet
        await self._run(tool.script(command), cwd=directory, timeout_s=INSTALL_S)

    async def _texts(self, directory: str) -> dict[str, str]:
        """The beginnings of what says which package manager is meant."""
        found = {}
        for name in managers.READ:
            data = b""
            with suppress(FileMissing):
                async with self.guest.read_file(posixpath.join(directory, name), length=_MAX_TEXT_BYTES) as chunks:
                    async for chunk in chunks:
                        data += chunk
                found[name] = data.decode("utf-8", "replace")
        return found

    async def _wait(self, wait: WaitStep) -> None:
        # An image may have neither bash nor timeout.
        command = (
            "shell=$(command -v bash || echo sh); within=$(command -v timeout && echo 30); "
            f'until $within $shell -c "$FORKYARD_READY" >/dev/null 2>&1; do sleep {wait.interval_s:g}; done'
        )
        await self._run(command, timeout_s=wait.timeout_s, env={"FORKYARD_READY": wait.command})


def new_user(named: str) -> str:
    """Makes a user, unless there is one. What is small has busybox's adduser, and no useradd."""
    name = shlex.quote(named)
    return (
        f"id -u -- {name} >/dev/null 2>&1 || if command -v useradd >/dev/null; then useradd -m -s /bin/bash -- {name}; "
        f'elif command -v adduser >/dev/null; then adduser -D -s "$(command -v bash || echo /bin/sh)" -- {name}; '
        f'else echo "there is no user {named}, and neither useradd nor adduser to make one; add a line for it to '
        '/etc/passwd in a step before" >&2; exit 127; fi'
    )


def _apt(packages: Sequence[str]) -> str:
    """What is there already, in whatever version, is not looked for elsewhere."""
    names, get = " ".join(map(shlex.quote, packages)), "apt-get -q -o Dpkg::Use-Pty=0"
    install = f"{get} update && {get} install -y --no-install-recommends -- {names}"
    if any("=" in name or ":" in name for name in packages):
        return install
    there = f"dpkg-query -W -f '${{db:Status-Status}}\\n' -- {names} 2>/dev/null | grep -cx installed"
    return f'[ "$({there})" = {len(set(packages))} ] || {{ {install}; }}'


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
