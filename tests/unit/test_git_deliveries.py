"""When deliveries are attempted; what an attempt does is tested with triggers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from forkyard.git.actions import Actions
from forkyard.git.deliveries import Deliveries, Patience
from forkyard.git.triggers import Triggers
from forkyard.models.git_triggers import DevServerAction
from forkyard.store.sql import Store
from forkyard.store.triggers import DeliveryRecord

NOW = datetime.now(UTC)
DELIVERY = DeliveryRecord(
    id="d1",
    trigger_id="g1",
    event="push",
    ref="refs/heads/main",
    before="0" * 40,
    after="1" * 40,
    payload={},
    created_at=NOW,
    next_at=NOW,
)


class SlowStore:
    """Its second reading begins during the first attempt and ends after it."""

    def __init__(self) -> None:
        self.readings = 0
        self.attempted = asyncio.Event()
        self.may_end = asyncio.Event()
        self.noted = asyncio.Event()
        self.read_often = asyncio.Event()

    async def due_deliveries(self, now: datetime, *, limit: int) -> tuple[list[DeliveryRecord], datetime | None]:
        self.readings += 1
        if self.readings == 2:
            self.may_end.set()
            await self.noted.wait()
            await asyncio.sleep(0)  # the attempt has gone from the list of those that run
        if self.readings >= 3:
            self.read_often.set()
            return [], None
        return [DELIVERY], None

    async def trigger(self, trigger_id: str) -> None:
        self.attempted.set()
        await self.may_end.wait()

    async def note_delivery(self, delivery_id: str, changes: Mapping[str, Any]) -> None:
        self.noted.set()


class Watching:
    def __init__(self) -> None:
        self.news = asyncio.Event()


def test_an_action_that_nothing_does_yet_is_tried_again_soon() -> None:
    actions = Actions(cast(Any, None), cast(Any, None), cast(Any, SimpleNamespace(create=None)))
    outcome = asyncio.run(actions.perform(cast(Any, None), DevServerAction(dev_server_id="dev1"), DELIVERY))
    assert not outcome.ok and outcome.retry and "dev_server" in str(outcome.error)


def test_an_attempt_that_ends_while_the_store_is_read_is_not_begun_again() -> None:
    async def noted() -> int:
        store, watching = SlowStore(), Watching()
        attempts = 0

        class Counted(Deliveries):
            async def _attempt(self, delivery: DeliveryRecord) -> None:
                nonlocal attempts
                attempts += 1
                await super()._attempt(delivery)

        deliveries = Counted(cast(Store, store), cast(Triggers, watching), cast(Actions, None), Patience(first_s=0.01))
        running = asyncio.create_task(deliveries.run())
        async with asyncio.timeout(10):
            await store.attempted.wait()
            watching.news.set()  # something else is pushed meanwhile
            await store.read_often.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return attempts

    assert asyncio.run(noted()) == 1
