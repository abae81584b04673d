"""The control plane in one piece: what the API is given.

Owns: how the verbs are connected, and the order of start and stop. Never does: wiring of store and host (`daemon.py`).
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from forkyard.control.code import Code
from forkyard.control.domains import Domains
from forkyard.control.egress import Egress
from forkyard.control.events import Events
from forkyard.control.following import Following
from forkyard.control.forks import Forks
from forkyard.control.ground import Ground
from forkyard.control.history import History
from forkyard.control.identities import Identities
from forkyard.control.inside import Inside
from forkyard.control.keys import Keys
from forkyard.control.network import Networks
from forkyard.control.placement import Limits
from forkyard.control.power import Power
from forkyard.control.previews import Previews
from forkyard.control.reconciler import Reconciler
from forkyard.control.removal import Removal
from forkyard.control.room import Room
from forkyard.control.sandboxes import Sandboxes
from forkyard.control.secrets import Secrets, Vault
from forkyard.control.services import Services
from forkyard.control.sleep import Sleep
from forkyard.control.snapshots import Snapshots
from forkyard.control.ssh import Ssh
from forkyard.control.tunnels import Tunnels
from forkyard.control.upkeep import Upkeep
from forkyard.control.volume_files import VolumeFiles
from forkyard.control.volumes import Volumes
from forkyard.errors import ForkyardError
from forkyard.hosts.base import Host
from forkyard.lifecycle import State
from forkyard.net.authority import Authority
from forkyard.net.recordings import Recordings
from forkyard.store.sql import Store
from forkyard.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

SETTLE_S = 30.0


class ControlPlane:
    def __init__(
        self,
        store: Store,
        host: Host,
        limits: Limits | None = None,
        *,
        vault: Vault | None = None,
        authority: Authority | None = None,
        recordings: Recordings | None = None,
    ) -> None:
        """`vault` seals secrets; one that is made here forgets them with the daemon. Without an `authority` no guest is
        told to trust one."""
        self.host = host
        self.authority = authority
        self.recordings = recordings
        self.metrics = Metrics()
        self.ground = Ground(store, host, limits or Limits())
        self.secrets = Secrets(store, vault or Vault())
        self.networks = Networks(self.ground, self.secrets, authority, recordings)
        self.ground.network_of, self.ground.env_of = self.networks.of, self.networks.env
        self.ground.prepare, self.ground.last_look = self.networks.prepare, self.networks.last_look
        self.secrets.changed = self.networks.secret_changed
        self.egress = Egress(self.ground, self.networks)
        self.removal = Removal(self.ground)
        self.room = Room(self.ground, self.removal)
        self.sleep = Sleep(self.ground, self.removal, self.room)
        self.power = Power(self.ground, self.removal, self.room, self.sleep)
        self.snapshots = Snapshots(self.ground, self.removal, self.room, self.sleep)
        self.forks = Forks(self.ground, self.room, self.sleep)
        self.keys = Keys(store)
        self.identities = Identities(store, self.keys)
        self.volumes = Volumes(self.ground, self.room, self.sleep)
        self.sandboxes = Sandboxes(
            self.ground,
            self.removal,
            self.room,
            self.sleep,
            self.snapshots,
            self.secrets,
            self.networks,
            self.identities,
            self.volumes,
        )
        self.volume_files = VolumeFiles(self.volumes, self.sandboxes)
        self.services = Services(self.sandboxes)
        self.inside = Inside(self.ground, self.identities)
        self.networks.services.append(self.inside.services)
        self.previews = Previews(self.ground, self.sleep)
        self.domains = Domains(self.ground, self.previews)
        self.following = Following(self.ground, self.sandboxes, self.metrics)
        self.code = Code(self.sandboxes, self.following)
        self.upkeep = Upkeep(self.ground, self.removal, self.sleep, self.power, self.snapshots, self.networks)
        self.history = History(self.ground)
        self.events = Events(store)
        self.ssh = Ssh(self.ground, self.identities)
        self.tunnels = Tunnels(self.ground, self.sandboxes)
        #: Set when everything an earlier daemon left has been dealt with; the API lets requests in from then on.
        self.ready = asyncio.Event()
        #: A client asked the daemon to stop; whoever runs it watches this.
        self.stop_requested = asyncio.Event()
        self.stop_destroys = False
        self._reconciler = Reconciler(self.ground)
        self._watcher: asyncio.Task[None] | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._egress: asyncio.Task[None] | None = None
        self._history: asyncio.Task[None] | None = None

    async def start(self) -> None:
        summary = await self._reconciler.recover()
        await self.volumes.clear_half_made()
        self._watcher = asyncio.create_task(self._reconciler.watch(), name="watch ended machines")
        self._egress = asyncio.create_task(self.egress.run(), name="egress log")
        await self.networks.restore()
        self._upkeep = asyncio.create_task(self.upkeep.run(), name="upkeep")
        self._history = asyncio.create_task(self.history.run(), name="usage")
        await self.volume_files.sweep()
        for sandbox_id in summary.to_wake:
            self.ground.turns.keep(asyncio.create_task(self._wake(sandbox_id), name=f"wake {sandbox_id}"))
        await self.events.publish(
            "daemon.started",
            data={
                "accel": self.host.accel,
                "adopted": summary.adopted,
                "paused": summary.paused,
                "stopped": summary.stopped,
                "failed": summary.failed,
            },
        )
        self.ready.set()

    async def _wake(self, sandbox_id: str) -> None:
        try:
            await self.sleep.wake(sandbox_id)
        except ForkyardError as error:
            log.warning("sandbox not woken", sandbox=sandbox_id, error=error.message)

    async def metrics_text(self, version: str) -> bytes:
        store = self.ground.store
        states = await store.count_by_state()
        await self.networks.save()
        traffic = await store.traffic_of_all()
        return self.metrics.text(
            version=version,
            accel=self.host.accel,
            sandboxes={state.value: states.get(state, 0) for state in State},
            totals={
                "creates": ("Sandboxes created, forks included.", sum(states.values())),
                "network_sent_bytes": ("Bytes that sandboxes sent by connections of their own.", traffic.bytes_out),
                "network_received_bytes": ("Bytes that sandboxes received by these.", traffic.bytes_in),
                "ingress_received_bytes": (
                    "Bytes into sandboxes by previews, SSH and forwarded ports.",
                    traffic.ingress_bytes_in,
                ),
                "ingress_sent_bytes": (
                    "Bytes out of sandboxes by previews, SSH and forwarded ports.",
                    traffic.ingress_bytes_out,
                ),
                "egress_connections": ("Connections that sandboxes opened.", traffic.connections),
                "egress_denied": ("Connections and DNS queries that were denied.", traffic.denied),
            },
        )

    def request_stop(self, *, destroy: bool) -> None:
        self.stop_destroys = destroy
        self.stop_requested.set()

    async def stop(self, *, destroy: bool = False) -> None:
        """Leaves machines running, unless `destroy`: then every sandbox is deleted."""
        self.ready.clear()
        await _cancelled(self._upkeep)
        await _cancelled(self._history)
        await self.upkeep.stop()
        await self.ground.turns.settle(SETTLE_S)
        if destroy:
            await self.removal.delete_all()
            await self.volumes.delete_all()
        await _cancelled(self._watcher)
        await _cancelled(self._egress)
        await self.egress.settle()
        await self.networks.save()
        await self.events.publish("daemon.stopped")
        await self.host.stop(destroy=destroy)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
