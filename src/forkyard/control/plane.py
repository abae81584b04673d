"""The control plane in one piece: what the API is given.

Owns: the order of start and stop. Never does: wiring of store and host (`daemon.py`).
"""

from __future__ import annotations

import asyncio
import contextlib

from forkyard.control.events import Events
from forkyard.control.keys import Keys
from forkyard.control.reconciler import Reconciler
from forkyard.control.sandboxes import Sandboxes
from forkyard.hosts.base import Host
from forkyard.store.sql import Store

SETTLE_S = 30.0


class ControlPlane:
    def __init__(self, store: Store, host: Host) -> None:
        self.host = host
        self.sandboxes = Sandboxes(store, host)
        self.events = Events(store)
        self.keys = Keys(store)
        #: Set when everything an earlier daemon left has been dealt with; the API lets requests in from then on.
        self.ready = asyncio.Event()
        #: A client asked the daemon to stop; whoever runs it watches this.
        self.stop_requested = asyncio.Event()
        self.stop_destroys = False
        self._reconciler = Reconciler(store, host)
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        summary = await self._reconciler.recover()
        self._watcher = asyncio.create_task(self._reconciler.watch(), name="watch ended machines")
        await self.events.publish(
            "daemon.started",
            data={"accel": self.host.accel, "adopted": summary.adopted, "failed": summary.failed},
        )
        self.ready.set()

    def request_stop(self, *, destroy: bool) -> None:
        self.stop_destroys = destroy
        self.stop_requested.set()

    async def stop(self, *, destroy: bool = False) -> None:
        """Leaves machines running, unless `destroy`: then every sandbox is deleted."""
        self.ready.clear()
        await self.sandboxes.settle(SETTLE_S)
        if destroy:
            await self.sandboxes.delete_all()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self.events.publish("daemon.stopped")
        await self.host.stop(destroy=destroy)
