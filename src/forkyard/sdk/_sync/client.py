# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""The client: the daemon's sandboxes, snapshots, events, keys and health."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Self

import httpx

from forkyard.lifecycle import State
from forkyard.models import (
    DEFAULT_ACTIVITY_BYTES,
    Check,
    EventInfo,
    Health,
    KeyCreated,
    KeyFormat,
    KeyInfo,
    OnTtl,
    Page,
    Persistence,
    SandboxInfo,
)
from forkyard.models.network import Secret
from forkyard.models.specs import GitRepo
from forkyard.models.volumes import CacheKind, Volume
from forkyard.sdk import connect, validation, wire
from forkyard.sdk._sync import runtime
from forkyard.sdk._sync.builds import Builds
from forkyard.sdk._sync.dev_servers import DevServers
from forkyard.sdk._sync.domains import Domains
from forkyard.sdk._sync.git import Git
from forkyard.sdk._sync.identities import Identities
from forkyard.sdk._sync.images import Images, credentials, send_ahead
from forkyard.sdk._sync.recordings import Recordings
from forkyard.sdk._sync.reviews import Reviews
from forkyard.sdk._sync.runs import Cron, Runs
from forkyard.sdk._sync.sandbox import Sandbox
from forkyard.sdk._sync.secrets import Secrets
from forkyard.sdk._sync.snapshots import Snapshot, Snapshots, reference
from forkyard.sdk._sync.ssh import Ssh
from forkyard.sdk._sync.transport import Transport
from forkyard.sdk._sync.volumes import Volumes
from forkyard.sdk.spec import Spec, checked

_MAX_TAIL = 1000


class Forkyard:
    """A Forkyard daemon: the one at `url` (or FORKYARD_URL), else that of this machine, started if it does not run.

    `api_key`: else FORKYARD_API_KEY, else the key file of this machine. `socket` and `key_file` name those of another
    daemon of this machine. `start=False` never starts a daemon. `progress` is called with lines to show while one
    starts. `transport` replaces the way requests are sent, for tests. Nothing is contacted before the first call.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        socket: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
        start: bool = True,
        progress: Callable[[str], None] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        def find() -> connect.Endpoint:
            if transport is not None and url is None:
                return connect.Endpoint("http://forkyard", api_key=api_key)
            if socket is not None:
                return connect.at_socket(Path(socket), api_key, None if key_file is None else Path(key_file))
            return connect.find(url, api_key, start=start, progress=progress)

        self._transport = Transport(find, transport)
        self.sandboxes = Sandboxes(self._transport)
        self.snapshots = Snapshots(self._transport)
        self.builds = Builds(self._transport)
        self.images = Images(self._transport)
        self.dev_servers = DevServers(self._transport)
        self.runs = Runs(self._transport)
        self.cron = Cron(self._transport)
        self.events = Events(self._transport)
        self.keys = Keys(self._transport)
        self.git = Git(self._transport)
        self.reviews = Reviews(self._transport)
        self.identities = Identities(self._transport)
        self.domains = Domains(self._transport)
        self.secrets = Secrets(self._transport)
        self.volumes = Volumes(self._transport)
        self.recordings = Recordings(self._transport)
        self.ssh = Ssh(self._transport)

    def health(self) -> Health:
        answer = self._transport.request("GET", "/health")
        return wire.parse(Health, answer.content)

    def ca(self) -> str:
        """The certificate, as PEM, of this installation's authority. Trust it to open previews over HTTPS."""
        answer = self._transport.request("GET", "/ca")
        return answer.text

    def doctor(self) -> list[Check]:
        """What the daemon finds right and wrong with its machine."""
        answer = self._transport.request("GET", "/doctor")
        return wire.parse_list(Check, answer.content)

    def shutdown(self, *, destroy: bool = False) -> None:
        """Stop the daemon. Its machines go on, unless `destroy`."""
        self._transport.request("POST", "/shutdown", body={"destroy": destroy})

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sandboxes:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        *,
        name: str | None = None,
        vcpus: int = 1,
        memory_mib: int = 512,
        disk_gib: int = 8,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        snapshot: Snapshot | str | None = None,
        spec: Spec | Mapping[str, Any] | None = None,
        registry: tuple[str, str] | tuple[str, str, str] | None = None,
        idle_timeout_s: float | None = 300.0,
        ttl_s: float | None = None,
        on_ttl: OnTtl = "delete",
        persistence: Persistence = "sticky",
        priority: int = 5,
        checkpoint_every_s: float | None = None,
        checkpoints_kept: int = 5,
        network: validation.Network | None = None,
        secrets: Mapping[str, Secret | Mapping[str, Any]] | None = None,
        volumes: Mapping[str, str | Volume] | None = None,
        cache: Sequence[CacheKind] = (),
        identity: str | None = None,
        git: Sequence[GitRepo | str | Mapping[str, Any]] | None = None,
        activity_threshold_bytes: int = DEFAULT_ACTIVITY_BYTES,
        idempotency_key: str | None = None,
        timeout_s: float = wire.CREATE_S,
    ) -> Sandbox:
        """A new machine, ready for commands. The first use of a shape builds its template and takes longer.

        `env` is set for every command in it. With a `snapshot` (the object, its id or its name) it goes on from there,
        processes and all, in the shape of the snapshot. A `spec` is built in layers first, once; later creates start from
        the last one, with its services running; `registry` is a user and a password for images of a private registry, and
        its name as third if images of others are needed too; it is kept nowhere. After `idle_timeout_s` without activity
        it goes to sleep, and the next call wakes it (None: never); after `ttl_s` it is deleted, or paused (`on_ttl`).
        `persistence`: `ephemeral` is deleted when it pauses or stops, `until-stopped` when it stops; of the `sticky` ones
        the lowest `priority` gives way when the disk is full; `persistent` never does. `checkpoint_every_s` takes a
        snapshot that often and keeps the last `checkpoints_kept`.

        `network`: what may leave and enter: the name of a preset, an `EgressPolicy` or a `NetworkPolicy`. Default: the
        preset `coding`; with a snapshot, what its sandbox has. `secrets` are variables whose value never enters the
        machine: it is put in on the way to the named hosts. `volumes`, by the path they are mounted at: a name, which is
        read-write by one sandbox at a time, or `Volume(name, mode="ro" | "cow")`, by many. `cache`: package caches, each a
        copy of its own. With an `identity` (its id or name), the repositories that it
        may use are at http://git.forkyard.internal/NAME.git in there, without a credential. Repositories of `git`
        (`GitRepo`, or `"URL#REV:PATH"`; hosted ones by name) are cloned before this returns, to /repo unless said
        otherwise. More traffic than `activity_threshold_bytes` in a quarter of the idle timeout keeps it awake.

        A create that is retried with the same `idempotency_key` gives the same sandbox; the client sends one by itself,
        so that a broken connection never leaves a second machine. After `timeout_s` it raises `OperationTimeout`.
        """
        if spec is not None:
            send_ahead(self._transport, spec)
        request = validation.sandbox_create(
            name=name,
            vcpus=vcpus,
            memory_mib=memory_mib,
            disk_gib=disk_gib,
            labels=dict(labels or {}),
            env=dict(env or {}),
            snapshot=None if snapshot is None else reference(snapshot),
            spec=None if spec is None else checked(spec),
            idle_timeout_s=idle_timeout_s,
            ttl_s=ttl_s,
            on_ttl=on_ttl,
            persistence=persistence,
            priority=priority,
            checkpoint_every_s=checkpoint_every_s,
            checkpoints_kept=checkpoints_kept,
            secrets=dict(secrets or {}),
            volumes=dict(volumes or {}),
            cache=list(cache),
            identity=identity,
            git=list(git or ()),
            activity_threshold_bytes=activity_threshold_bytes,
        )
        body = request.model_dump(exclude_defaults=True)
        if network is not None:  # also if it is the default: a snapshot has one of its own
            body["network"] = validation.network_policy(network).model_dump(mode="json")
        if registry is not None:
            body["registry"] = credentials(registry)
        answer = self._transport.request(
            "POST",
            "/sandboxes",
            body=body,
            headers={"Idempotency-Key": idempotency_key or token_hex(16)},
            again=True,
            timeout_s=timeout_s,
        )
        return Sandbox(self._transport, wire.parse(SandboxInfo, answer.content))

    def get(self, sandbox_id: str) -> Sandbox:
        answer = self._transport.request("GET", f"/sandboxes/{wire.segment(sandbox_id)}")
        return Sandbox(self._transport, wire.parse(SandboxInfo, answer.content))

    def list(
        self,
        *,
        all: bool = False,
        state: State | str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
    ) -> list[Sandbox]:
        """Sandboxes, newest first; `all` includes those that have ended."""
        params = {
            "all": all or None,
            "state": str(state) if state else None,
            "label": [f"{key}={value}" for key, value in (labels or {}).items()] or None,
        }
        found = self._transport.items(Page[SandboxInfo], "/sandboxes", params, limit)
        return [Sandbox(self._transport, info) for info in found]

    def delete(self, sandbox_id: str) -> None:
        self._transport.request("DELETE", f"/sandboxes/{wire.segment(sandbox_id)}")


class Keys:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, name: str, *, format: KeyFormat = "forkyard") -> KeyCreated:
        """A new API key. The key itself is in the answer and nowhere else. `format`: what clients of another service
        take for one of theirs."""
        answer = self._transport.request("POST", "/keys", body={"name": name, "format": format})
        return wire.parse(KeyCreated, answer.content)

    def list(self) -> list[KeyInfo]:
        answer = self._transport.request("GET", "/keys")
        return wire.parse(Page[KeyInfo], answer.content).items

    def delete(self, key_id: str) -> None:
        self._transport.request("DELETE", f"/keys/{wire.segment(key_id)}")


class Events:
    """History: every change of a sandbox's state, with its cause."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(
        self,
        *,
        sandbox_id: str | None = None,
        after: int | None = None,
        limit: int | None = None,
        tail: int | None = None,
    ) -> list[EventInfo]:
        """Oldest first; `after` an event's id; at most the first `limit`, or the last `tail`."""
        found: list[EventInfo] = []
        # Only spares us the rest: a daemon that does not know it sends everything, so the end is cut here in any case.
        short = tail if tail is not None and tail <= _MAX_TAIL and after is None else None
        while limit is None or len(found) < limit:
            wanted = wire.PAGE_ITEMS if limit is None else min(wire.PAGE_ITEMS, limit - len(found))
            params = {"sandbox_id": sandbox_id, "after": after, "limit": short or wanted, "tail": short}
            answer = self._transport.request("GET", "/events", params=params)
            page = wire.parse(Page[EventInfo], answer.content)
            found += page.items
            if page.next_cursor is None or not page.items:
                break
            after, short = page.items[-1].id, None
        return found if tail is None else found[-tail:]

    def follow(self, *, sandbox_id: str | None = None, after: int | None = None) -> runtime.Flow[EventInfo]:
        """Events as they happen (with `after`, also those since that one), without end, over restarts of the daemon."""
        stream = self._transport.follow(
            "/events", EventInfo.model_validate, lambda event: event.id, params={"sandbox_id": sandbox_id}, after=after
        )
        with closing(stream) as events:
            for event in events:
                yield event
