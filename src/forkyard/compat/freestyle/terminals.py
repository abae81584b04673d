"""Named terminals: what commands that were given the name of one have printed. The VM itself keeps it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC
from typing import Any

from starlette.responses import Response

from forkyard.compat.freestyle.calls import Call, done, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.inside import TERMINAL
from forkyard.compat.freestyle.vms import Vms
from forkyard.control.plane import ControlPlane
from forkyard.guest.base import Guest, Output
from forkyard.models import ExecInfo

MAX_BYTES = 4 * 2**20


class Terminals:
    def __init__(self, control: ControlPlane, vms: Vms) -> None:
        self._control = control
        self._vms = vms

    async def listed(self, call: Call) -> Response:
        found: dict[str, dict[str, Any]] = {}
        for name, info in await self._commands(call):
            row = found.setdefault(name, {"name": name, "status": "exited", "created": time_of(info.started_at)})
            if info.running:
                row["status"] = "running"
        return done({"terminals": list(found.values())})

    async def logs(self, call: Call) -> Response:
        lines = []
        async for info, text in self._printed(call):
            at = info.started_at.astimezone(UTC)
            lines += [{"line": line, "timestamp": time_of(at)} for line in text.splitlines()]
        return done({"logs": lines})

    async def output(self, call: Call) -> Response:
        return done({"output": "".join([text async for _, text in self._printed(call)])[-MAX_BYTES:]})

    async def _commands(self, call: Call) -> list[tuple[str, ExecInfo]]:
        """Oldest first."""
        vm = (await self._vms.living(call)).id
        async with self._control.sandboxes.use(vm) as guest:
            found = await guest.execs()
        labelled = ((info.label or "", info) for info in found)
        named = [(label.removeprefix(TERMINAL), info) for label, info in labelled if label.startswith(TERMINAL)]
        return sorted(named, key=lambda one: one[1].started_at)

    async def _printed(self, call: Call) -> AsyncIterator[tuple[ExecInfo, str]]:
        wanted = call.path["terminal"]
        found = [info for name, info in await self._commands(call) if name == wanted]
        if not found:
            raise Refused(404, "NOT_FOUND", f"there is no terminal {wanted[:64]!r}")
        async with self._control.sandboxes.use(call.path["vm"]) as guest:
            for info in found:
                yield info, await _so_far(guest, info)


async def _so_far(guest: Guest, info: ExecInfo) -> str:
    """What is kept of its output, without waiting for more."""
    produced = {"stdout": info.stdout_bytes, "stderr": info.stderr_bytes}
    seen, kept = dict.fromkeys(produced, 0), bytearray()
    if not any(produced.values()):
        return ""
    async with guest.attach(info.id) as execution:
        async for item in execution:
            if isinstance(item, Output):
                kept += item.data
                del kept[:-MAX_BYTES]
                seen[item.stream] = item.offset + len(item.data)
            if all(seen[stream] >= count for stream, count in produced.items()):
                break
    return kept.decode("utf-8", "replace")
