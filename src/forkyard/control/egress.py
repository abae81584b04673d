"""The egress log: what left a sandbox, and what was kept from leaving.

Owns: the one consumer of the host's records. It writes them in batches, tells of denials by an event (once a minute for
each destination), and remembers what each exec was refused, so that its user learns why it failed. Reading and following
are like those of events: the table is the truth and a commit only wakes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from forkyard.control.ground import Ground
from forkyard.control.network import Networks
from forkyard.errors import ForkyardError, NoCapacity
from forkyard.models import Page
from forkyard.models.network import EgressRecord, EgressTotals

log = structlog.get_logger(__name__)

MAX_FOLLOWERS = 256
BATCH = 500
FLUSH_AFTER_S = 0.1
WAIT_FOR_WRITTEN_S = 1.0
#: More than these wait to be written: the consumer waits too, and the host drops what comes meanwhile.
MAX_UNWRITTEN = 5000
EVENT_EVERY_S = 60.0
_REMEMBERED = 4096
_DENIALS_PER_EXEC = 16


class Egress:
    def __init__(self, ground: Ground, networks: Networks) -> None:
        self._ground = ground
        self._networks = networks
        self._followers = 0
        self._unwritten: list[EgressRecord] = []
        self._flusher: asyncio.Task[None] | None = None
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._denials: OrderedDict[tuple[str, str], dict[str, None]] = OrderedDict()

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Runs as long as the daemon does: the only consumer of `Host.egress`."""
        async for record in self._ground.host.egress():
            self._note(record)
            self.take(record)
            if self._flusher is not None and len(self._unwritten) >= MAX_UNWRITTEN:
                await asyncio.wait([self._flusher])

    def take(self, record: EgressRecord) -> None:
        """Also of what this daemon itself fetched for a sandbox."""
        self._unwritten.append(record)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(FLUSH_AFTER_S), name="write egress")

    async def settle(self) -> None:
        """What has come is written when this returns."""
        if self._flusher is not None:
            await asyncio.wait([self._flusher])
        await self._flush()

    async def _flush(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        while self._unwritten:
            batch, self._unwritten = self._unwritten[:BATCH], self._unwritten[BATCH:]
            try:
                await self._ground.store.add_egress(batch)
                for record in batch:
                    if record.verdict == "denied" and self._is_news(record):
                        await self._tell(record)
            except ForkyardError as error:
                log.error("egress not recorded", records=len(batch), error=error.message)

    def _note(self, record: EgressRecord) -> None:
        if record.verdict != "denied" or record.exec_id is None:
            return
        key = (record.sandbox_id, record.exec_id)
        denials = self._denials.setdefault(key, {})
        if len(denials) < _DENIALS_PER_EXEC:
            denials[destination(record)] = None
        self._denials.move_to_end(key)
        while len(self._denials) > _REMEMBERED:
            self._denials.popitem(last=False)

    def denials(self, sandbox_id: str, exec_id: str) -> list[str]:
        """What an exec was refused lately, such as `example.com:443`."""
        found = list(self._denials.get((sandbox_id, exec_id), ()))
        named = {item.rpartition(":")[0] for item in found}
        return [item for item in found if item not in named]  # of a name and a port of it, the second says it all

    def _is_news(self, record: EgressRecord) -> bool:
        now, key = self._ground.activity.clock(), (record.sandbox_id, destination(record))
        if now - self._told.get(key, -EVENT_EVERY_S) < EVENT_EVERY_S:
            return False
        self._told[key] = now
        self._told.move_to_end(key)
        while len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        return True

    async def _tell(self, record: EgressRecord) -> None:
        data = record.model_dump(include={"kind", "exec_id", "process", "trace_id", "name", "address", "port"})
        await self._ground.store.add_event(
            "egress.denied", sandbox_id=record.sandbox_id, detail=record.reason, data=data
        )

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def page(
        self,
        sandbox_id: str,
        *,
        exec_id: str | None = None,
        kind: str | None = None,
        verdict: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> Page[EgressRecord]:
        """Oldest first; `next_cursor` is the `after` of the next page. Also of a sandbox that has ended."""
        await self._ground.record(sandbox_id)
        if self._flusher is not None:  # whoever asks has often just seen what he asks about
            await asyncio.wait([self._flusher], timeout=WAIT_FOR_WRITTEN_S)
        found = await self._ground.store.list_egress(
            sandbox_id, exec_id=exec_id, kind=kind, verdict=verdict, after=after, limit=limit + 1
        )
        more = len(found) > limit
        found = found[:limit]
        return Page[EgressRecord](items=found, next_cursor=str(found[-1].id) if more else None)

    async def refused(self, sandbox_id: str, most: int = 5) -> list[str]:
        """Where it was not let go, such as `example.com:443`."""
        page = await self.page(sandbox_id, verdict="denied")
        return list(dict.fromkeys(destination(record) for record in page.items))[:most]

    async def before_newest(self, sandbox_id: str, count: int) -> int:
        return await self._ground.store.egress_before_newest(sandbox_id, count)

    @asynccontextmanager
    async def follow(
        self,
        sandbox_id: str,
        *,
        exec_id: str | None = None,
        kind: str | None = None,
        verdict: str | None = None,
        after: int | None = None,
    ) -> AsyncIterator[AsyncIterator[EgressRecord]]:
        """Records after the id `after`, without end; by default those that come from now on."""
        await self._ground.record(sandbox_id)
        if self._followers >= MAX_FOLLOWERS:
            raise NoCapacity(f"{MAX_FOLLOWERS} clients follow egress already; close some, or page with `after`")
        self._followers += 1
        try:
            start = await self._ground.store.last_egress_id(sandbox_id) if after is None else after
            yield self._rows(sandbox_id, exec_id, kind, verdict, start)
        finally:
            self._followers -= 1

    async def _rows(
        self, sandbox_id: str, exec_id: str | None, kind: str | None, verdict: str | None, after: int
    ) -> AsyncIterator[EgressRecord]:
        while True:
            news = self._ground.store.news
            found = await self._ground.store.list_egress(
                sandbox_id, exec_id=exec_id, kind=kind, verdict=verdict, after=after, limit=BATCH
            )
            for record in found:
                yield record
                after = record.id
            if not found:
                await news.wait()

    async def totals(self, sandbox_id: str) -> EgressTotals:
        """Over its life, and over all its machines."""
        traffic = await self._networks.moved(sandbox_id)
        return EgressTotals(
            connections=traffic.connections,
            denied=traffic.denied,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
        )


def destination(record: EgressRecord) -> str:
    where = record.name or record.address or "?"
    return where if record.port is None or record.kind == "dns" else f"{where}:{record.port}"
