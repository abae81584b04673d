"""Reviews: run a pull request's head in a copy of a sandbox, hand what came of it to a reviewer, keep or post its verdict.

Owns: the order of these steps, and that one head gets one review however often it is asked for. The code under review is
a stranger's: it runs in a copy that is deleted, by default without the identity and the secrets of the sandbox it was
copied from, and the diff comes from the repository and not from the copy. Where things run: `git.review_room`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import structlog

from forkyard.control.identities import Principal
from forkyard.control.inside import GIT_HOST
from forkyard.control.pages import cursor_after, place_of
from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    Conflict,
    ForkyardError,
    HostFailure,
    InternalError,
    InvalidRequest,
    NotFound,
    RevisionNotFound,
)
from forkyard.git import verdicts
from forkyard.git.names import NO_SHA
from forkyard.git.pull_requests import PullRequests, Unprocessable
from forkyard.git.review_room import Checkout, ReviewRoom
from forkyard.git.sync import github_name
from forkyard.git.webhooks import Outcome, Sender
from forkyard.models import Page
from forkyard.models.git_triggers import Action, ReviewAction
from forkyard.models.reviews import (
    ClientReviewer,
    CommandReviewer,
    Dossier,
    GitHubTarget,
    HostedTarget,
    HttpReviewer,
    ReviewCreate,
    ReviewDiff,
    ReviewInfo,
    ReviewTarget,
    ReviewVerdict,
)
from forkyard.net.resolver import HostResolver
from forkyard.store.records import Place
from forkyard.store.remotes import RemoteRecord
from forkyard.store.reviews import ReviewRecord
from forkyard.store.triggers import DeliveryRecord, TriggerRecord

if TYPE_CHECKING:
    from forkyard.git.automation import Outward
    from forkyard.git.hosting import GitHosting

log = structlog.get_logger(__name__)

AT_ONCE = 4
_HEADS = "refs/heads/"
#: What happened to a pull request that has a new head.
_REVIEWED = ("opened", "reopened", "synchronize", "ready_for_review")
WAIT_S = 30.0


class Reviews:
    def __init__(self, control: ControlPlane, hosting: GitHosting, outward: Outward) -> None:
        self._control = control
        self._hosting = hosting
        self._store = control.ground.store
        self._room = ReviewRoom(control)
        self._outward = outward
        self.github_api = outward.github_api
        #: Where a sandbox that has an identity finds a repository that is hosted here.
        self.inside_url: Callable[[str], str] = lambda repo_id: f"http://{GIT_HOST}/{repo_id}.git"
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._resolver = HostResolver()
        self._context: ssl.SSLContext | None = None

    async def start(self) -> None:
        self._context = await asyncio.to_thread(_context, self._outward)
        await self._store.fail_reviews("the daemon ended while it was at it; ask for it again")
        await self._room.clear()

    async def stop(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._resolver.close()

    # ── asked for ────────────────────────────────────────────────────────────────────────────────────────────────

    async def request(self, request: ReviewCreate, by: Principal) -> ReviewInfo:
        """The review of this head; it is begun if there is none, or the last one failed. A webhook that is delivered twice
        finds the review of the first time."""
        target, repo_id = await self._found(request)
        if request.sandbox is not None and request.snapshot is not None:
            raise InvalidRequest("a review begins with a sandbox or with a snapshot; name one", field="snapshot")
        number = "" if target.number is None else f"#{target.number}"
        where = repo_id or target.repository.lower()
        key = f"{target.type}:{where}{number}:{target.base_sha if repo_id else ''}:{target.head_sha}:{request.key}"
        new = ReviewRecord(
            id="rv" + secrets.token_hex(8),
            key=key,
            state="running",
            repo_id=repo_id,
            request=request.model_dump(mode="json"),
            target=target.model_dump(mode="json"),
            asked_by={"kind": by.kind, "id": by.id, "name": by.name},
            created_at=datetime.now(UTC),
        )
        record, mine = await self._store.claim_review(new)
        if mine:
            await self._control.identities.record(
                by, "git.review", repo_id or target.repository, data={"review_id": record.id, "head": target.head_sha}
            )
            self._begin(record, self._run(record, request, target))
        return _info(record)

    async def perform(self, trigger: TriggerRecord, action: Action, delivery: DeliveryRecord) -> Outcome:
        """Of a trigger: of the branch that was pushed. Whether the review succeeds is not the trigger's to say."""
        assert isinstance(action, ReviewAction)
        began = time.monotonic()
        repo = await self._hosting.repositories.get(trigger.repo_id)
        branch = delivery.ref.removeprefix(_HEADS)
        base = action.base or await self._hosting.repositories.default_branch(repo)
        if not delivery.ref.startswith(_HEADS) or delivery.after == NO_SHA or branch == base:
            return Outcome(True, 0.0, response="there is nothing to review")
        request = ReviewCreate.model_validate(
            {
                **action.plan.model_dump(mode="json"),
                "target": {"type": "hosted", "repo": repo.id, "head": delivery.after, "base": base},
            }
        )
        found = await self.request(request, Principal("key", trigger.key_id, f"trigger {trigger.id}"))
        return Outcome(True, round((time.monotonic() - began) * 1000, 1), response=found.id)

    async def told(self, remote: RemoteRecord, body: bytes) -> ReviewInfo | None:
        """Of the webhook of a remote on GitHub, about a pull request. None: there is nothing to review. Whose repository
        it is says the remote, not the body."""
        try:
            event = json.loads(body)
            action, number = event["action"], int(event["number"])
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest("this is no event of a pull request") from None
        if remote.review is None or action not in _REVIEWED:
            return None
        owner, name = github_name(remote.url)
        target = {"type": "github", "owner": owner, "repo": name, "number": number}
        credential = {"github_app": remote.github_app} if remote.github_app else {"secret": remote.secret}
        request = ReviewCreate.model_validate({**remote.review, "target": {**target, **credential}})
        return await self.request(request, Principal("key", "", f"remote {remote.name}"))

    async def _found(self, request: ReviewCreate) -> tuple[ReviewTarget, str | None]:
        wanted = request.target
        if isinstance(wanted, GitHubTarget):
            pull = await (await self._github(wanted)).pull(wanted)
            name = f"{wanted.owner}/{wanted.repo}"
            try:
                return ReviewTarget(
                    type="github",
                    repository=name,
                    number=wanted.number,
                    title=pull.title,
                    body=pull.body,
                    base=pull.base,
                    head=pull.head,
                    base_sha=pull.base_sha,
                    head_sha=pull.head_sha,
                ), None
            except ValueError:
                raise InvalidRequest("GitHub's answer has no commits in it", field="target") from None
        repo = await self._hosting.repositories.get(wanted.repo)
        base = wanted.base or await self._hosting.repositories.default_branch(repo)
        head_commit = await self._hosting.history.commit(repo, wanted.head)
        base_commit = await self._hosting.history.commit(repo, base)
        title, _, body = head_commit.message.partition("\n")
        return ReviewTarget(
            type="hosted",
            repository=repo.record.name,
            title=title,
            body=body.strip(),
            base=base,
            head=wanted.head,
            base_sha=base_commit.sha,
            head_sha=head_commit.sha,
        ), repo.id

    # ── looked at ────────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, review_id: str, *, wait_s: float = 0.0) -> ReviewInfo:
        """`wait_s`: come back earlier only if it is no longer running."""
        task = self._running.get(review_id)
        if task is not None and wait_s > 0:
            await asyncio.wait((task,), timeout=min(wait_s, WAIT_S))
        return _info(await self._record(review_id))

    async def dossier(self, review_id: str) -> Dossier:
        record = await self._record(review_id)
        if record.dossier is None:
            raise Conflict(f"the steps of review {review_id} have not ended yet; it is {record.state}")
        return Dossier.model_validate(record.dossier)

    async def list(self, *, repo: str | None, limit: int, cursor: str | None) -> Page[ReviewInfo]:
        repo_id = None if repo is None else (await self._hosting.repositories.get(repo)).id
        found = await self._store.list_reviews(repo_id=repo_id, before=place_of(cursor), limit=limit + 1)
        more = len(found) > limit
        found = found[:limit]
        place = Place(found[-1].created_at, found[-1].id) if more else None
        return Page[ReviewInfo](
            items=[_info(record) for record in found], next_cursor=None if place is None else cursor_after(place)
        )

    async def give(self, review_id: str, verdict: ReviewVerdict) -> ReviewInfo:
        """The verdict of a client that asked to be the reviewer."""
        record = await self._record(review_id)
        if not await self._store.move_review(review_id, "waiting", "posting", verdict=verdict.model_dump(mode="json")):
            raise Conflict(f"review {review_id} does not wait for a verdict; it is {record.state}")
        request = ReviewCreate.model_validate(record.request)
        dossier = Dossier.model_validate(record.dossier)
        self._begin(record, self._finish(record, self._post(record, request, dossier, verdict)))
        return await self.get(review_id, wait_s=WAIT_S)

    async def _record(self, review_id: str) -> ReviewRecord:
        record = await self._store.review(review_id)
        if record is None:
            raise NotFound(f"there is no review {review_id!r}")
        return record

    # ── run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, record: ReviewRecord, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=f"review {record.id}")
        self._running[record.id] = task
        task.add_done_callback(lambda _: self._ended(record.id, task))

    def _ended(self, review_id: str, task: asyncio.Task[None]) -> None:
        """A verdict that was given at once has begun another task under this id by now."""
        if self._running.get(review_id) is task:
            del self._running[review_id]

    async def _run(self, record: ReviewRecord, request: ReviewCreate, target: ReviewTarget) -> None:
        async with self._limit:
            await self._finish(record, self._reviewed(record, request, target))

    async def _finish(self, record: ReviewRecord, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as raised:
            if not isinstance(raised, ForkyardError):
                log.exception("a review failed", review=record.id)
            error = raised if isinstance(raised, ForkyardError) else InternalError()
            for state in ("running", "posting"):
                await self._store.move_review(record.id, state, "failed", error=error.message[:4000])

    async def _reviewed(self, record: ReviewRecord, request: ReviewCreate, target: ReviewTarget) -> None:
        diff = await self._diff(request, target)
        checkout = await self._checkout(record, request, target)
        by = str(record.asked_by["id"]) if record.asked_by["kind"] == "key" else ""
        steps = await self._room.steps(record.id, request, checkout, by)
        dossier = Dossier(review_id=record.id, target=target, steps=steps, diff=diff)
        handed = dossier.model_dump(mode="json")
        if isinstance(request.reviewer, ClientReviewer):
            await self._store.move_review(record.id, "running", "waiting", dossier=handed)
            return
        verdict = await self._asked(record.id, request, dossier, by)
        moved = await self._store.move_review(
            record.id, "running", "posting", dossier=handed, verdict=verdict.model_dump(mode="json")
        )
        if moved:
            await self._post(record, request, dossier, verdict)

    async def _diff(self, request: ReviewCreate, target: ReviewTarget) -> ReviewDiff:
        if isinstance(request.target, GitHubTarget):
            files = await (await self._github(request.target)).files(request.target)
            return ReviewDiff(
                files=files,
                additions=sum(file.additions for file in files),
                deletions=sum(file.deletions for file in files),
            )
        repo = await self._hosting.repositories.get(request.target.repo)
        found = await self._hosting.history.compare(repo, target.base_sha, target.head_sha)
        return ReviewDiff(
            files=found.files, additions=found.additions, deletions=found.deletions, truncated=found.truncated
        )

    async def _checkout(self, record: ReviewRecord, request: ReviewCreate, target: ReviewTarget) -> Checkout:
        if isinstance(request.target, HostedTarget):
            assert record.repo_id is not None
            identity_id = await self._hosting.only(await self._hosting.repositories.get(record.repo_id), "read")
            url = self.inside_url(record.repo_id)
            return Checkout(url, target.head_sha, target.base_sha, identity_id)
        pull = await (await self._github(request.target)).pull(request.target)
        if pull.head_sha != target.head_sha:
            raise RevisionNotFound("the pull request has a newer head by now; ask again for a review of that")
        return Checkout(request.target.clone_url or pull.clone_url, target.head_sha, target.base_sha, None)

    async def _asked(self, review_id: str, request: ReviewCreate, dossier: Dossier, by: str) -> ReviewVerdict:
        reviewer = request.reviewer
        body = json.dumps(dossier.model_dump(mode="json")).encode()
        if isinstance(reviewer, CommandReviewer):
            return verdicts.parsed(await self._room.reviewer(review_id, request, reviewer, body, by))
        if isinstance(reviewer, HttpReviewer):
            return verdicts.parsed(await self._posted_to(reviewer, body))
        return verdicts.of_steps(dossier)

    async def _posted_to(self, reviewer: HttpReviewer, body: bytes) -> bytes:
        assert self._context is not None
        sender = Sender(
            self._resolver,
            self._context,
            timeout_s=reviewer.timeout_s,
            allow_private=self._outward.allow_private,
            max_response_bytes=verdicts.MAX_VERDICT_BYTES + 1,
        )
        private = {}
        if reviewer.secret is not None:
            private["Authorization"] = f"Bearer {await self._control.secrets.stored(reviewer.secret)}"
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "Forkyard"}
        outcome = await sender.post(reviewer.url, headers, private, body, allow_private=reviewer.allow_private)
        if not outcome.ok:
            raise InvalidRequest(f"the reviewer at {reviewer.url} gave no verdict: {outcome.error}")
        return (outcome.response or "").encode()

    # ── posted ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _post(
        self, record: ReviewRecord, request: ReviewCreate, dossier: Dossier, verdict: ReviewVerdict
    ) -> None:
        posted = None
        if isinstance(request.target, GitHubTarget):
            posted = await self._to_github(record, request.target, dossier, verdict)
        await self._store.move_review(record.id, "posting", "done", posted=posted)

    async def _to_github(
        self, record: ReviewRecord, target: GitHubTarget, dossier: Dossier, verdict: ReviewVerdict
    ) -> dict[str, Any]:
        github = await self._github(target)
        marker = f"<!-- forkyard-review:{record.id} -->"
        if (earlier := await github.find_review(target, marker)) is not None:
            return earlier
        comments, body = verdicts.placed(verdict, dossier.diff.files)
        # GitHub wants a body with all but an approval.
        body = f"{body or verdict.event.replace('_', ' ').capitalize()}\n\n{marker}"
        head = dossier.target.head_sha
        try:
            return await github.review(target, head, verdict.event, body, comments)
        except Unprocessable as refused:
            # Nobody may approve a pull request of his own; nor comment on a file GitHub shows otherwise than it told.
            log.warning("a review is posted as a comment", review=record.id, error=str(refused))
            said = verdicts.with_comments(f"**{verdict.event}**\n\n{verdict.body}", verdict.comments)
            try:
                return await github.review(target, head, "COMMENT", f"{said}\n\n{marker}", [])
            except Unprocessable as again:
                raise HostFailure(f"GitHub did not take the review: {again}") from None

    async def _github(self, target: GitHubTarget) -> PullRequests:
        assert self._context is not None
        if target.github_app is not None:
            token = await self._hosting.sync.github.token(target.github_app.model_dump())
        else:
            assert target.secret is not None
            token = await self._control.secrets.stored(target.secret)
        return PullRequests(self.github_api, token, self._context)


def _context(outward: Outward) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if outward.extra_ca_file is not None:
        context.load_verify_locations(outward.extra_ca_file)
    return context


def _info(record: ReviewRecord) -> ReviewInfo:
    return ReviewInfo(
        id=record.id,
        state=record.state,
        repo_id=record.repo_id,
        target=ReviewTarget.model_validate(record.target),
        steps=(record.dossier or {}).get("steps", []),
        verdict=None if record.verdict is None else ReviewVerdict.model_validate(record.verdict),
        posted=None if record.posted is None else dict(record.posted),
        error=record.error,
        created_at=record.created_at,
        ended_at=record.ended_at,
    )
