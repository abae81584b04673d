"""Delivers what triggers have to tell: at least once each, again and later if it fails, one at a time per trigger.

Owns: when the next attempt is, and when to give up. A delivery is a row until its outcome is written into it, so a
daemon that dies half-way leaves it to the next one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from forkyard.errors import ForkyardError
from forkyard.git.actions import Actions
from forkyard.git.triggers import Triggers
from forkyard.git.webhooks import Outcome
from forkyard.store.sql import Store
from forkyard.store.triggers import DeliveryRecord

log = structlog.get_logger(__name__)

AT_ONCE = 16
KEPT_ATTEMPTS = 50
KEPT = timedelta(days=30)
#: How often refs are compared with what was told, and old deliveries dropped.
LOOK_S = 60.0
_GROWTH = 3.0


@dataclass(frozen=True)
class Patience:
    """Eight attempts within an hour: after 5 s, 15 s, 45 s … and at most half an hour, each a fifth more or less."""

    tries: int = 8
    first_s: float = 5.0
    most_s: float = 1800.0

    def wait_s(self, tries: int) -> float:
        exact: float = min(self.first_s * _GROWTH ** (tries - 1), self.most_s)
        return exact * random.uniform(0.8, 1.2)


class Deliveries:
    def __init__(self, store: Store, triggers: Triggers, actions: Actions, patience: Patience) -> None:
        self._store = store
        self._triggers = triggers
        self._actions = actions
        self._patience = patience
        self._running: dict[str, asyncio.Task[None]] = {}  # by trigger

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        look_at = loop.time() + LOOK_S
        news = self._triggers.news
        try:
            while True:
                news.clear()
                wait_s = LOOK_S
                try:
                    if loop.time() >= look_at:
                        await self._triggers.look_everywhere()
                        await self._store.drop_deliveries(datetime.now(UTC) - KEPT)
                        look_at = loop.time() + LOOK_S
                    wait_s = await self._begin_due()
                except ForkyardError as error:
                    log.error("deliveries are late", error=error.message)
                    wait_s = self._patience.first_s
                try:
                    async with asyncio.timeout(min(wait_s, max(0.0, look_at - loop.time()))):
                        await news.wait()
                except TimeoutError:
                    pass
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _begin_due(self) -> float:
        """How long nothing will be due, if nothing new comes."""
        now = datetime.now(UTC)
        busy = set(self._running)  # an attempt may end while the store is read, which then still has it as due
        due, later = await self._store.due_deliveries(now, limit=4 * AT_ONCE)
        for delivery in due:
            if delivery.trigger_id not in busy and len(self._running) < AT_ONCE:
                task = asyncio.create_task(self._attempt(delivery), name=f"delivery {delivery.id}")
                self._running[delivery.trigger_id] = task
        return LOOK_S if later is None else max(0.0, (later - now).total_seconds())

    async def _attempt(self, delivery: DeliveryRecord) -> None:
        try:
            outcome = await self._outcome(delivery)
            await self._store.note_delivery(delivery.id, self._changes(delivery, outcome))
        except Exception as error:
            log.error("a delivery went wrong", delivery=delivery.id, exc_info=error)
            # Else it would be due at once, for ever.
            later = datetime.now(UTC) + timedelta(seconds=self._patience.most_s)
            await self._store.note_delivery(delivery.id, {"next_at": later})
        finally:
            self._running.pop(delivery.trigger_id, None)
            self._triggers.news.set()

    async def _outcome(self, delivery: DeliveryRecord) -> Outcome:
        trigger = await self._store.trigger(delivery.trigger_id)
        if trigger is None or not trigger.enabled:
            return Outcome(False, 0.0, error="the trigger is turned off", retry=False)
        try:
            action = self._triggers.action(trigger)
        except ForkyardError as error:
            return Outcome(False, 0.0, error=error.message)
        return await self._actions.perform(trigger, action, delivery)

    def _changes(self, delivery: DeliveryRecord, outcome: Outcome) -> Mapping[str, Any]:
        now = datetime.now(UTC)
        attempt = {
            "at": now.isoformat(),
            "status": outcome.status,
            "duration_ms": outcome.duration_ms,
            "error": outcome.error,
            "response": outcome.response,
        }
        tries = delivery.tries + 1
        changes: dict[str, Any] = {"tries": tries, "attempts": [*delivery.attempts, attempt][-KEPT_ATTEMPTS:]}
        if outcome.ok:
            return {**changes, "status": "delivered", "next_at": None, "finished_at": now}
        log.info("delivery failed", delivery=delivery.id, attempt=tries, error=outcome.error)
        if not outcome.retry or tries >= self._patience.tries:
            return {**changes, "status": "failed", "next_at": None, "finished_at": now}
        return {**changes, "next_at": now + timedelta(seconds=self._patience.wait_s(tries))}
