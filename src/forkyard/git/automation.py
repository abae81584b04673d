"""What repositories do by themselves, in one piece: triggers, their deliveries, and remotes they are kept in step with.

Owns: how these are connected, and their order of start and stop.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from forkyard.control.plane import ControlPlane
from forkyard.git.actions import Actions
from forkyard.git.deliveries import Deliveries, Patience
from forkyard.git.refs import Refs
from forkyard.git.repositories import Repositories
from forkyard.git.signing import Signer
from forkyard.git.sync import Sync
from forkyard.git.triggers import Triggers
from forkyard.git.ways import Ways
from forkyard.git.webhooks import Sender
from forkyard.net.resolver import HostResolver

GITHUB_API = "https://api.github.com"


@dataclass(frozen=True)
class Outward:
    """How this daemon behaves towards the hosts of others."""

    #: What repositories come from and are told to may be this host, or in a private network.
    allow_private: bool = False
    webhook_timeout_s: float = 10.0
    patience: Patience = field(default_factory=Patience)
    extra_ca_file: Path | None = None
    github_api: str = GITHUB_API


class Automation:
    def __init__(
        self, control: ControlPlane, repositories: Repositories, refs: Refs, ways: Ways, root: Path, outward: Outward
    ) -> None:
        self._control = control
        self._store = control.ground.store
        self._root = root
        self._outward = outward
        self.triggers = Triggers(self._store, repositories, refs, control.secrets, allow_private=outward.allow_private)
        self.sync = Sync(
            *(self._store, repositories, refs, control.secrets, ways),
            github_api=outward.github_api,
            ca=outward.extra_ca_file,
        )
        self.signer: Signer | None = None
        self.actions: Actions | None = None
        self._resolver: HostResolver | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.signer = await asyncio.to_thread(Signer.load_or_make, self._root / "webhook-key.pem")
        outward = self._outward
        context = await asyncio.to_thread(_context, outward.extra_ca_file)
        self._resolver = HostResolver()
        sender = Sender(
            self._resolver, context, timeout_s=outward.webhook_timeout_s, allow_private=outward.allow_private
        )
        self.actions = Actions(sender, self.signer, self._control.sandboxes)
        await self.triggers.start()
        await self.sync.start()
        self._tasks = [asyncio.create_task(self.sync.run(), name="sync with remotes")]

    def deliver(self) -> None:
        """Once all that `actions` can do is in it: what an earlier daemon left is due at once."""
        assert self.actions is not None
        deliveries = Deliveries(self._store, self.triggers, self.actions, self._outward.patience)
        self._tasks.append(asyncio.create_task(deliveries.run(), name="deliveries of triggers"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._resolver is not None:
            self._resolver.close()


def _context(extra_ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if extra_ca_file is not None:
        context.load_verify_locations(extra_ca_file)
    return context
