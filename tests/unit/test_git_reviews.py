"""Which reviews are under way; what one does is tested with the real git."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from forkyard.git.review import Reviews
from forkyard.store.reviews import ReviewRecord

RECORD = ReviewRecord(
    id="rv1", key="k", state="waiting", repo_id=None, request={}, target={}, asked_by={}, created_at=datetime.now(UTC)
)


def test_a_verdict_given_just_as_the_steps_end_is_still_waited_for() -> None:
    async def done_with_posting() -> bool:
        parts = cast(Any, SimpleNamespace(ground=SimpleNamespace(store=None), github_api=""))
        reviews = Reviews(parts, parts, parts)
        posted = asyncio.Event()
        may_post = asyncio.Event()

        async def steps() -> None:
            pass

        async def posting() -> None:
            await may_post.wait()
            posted.set()

        reviews._begin(RECORD, steps())
        await asyncio.sleep(0)  # the steps have ended, and nobody has been told yet
        reviews._begin(RECORD, posting())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        under_way = reviews._running[RECORD.id]
        may_post.set()
        await asyncio.wait((under_way,), timeout=10)
        await asyncio.sleep(0)
        return posted.is_set() and not reviews._running

    assert asyncio.run(done_with_posting())
