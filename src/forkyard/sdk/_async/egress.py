"""What left a sandbox, and what may."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Literal

from forkyard.models import Page, SandboxInfo
from forkyard.models.network import EgressRecord, EgressTotals, Verdict
from forkyard.sdk import validation, wire
from forkyard.sdk._async import runtime
from forkyard.sdk._async.transport import AsyncTransport

Kind = Literal["tcp", "dns", "http"]


class AsyncEgress:
    """The connections and DNS queries of one sandbox: who made each, where it went, and what became of it."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox = f"/sandboxes/{sandbox_id}"
        self._path = f"{self._sandbox}/egress"

    async def list(
        self,
        *,
        exec_id: str | None = None,
        kind: Kind | None = None,
        verdict: Verdict | None = None,
        after: int | None = None,
        limit: int | None = None,
        tail: int | None = None,
    ) -> list[EgressRecord]:
        """Oldest first, also after the sandbox has ended; `after` a record's id; at most the first `limit`, or of the
        newest `tail`. An open connection is no record yet."""
        found: list[EgressRecord] = []
        while limit is None or len(found) < limit:
            wanted = wire.PAGE_ITEMS if limit is None else min(wire.PAGE_ITEMS, limit - len(found))
            params = {"exec_id": exec_id, "kind": kind, "verdict": verdict, "after": after, "limit": wanted}
            answer = await self._transport.request("GET", self._path, params={**params, "tail": tail})
            page = wire.parse(Page[EgressRecord], answer.content)
            found += page.items
            if page.next_cursor is None or not page.items:
                break
            after, tail = page.items[-1].id, None
        return found

    async def follow(
        self,
        *,
        exec_id: str | None = None,
        kind: Kind | None = None,
        verdict: Verdict | None = None,
        after: int | None = None,
    ) -> runtime.Flow[EgressRecord]:
        """Records as they come (with `after`, also those since that one), without end, over restarts of the daemon."""
        params = {"exec_id": exec_id, "kind": kind, "verdict": verdict}
        stream = self._transport.follow(
            self._path, EgressRecord.model_validate, lambda record: record.id, params=params, after=after
        )
        async with aclosing(stream) as records:
            async for record in records:
                yield record

    async def totals(self) -> EgressTotals:
        """Over the life of the sandbox."""
        answer = await self._transport.request("GET", f"{self._path}/totals")
        return wire.parse(EgressTotals, answer.content)

    async def export(self, path: str | os.PathLike[str], *, exec_id: str | None = None) -> int:
        """Write all records to a file, one JSON document per line; returns how many."""
        records = await self.list(exec_id=exec_id)
        text = "".join(json.dumps(record.model_dump(mode="json")) + "\n" for record in records)
        await runtime.blocking(Path(path).write_text, text)
        return len(records)

    async def allow(
        self, domain: str | None = None, *, cidr: str | None = None, ports: Sequence[int] = ()
    ) -> SandboxInfo:
        """From now on this may be reached, whatever other rules say. `*.example.com` is all names below; private
        networks are opened by `cidr` only."""
        return await self._rule("allow", domain, cidr, ports)

    async def deny(
        self, domain: str | None = None, *, cidr: str | None = None, ports: Sequence[int] = ()
    ) -> SandboxInfo:
        """From now on this may not be reached; open connections to it end."""
        return await self._rule("deny", domain, cidr, ports)

    async def set(self, network: validation.Network) -> SandboxInfo:
        """Replace the whole policy: a preset's name, an `EgressPolicy`, or a `NetworkPolicy`."""
        body = {"network": validation.network_policy(network).model_dump(mode="json")}
        answer = await self._transport.request("PATCH", self._sandbox, body=body, again=True)
        return wire.parse(SandboxInfo, answer.content)

    async def _rule(
        self, action: Literal["allow", "deny"], domain: str | None, cidr: str | None, ports: Sequence[int]
    ) -> SandboxInfo:
        rule = validation.egress_rule(action=action, domain=domain, cidr=cidr, ports=[*ports])
        answer = await self._transport.request("POST", f"{self._path}/rules", body=rule.model_dump(), again=True)
        return wire.parse(SandboxInfo, answer.content)
