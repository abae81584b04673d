"""Puts new disks on those a VM writes to, all at one instant. What is below is sealed from then on.

Owns: that the new disks are open before anything stands still, and are gone again if it does not come to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.errors import ForkyardError
from forkyard.vmm.base import VmRecord
from forkyard.vmm.qemu import disks
from forkyard.vmm.qemu.disks import Top
from forkyard.vmm.qemu.finishing import in_thread, to_the_end
from forkyard.vmm.qemu.qmp import Qmp


@dataclass
class Sealing:
    qmp: Qmp
    record: VmRecord
    below: Sequence[Top]
    paths: Sequence[Path]  # of the new ones, in the same order
    done: bool = False
    above: list[Top] = field(init=False)

    def __post_init__(self) -> None:
        self.above = [top.next(path) for top, path in zip(self.below, self.paths, strict=True)]

    @contextlib.asynccontextmanager
    async def prepared(self) -> AsyncIterator[None]:
        """The new disks are made and open while the block lasts, and for good if they were switched to."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._forget)
            for below, above in zip(self.below, self.above, strict=True):
                await in_thread(lambda b=below, a=above: self._make(b, a))  # type: ignore[misc]
                await to_the_end(self.qmp.execute("blockdev-add", **above.options(backing=None)))
            yield

    def _make(self, below: Top, above: Top) -> None:
        disks.make_overlay(above.path, below.path, "qcow2", self.record, above.size_bytes or None)

    async def _forget(self) -> None:
        if self.done:
            return
        for above in self.above:
            arguments: dict[str, Any] = {"node-name": above.node}
            with contextlib.suppress(ForkyardError):
                await to_the_end(self.qmp.execute("blockdev-del", **arguments))
            above.path.unlink(missing_ok=True)

    async def switch(self) -> None:
        """All or none."""
        if self.below:
            actions = [
                {"type": "blockdev-snapshot", "data": {"node": below.node, "overlay": above.node}}
                for below, above in zip(self.below, self.above, strict=True)
            ]
            await self.qmp.execute("transaction", actions=actions)
        self.done = True

    async def seal(self) -> None:
        """Nobody writes to what is below any more."""
        for top in self.below if self.done else ():
            await asyncio.to_thread(disks.seal, top.path)
