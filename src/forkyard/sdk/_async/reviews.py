"""Reviews: of branches that are hosted here, and of pull requests on GitHub."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from forkyard.errors import OperationTimeout
from forkyard.models import Page
from forkyard.models.reviews import Dossier, ReviewInfo, ReviewPlan, ReviewVerdict
from forkyard.sdk import validation, wire
from forkyard.sdk._async.transport import AsyncTransport

_POLL_S = 20.0


class AsyncReviews:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def branch(
        self,
        repo: str,
        head: str,
        base: str | None = None,
        *,
        plan: ReviewPlan | Mapping[str, Any] | None = None,
        reviewer: Callable[[Dossier], ReviewVerdict] | None = None,
        key: str = "",
        timeout_s: float = wire.CREATE_S,
    ) -> ReviewInfo:
        """Review what `head` changes of `base` (else the default branch) of a hosted repository: run the steps of the
        plan at the head, ask its reviewer, and keep the verdict.

        `reviewer` is a function of yours, called here, in place of the plan's. The same head is reviewed once, unless you
        give another `key`.
        """
        target = {"type": "hosted", "repo": repo, "head": head, "base": base}
        return await self._through(target, plan, reviewer, key, timeout_s)

    async def pull_request(
        self,
        owner: str,
        repo: str,
        number: int,
        *,
        secret: str,
        clone_url: str | None = None,
        plan: ReviewPlan | Mapping[str, Any] | None = None,
        reviewer: Callable[[Dossier], ReviewVerdict] | None = None,
        key: str = "",
        timeout_s: float = wire.CREATE_S,
    ) -> ReviewInfo:
        """Review a pull request on GitHub, and post the verdict there. `secret` names a stored secret with the token; it
        does not enter the sandbox. The sandbox fetches from `clone_url`, else from where GitHub says."""
        target = {"type": "github", "owner": owner, "repo": repo, "number": number, "secret": secret}
        return await self._through({**target, "clone_url": clone_url}, plan, reviewer, key, timeout_s)

    async def request(
        self, target: Mapping[str, Any], plan: ReviewPlan | Mapping[str, Any] | None = None, *, key: str = ""
    ) -> ReviewInfo:
        """Begin a review, or find the one of the same head; do not wait for it."""
        body = {**validation.review_plan(plan).model_dump(mode="json"), "target": dict(target), "key": key}
        answer = await self._transport.request("POST", "/git/reviews", body=body, again=True)
        return wire.parse(ReviewInfo, answer.content)

    async def _through(
        self,
        target: Mapping[str, Any],
        plan: ReviewPlan | Mapping[str, Any] | None,
        reviewer: Callable[[Dossier], ReviewVerdict] | None,
        key: str,
        timeout_s: float,
    ) -> ReviewInfo:
        if reviewer is not None:
            plan = {**validation.review_plan(plan).model_dump(mode="json"), "reviewer": {"type": "client"}}
        found = await self.request(target, plan, key=key)
        deadline_s = time.monotonic() + timeout_s
        while found.state in ("running", "posting"):
            if time.monotonic() > deadline_s:
                raise OperationTimeout(f"review {found.id} has not ended after {timeout_s:.0f} s; it goes on")
            found = await self.get(found.id, wait_s=_POLL_S)
        if found.state == "waiting" and reviewer is not None:
            return await self.give(found.id, reviewer(await self.dossier(found.id)))
        return found

    async def list(self, repo: str | None = None, *, limit: int | None = 100) -> list[ReviewInfo]:
        """Newest first; of one hosted repository, or all."""
        return await self._transport.items(Page[ReviewInfo], "/git/reviews", {"repo": repo}, limit)

    async def get(self, review_id: str, *, wait_s: float = 0.0) -> ReviewInfo:
        """`wait_s` (at most 30): come back earlier only if it no longer runs."""
        path = f"/git/reviews/{wire.segment(review_id)}"
        answer = await self._transport.request("GET", path, params={"wait_s": wait_s or None})
        return wire.parse(ReviewInfo, answer.content)

    async def dossier(self, review_id: str) -> Dossier:
        """What the reviewer was handed: the results of the steps, and the diff."""
        answer = await self._transport.request("GET", f"/git/reviews/{wire.segment(review_id)}/dossier")
        return wire.parse(Dossier, answer.content)

    async def give(self, review_id: str, verdict: ReviewVerdict) -> ReviewInfo:
        """A verdict, to a review that waits for one."""
        path = f"/git/reviews/{wire.segment(review_id)}/verdict"
        answer = await self._transport.request("POST", path, body=verdict.model_dump(mode="json"))
        return wire.parse(ReviewInfo, answer.content)
