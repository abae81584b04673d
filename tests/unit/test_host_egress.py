"""Records on their way out of the host."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from forkyard.host.egress import EgressQueue
from forkyard.models.network import EgressRecord

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def record(sandbox_id: str) -> EgressRecord:
    return EgressRecord(at=datetime.now(UTC), sandbox_id=sandbox_id, kind="dns", verdict="allowed")


async def test_records_come_in_order_and_what_did_not_fit_is_counted_per_sandbox() -> None:
    queue = EgressQueue(most=2)
    for sandbox_id in ("a", "b", "b", "c", "b"):
        queue.put(record(sandbox_id))
    records = queue.records()
    got = [await anext(records) for _ in range(4)]
    assert [one.sandbox_id for one in got] == ["a", "b", "b", "c"]
    assert [one.verdict for one in got] == ["allowed", "allowed", "failed", "failed"]
    assert [(one.reason or "").split()[0] for one in got[2:]] == ["2", "1"]
    queue.put(record("d"))
    assert (await anext(records)).sandbox_id == "d"
    await records.aclose()  # type: ignore[attr-defined]
