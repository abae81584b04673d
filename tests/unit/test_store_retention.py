"""What ended long ago is forgotten; what something refers to is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forkyard.lifecycle import Cause, State
from forkyard.models import Shape
from forkyard.store.records import IdempotencyClaim, NewSandbox
from forkyard.store.sql import Store

pytestmark = pytest.mark.anyio
SOON = timedelta(seconds=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "forkyard.db")
    yield store
    await store.close()


async def deleted(store: Store, sandbox_id: str) -> None:
    await store.add_sandbox(NewSandbox(sandbox_id, Shape()), IdempotencyClaim("key", sandbox_id, "hash"))
    await store.transition(sandbox_id, 1, State.CREATING, State.DELETING, Cause.DELETED_BY_USER)
    await store.transition(sandbox_id, 1, State.DELETING, State.DELETED, Cause.DELETED_BY_USER)


async def test_a_sandbox_that_was_deleted_long_ago_is_forgotten_with_its_events(store: Store) -> None:
    await deleted(store, "old")
    await store.add_sandbox(NewSandbox("lives", Shape()))
    await store.add_event("daemon.started")
    assert await store.forget_ended(datetime.now(UTC) - timedelta(days=1)) == 0
    assert await store.forget_ended(datetime.now(UTC) + SOON) == 2
    assert await store.forget_ended(datetime.now(UTC) + SOON) == 0
    assert await store.sandbox("old") is None
    assert {event.sandbox_id for event in await store.list_events()} == {"lives"}


async def test_one_with_a_snapshot_is_remembered_until_that_is_gone(store: Store) -> None:
    await store.add_sandbox(NewSandbox("old", Shape()))
    await store.transition("old", 1, State.CREATING, State.RUNNING, Cause.READY)
    await store.add_snapshot("sc-1", "old", Shape())
    await store.finish_snapshot("sc-1", size_bytes=1, paused_ms=1.0)
    await store.transition("old", 1, State.RUNNING, State.DELETING, Cause.DELETED_BY_USER)
    await store.transition("old", 1, State.DELETING, State.DELETED, Cause.DELETED_BY_USER)
    assert await store.forget_ended(datetime.now(UTC) + SOON) == 0
    await store.retire_snapshot("sc-1")
    await store.forget_snapshot("sc-1")
    assert await store.forget_ended(datetime.now(UTC) + SOON) == 1
