"""Triggers: what shall happen when a branch or a tag of a repository changes, and the noticing of it.

Owns: which change concerns which trigger, and that no change is missed. Where refs were when triggers were last told is
in the database, written together with the deliveries that tell of it. After a crash, and now and then, refs are
compared with that: a push that nobody had time to tell of is told then. Never does: the telling (`deliveries.py`).
"""

from __future__ import annotations

import asyncio
import json
import secrets as random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import structlog
from pydantic import ConfigDict, TypeAdapter

from forkyard.control.identities import Principal
from forkyard.control.pages import cursor_after, place_of
from forkyard.control.secrets import Secrets
from forkyard.errors import ForkyardError, InvalidRequest, NotFound
from forkyard.git import webhooks
from forkyard.git.globs import any_matches
from forkyard.git.history import FORMAT, parsed_log
from forkyard.git.names import NO_SHA
from forkyard.git.objects import EMPTY_TREE
from forkyard.git.refs import Refs
from forkyard.git.repositories import RefChange, Repo, Repositories
from forkyard.models import Page
from forkyard.models.git_triggers import (
    Action,
    Delivery,
    DeliveryInfo,
    DeliveryStatus,
    EventKind,
    TriggerCreate,
    TriggerInfo,
    TriggerUpdate,
    WebhookAction,
)
from forkyard.net.policy import Abroad
from forkyard.store.records import Place
from forkyard.store.sql import Store
from forkyard.store.triggers import DeliveryRecord, TriggerRecord

log = structlog.get_logger(__name__)

MAX_COMMITS = 20
MAX_MESSAGE = 1000
MAX_TRIGGERS = 100
HIDDEN = "***"
_HEADS, _TAGS = "refs/heads/", "refs/tags/"
_ACTION: TypeAdapter[Action] = TypeAdapter(Action, config=ConfigDict(hide_input_in_errors=True))


class Triggers:
    def __init__(
        self, store: Store, repositories: Repositories, refs: Refs, secrets: Secrets, *, allow_private: bool = False
    ) -> None:
        self._store = store
        self._repositories = repositories
        self._git = repositories.git
        self._refs = refs
        self._secrets = secrets
        self._allow_private = allow_private
        self._watched: set[str] = set()  # repositories that have triggers: pushes to others cost nothing here
        self._locks: dict[str, asyncio.Lock] = {}
        #: Set when there is something to deliver.
        self.news = asyncio.Event()

    async def start(self) -> None:
        self._watched = {record.repo_id for record in await self._store.list_triggers()}
        await self.look_everywhere()
        self._repositories.on_push.append(self.pushed)

    # ── what triggers there are ──────────────────────────────────────────────────────────────────────────────────

    async def create(
        self, repo: Repo, request: TriggerCreate, by: Principal, *, trigger_id: str | None = None
    ) -> TriggerInfo:
        """`trigger_id`: a `new_id` that the caller has written down before."""
        self._refuse_bad(request.action)
        now = datetime.now(UTC)
        trigger_id = trigger_id or new_id()
        record = TriggerRecord(
            id=trigger_id,
            repo_id=repo.id,
            events=list(dict.fromkeys(request.events)),
            branches=request.branches,
            tags=request.tags,
            paths=request.paths,
            action=self._sealed(trigger_id, request.action),
            enabled=request.enabled,
            key_id=by.id,
            created_at=now,
            updated_at=now,
        )
        async with self._lock(repo.id):
            if len(await self._store.list_triggers(repo.id)) >= MAX_TRIGGERS:
                raise InvalidRequest(f"a repository has at most {MAX_TRIGGERS} triggers; delete one first")
            await self._store.add_trigger(record, await self._refs.shas(repo))
            self._watched.add(repo.id)
        return self._info(record)

    async def list(self, repo: Repo) -> list[TriggerInfo]:
        return [self._info(record) for record in await self._store.list_triggers(repo.id)]

    async def get(self, repo: Repo, trigger_id: str) -> TriggerInfo:
        return self._info(await self._record(repo, trigger_id))

    async def update(self, repo: Repo, trigger_id: str, request: TriggerUpdate) -> TriggerInfo:
        await self._record(repo, trigger_id)
        changes = {key: value for key, value in request.model_dump(exclude={"action"}).items() if value is not None}
        if request.action is not None:
            self._refuse_bad(request.action)
            changes["action"] = self._sealed(trigger_id, request.action)
        record = await self._store.update_trigger(trigger_id, changes)
        if record is None:
            raise _missing(trigger_id)
        return self._info(record)

    async def delete(self, repo: Repo, trigger_id: str) -> None:
        """With its log."""
        await self._record(repo, trigger_id)
        async with self._lock(repo.id):
            await self._store.remove_trigger(trigger_id)
            if not await self._store.list_triggers(repo.id):
                self._watched.discard(repo.id)

    def action(self, record: TriggerRecord) -> Action:
        return _ACTION.validate_json(self._secrets.unseal(f"trigger:{record.id}", record.action))

    def _sealed(self, trigger_id: str, action: Action) -> str:
        return self._secrets.seal(f"trigger:{trigger_id}", action.model_dump_json())

    async def _record(self, repo: Repo, trigger_id: str) -> TriggerRecord:
        record = await self._store.trigger(trigger_id)
        if record is None or record.repo_id != repo.id:
            raise _missing(trigger_id)
        return record

    def _info(self, record: TriggerRecord) -> TriggerInfo:
        shown = {name: value for name, value in asdict(record).items() if name not in ("action", "key_id")}
        return TriggerInfo(**shown, action=_shown(self.action(record)))

    def _refuse_bad(self, action: Action) -> None:
        """What can be said now; the rest is seen when it is used."""
        if any("\0" in text for text in _texts(action.model_dump())):
            raise InvalidRequest("the action holds a NUL, which no program and no header can be given", field="action")
        if not isinstance(action, WebhookAction):
            return
        try:
            parts = urlsplit(action.url)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidRequest(f"action.url {action.url!r} is no URL: {error}", field="action.url") from None
        decision = Abroad(webhooks.HOW, private=action.allow_private or self._allow_private).host(host)
        if not decision.allowed:
            raise InvalidRequest(f"action.url: {decision.reason}", field="action.url")

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def deliveries(
        self, repo: Repo, trigger_id: str, *, status: DeliveryStatus | None, limit: int, cursor: str | None
    ) -> Page[DeliveryInfo]:
        await self._record(repo, trigger_id)
        found = await self._store.list_deliveries(trigger_id, status=status, before=place_of(cursor), limit=limit + 1)
        last = found[limit - 1] if len(found) > limit else None
        return Page[DeliveryInfo](
            items=[_delivery_info(record) for record in found[:limit]],
            next_cursor=None if last is None else cursor_after(Place(last.created_at, last.id)),
        )

    async def delivery(self, repo: Repo, trigger_id: str, delivery_id: str) -> Delivery:
        return _delivery(await self._delivery(repo, trigger_id, delivery_id))

    async def redeliver(self, repo: Repo, trigger_id: str, delivery_id: str) -> Delivery:
        """At once, and then as often as a new one. Its id stays."""
        await self._delivery(repo, trigger_id, delivery_id)
        changes = {"status": "pending", "tries": 0, "next_at": datetime.now(UTC), "finished_at": None}
        record = await self._store.note_delivery(delivery_id, changes)
        if record is None:
            raise NotFound(f"there is no delivery {delivery_id!r} any more")
        self.news.set()
        return _delivery(record)

    async def _delivery(self, repo: Repo, trigger_id: str, delivery_id: str) -> DeliveryRecord:
        await self._record(repo, trigger_id)
        record = await self._store.delivery(delivery_id)
        if record is None or record.trigger_id != trigger_id:
            raise NotFound(f"trigger {trigger_id!r} has no delivery {delivery_id!r}")
        return record

    # ── noticing ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def pushed(self, repo: Repo, changes: Sequence[RefChange], by: str | None) -> None:
        if repo.id in self._watched:
            async with self._lock(repo.id):
                await self._noticed(repo, changes, by)

    async def look_everywhere(self) -> None:
        """For what a crash, or a push that ended after its daemon, left untold."""
        for repo_id in sorted(self._watched):
            try:
                repo = await self._repositories.get(repo_id)
                if not self._repositories.is_written(repo):
                    async with self._lock(repo_id):
                        await self._noticed(repo, None, None)
            except NotFound:
                self._watched.discard(repo_id)
                self._locks.pop(repo_id, None)
            except ForkyardError as error:
                log.error("a repository was not looked at for triggers", repo=repo_id, error=error.message)

    def _lock(self, repo_id: str) -> asyncio.Lock:
        return self._locks.setdefault(repo_id, asyncio.Lock())

    async def _noticed(self, repo: Repo, given: Sequence[RefChange] | None, by: str | None) -> None:
        """`given` None: whatever there is. News can come out of order, or of what a look has found already: then what
        counts is where the ref is now."""
        seen = await self._store.seen_refs(repo.id, None if given is None else [change.ref for change in given])
        now: dict[str, str] | None = None
        if given is None:
            now = await self._refs.shas(repo)
            given = [RefChange(ref, "", "") for ref in sorted(seen.keys() | now.keys())]
        changes = []
        for change in given:
            if not change.ref.startswith((_HEADS, _TAGS)):
                continue
            at, new = seen.get(change.ref, NO_SHA), change.new
            if change.old != at:
                now = now if now is not None else await self._refs.shas(repo)
                new = now.get(change.ref, NO_SHA)
            if new != at:
                changes.append(RefChange(change.ref, at, new))
                seen[change.ref] = new
        if not changes:
            return
        triggers = [trigger for trigger in await self._store.list_triggers(repo.id) if trigger.enabled]
        new_deliveries = [one for change in changes for one in await self._told(repo, change, triggers, by)]
        moved = {change.ref: seen[change.ref] for change in changes if seen[change.ref] != NO_SHA}
        gone = [change.ref for change in changes if seen[change.ref] == NO_SHA]
        await self._store.see(repo.id, moved, gone, new_deliveries)
        self.news.set()

    async def _told(
        self, repo: Repo, change: RefChange, triggers: Sequence[TriggerRecord], by: str | None
    ) -> Sequence[DeliveryRecord]:
        found = []
        about: Mapping[str, Any] | None = None
        paths: Sequence[str] | None = None
        for trigger in triggers:
            event = event_for(trigger, change)
            if event is None:
                continue
            if trigger.paths:
                paths = paths if paths is not None else await self._changed_paths(repo, change)
                if not any(any_matches(trigger.paths, path) for path in paths):
                    continue
            about = about if about is not None else await self._about(repo, change, by)
            delivery_id, now = "d" + random.token_hex(10), datetime.now(UTC)
            found.append(
                DeliveryRecord(
                    id=delivery_id,
                    trigger_id=trigger.id,
                    event=event,
                    ref=change.ref,
                    before=change.old,
                    after=change.new,
                    payload={"event": event, "delivery": delivery_id, **about},
                    created_at=now,
                    next_at=now,
                )
            )
        return found

    async def _about(self, repo: Repo, change: RefChange, by: str | None) -> dict[str, Any]:
        commits = await self._commits(repo, change)
        return {
            "repository": {"id": repo.id, "name": repo.record.name},
            "ref": change.ref,
            "before": change.old,
            "after": change.new,
            "created": change.old == NO_SHA,
            "deleted": change.new == NO_SHA,
            "commits": commits[:MAX_COMMITS],
            "commits_truncated": len(commits) > MAX_COMMITS,
            "pusher": await self._pusher(by),
            "at": datetime.now(UTC).isoformat(),
        }

    async def _pusher(self, by: str | None) -> dict[str, str] | None:
        """None: it was found afterwards, or nobody said who they are."""
        if by is None:
            return None
        identity = await self._store.identity(by)
        return {"id": by, "name": by if identity is None else identity.name}

    async def _commits(self, repo: Repo, change: RefChange) -> Sequence[dict[str, Any]]:
        """Newest first, and one more than are shown."""
        if not change.ref.startswith(_HEADS) or change.new == NO_SHA:
            return []
        base = await self._base(repo, change)
        span = [change.new] if base is None else [f"{base}..{change.new}"]
        try:
            done = await self._git.run(repo.path, "log", "-z", FORMAT, f"--max-count={MAX_COMMITS + 1}", *span, "--")
        except ForkyardError as error:
            log.warning("the commits of a push cannot be listed", repo=repo.id, error=error.message)
            return []
        return [
            {
                "sha": commit.sha,
                "message": commit.message[:MAX_MESSAGE],
                "author": {"name": commit.author.name, "email": commit.author.email},
                "at": commit.committer.date.isoformat(),
            }
            for commit in parsed_log(done.stdout)
        ]

    async def _changed_paths(self, repo: Repo, change: RefChange) -> Sequence[str]:
        if not change.ref.startswith(_HEADS) or change.new == NO_SHA:
            return []
        args = ("diff-tree", "-r", "--no-renames", "--name-only", "-z")
        for base in (await self._base(repo, change), None):
            ends = (base or EMPTY_TREE, change.new, "--")
            done = await self._git.run(repo.path, *args, *ends, max_bytes=2**24, may_cut=True, ok=(0, 128))
            if not done.code or done.cut:
                return done.stdout.decode("utf-8", "replace").split("\0")[:-1]
        return []  # where it was is not there any more, nor is where it is

    async def _base(self, repo: Repo, change: RefChange) -> str | None:
        """Where what is new begins: for a new branch where it left the default one, if it did."""
        if change.old != NO_SHA:
            return change.old
        default = _HEADS + await self._repositories.default_branch(repo)
        if change.ref == default:
            return None
        done = await self._git.run(repo.path, "merge-base", default, change.new, ok=(0, 1, 128))
        return done.stdout.decode().split("\n")[0] or None


def new_id() -> str:
    return "g" + random.token_hex(8)


def event_for(trigger: TriggerRecord, change: RefChange) -> EventKind | None:
    """What this change is to this trigger; None: nothing."""
    kinds: list[EventKind]
    if change.ref.startswith(_HEADS):
        name, globs = change.ref.removeprefix(_HEADS), trigger.branches
        kinds = ["branch.created", "push"] if change.old == NO_SHA else ["push"]
        if change.new == NO_SHA:
            kinds = ["branch.deleted"]
    else:
        name, globs = change.ref.removeprefix(_TAGS), trigger.tags
        kinds = ["tag.deleted"] if change.new == NO_SHA else ["tag.created"]
    if globs and not any_matches(globs, name):
        return None
    return next((kind for kind in kinds if kind in trigger.events), None)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _shown(action: Action) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(action.model_dump_json())
    if shown.get("secret"):
        shown["secret"] = HIDDEN
    if "headers" in shown:
        shown["headers"] = dict.fromkeys(shown["headers"], HIDDEN)
    for secret in shown.get("sandbox", {}).get("secrets", {}).values():
        if secret.get("value"):
            secret["value"] = HIDDEN
    return shown


def _delivery_info(record: DeliveryRecord) -> DeliveryInfo:
    return DeliveryInfo.model_validate(vars(record))


def _delivery(record: DeliveryRecord) -> Delivery:
    return Delivery.model_validate(vars(record))


def _missing(trigger_id: str) -> NotFound:
    return NotFound(f"this repository has no trigger {trigger_id!r}; `forkyard git triggers ls` lists them")
