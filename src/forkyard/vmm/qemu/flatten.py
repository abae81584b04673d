"""Shortens the chain under a VM's disk while the VM runs: QEMU copies what lies between into the disk in use.

Owns: the steps, and that they can be cut off at any of them. What is copied does not change what the disk says; only the
last step, when all copies are flushed, makes the disk stand on something deeper. The layers between are only read: others
may stand on them.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.errors import ForkyardError, HostFailure, OperationTimeout
from forkyard.faults import reached
from forkyard.vmm.qemu.disks import Top, is_top
from forkyard.vmm.qemu.qmp import Event, Qmp

FLATTEN_TIMEOUT_S = 3600.0
_JOB = "flatten-"


@dataclass(frozen=True)
class Flatten:
    qmp: Qmp
    top: Top
    base: Path

    @property
    def job(self) -> str:
        return f"{_JOB}{self.top.number}"

    async def run(self) -> None:
        """Returns when the chain is short, or when the job was cancelled."""
        copied = self._expect("pending", "null")
        # Held when all is copied: QEMU itself would not flush the copies before it stops needing the originals.
        hold: dict[str, Any] = {"auto-finalize": False, "job-id": self.job}
        await self.qmp.execute("block-stream", device=self.top.node, base=str(self.base), **hold)
        try:
            async with asyncio.timeout(FLATTEN_TIMEOUT_S):
                if (await copied).data["status"] == "pending":
                    gone = self._expect("null")
                    with contextlib.suppress(HostFailure):  # cancelled at the last moment
                        await self._flush()
                        reached("fold.copied")
                        await self.qmp.execute("job-finalize", id=self.job)
                    await gone
        except TimeoutError:
            await self.cancel()
            raise OperationTimeout(f"a disk was not flattened within {FLATTEN_TIMEOUT_S:.0f} s") from None
        reached("fold.done")
        await self._close_unused()

    async def cancel(self) -> None:
        """What was copied stays; it does no harm."""
        with contextlib.suppress(HostFailure):  # it is over
            await self.qmp.execute("job-cancel", id=self.job)

    def _expect(self, *statuses: str) -> asyncio.Future[Event]:
        return self.qmp.expect(
            lambda e: (
                e.name == "JOB_STATUS_CHANGE" and e.data.get("id") == self.job and e.data.get("status") in statuses
            )
        )

    async def _flush(self) -> None:
        arguments: dict[str, Any] = {"command-line": f"qemu-io {self.top.node} flush", "timeout_s": 600.0}
        said = await self.qmp.execute("human-monitor-command", **arguments)
        if str(said).strip():
            await self.cancel()
            raise HostFailure(f"QEMU could not flush a disk: {str(said).strip()[:200]}")

    async def _close_unused(self) -> None:
        """Disks the VM wrote to before stay open as long as nobody closes them."""
        for node in await self.qmp.execute("query-named-block-nodes", flat=True):
            name = str(node["node-name"])
            if is_top(name) and name != self.top.node:
                with contextlib.suppress(HostFailure):  # still in the chain
                    arguments: dict[str, Any] = {"node-name": name}
                    await self.qmp.execute("blockdev-del", **arguments)


async def cancel_all(qmp: Qmp) -> None:
    """Of a VM that another daemon started: end what that one had begun."""
    for job in await qmp.execute("query-jobs"):
        if str(job["id"]).startswith(_JOB):
            gone = qmp.expect(
                lambda e, name=job["id"]: (  # type: ignore[misc]
                    e.name == "JOB_STATUS_CHANGE" and e.data.get("id") == name and e.data.get("status") == "null"
                )
            )
            with contextlib.suppress(ForkyardError, TimeoutError):
                await qmp.execute("job-cancel", id=job["id"])
                async with asyncio.timeout(30):
                    await gone
