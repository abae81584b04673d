"""Keeps repositories in step with remotes elsewhere: branches, tags and deletions, both ways.

Owns: when to look (after a push here, when the other host says so, every so often), and one sync at a time per remote.
Each compares three things: refs here, refs there, and where both last agreed. So it does not matter who told of a
change, how often, or whether a daemon died half-way, and a change that came from a remote is in step with it at once
and never sent back. Nothing is forced: what has diverged is reported and left. Never does: git itself (`exchange.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets as random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, urlsplit

import structlog

from forkyard.control.secrets import Secrets
from forkyard.errors import ForkyardError, InvalidRequest, NotFound, Unauthenticated
from forkyard.git.exchange import HOW, Access, Exchange
from forkyard.git.globs import any_matches
from forkyard.git.imports import checked_url
from forkyard.git.installations import GitHubTokens
from forkyard.git.names import NO_SHA, checked_ref
from forkyard.git.refs import Refs
from forkyard.git.repositories import RefChange, Repo, Repositories
from forkyard.git.step import Move, wanted
from forkyard.git.ways import Ways
from forkyard.models.git_triggers import (
    RefState,
    RemoteCreate,
    RemoteCreated,
    RemoteInfo,
    RemoteUpdate,
    SyncReport,
)
from forkyard.store.remotes import RemoteRecord, RemoteRef
from forkyard.store.sql import Store

log = structlog.get_logger(__name__)

AT_ONCE = 4
MAX_REMOTES = 20
MAX_SHOWN = 1000
_FIRST_RETRY_S = 10.0
_LAST_RETRY_S = 3600.0
_HEADS, _TAGS = "refs/heads/", "refs/tags/"

_Place = tuple[str, str]  # repository, remote


class Sync:
    def __init__(
        self,
        store: Store,
        repositories: Repositories,
        refs: Refs,
        secrets: Secrets,
        ways: Ways,
        *,
        github_api: str,
        ca: Path | None = None,
    ) -> None:
        self._store = store
        self._repositories = repositories
        self._refs = refs
        self._secrets = secrets
        self.github = GitHubTokens(secrets, github_api, ca)
        self._ways = ways
        self._exchange = Exchange(repositories.git, ways, secrets, self.github)
        self._known: dict[str, dict[str, RemoteRecord]] = {}  # by repository and name
        self._due: dict[_Place, float] = {}
        self._failures: dict[_Place, int] = {}
        self._running: dict[_Place, asyncio.Task[None]] = {}
        self._locks: dict[_Place, asyncio.Lock] = {}
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Every remote is due: nobody knows what happened meanwhile."""
        for record in await self._store.list_remotes():
            self._known.setdefault(record.repo_id, {})[record.name] = record
            self._soon((record.repo_id, record.name))
        self._repositories.on_push.append(self.pushed)

    # ── what remotes there are ───────────────────────────────────────────────────────────────────────────────────

    async def create(self, repo: Repo, request: RemoteCreate) -> RemoteCreated:
        _refuse_bad(request)
        self._ways.refuse(request.url, HOW)
        secret = request.secret if request.github_app is None else request.github_app.private_key_secret
        if secret is not None:
            await self._secrets.get(secret)
        if len(self._known.get(repo.id, {})) >= MAX_REMOTES:
            raise InvalidRequest(f"a repository has at most {MAX_REMOTES} remotes; remove one first")
        remote_id = "m" + random.token_hex(8)
        hook_secret = request.hook_secret or random.token_hex(20)
        record = RemoteRecord(
            id=remote_id,
            repo_id=repo.id,
            name=request.name,
            url=request.url,
            direction=request.direction,
            branches=request.branches,
            tags=request.tags,
            username="x-access-token" if request.github_app is not None else request.username,
            secret=request.secret,
            github_app=None if request.github_app is None else request.github_app.model_dump(),
            poll_s=request.poll_s,
            review=None if request.review is None else request.review.model_dump(mode="json"),
            hook_secret=self._secrets.seal(f"remote:{remote_id}", hook_secret),
            created_at=datetime.now(UTC),
        )
        await self._store.add_remote(record)
        self._known.setdefault(repo.id, {})[record.name] = record
        self._soon((repo.id, record.name))
        return RemoteCreated(**_info(record, None).model_dump(), hook_secret=hook_secret)

    async def update(self, repo: Repo, name: str, request: RemoteUpdate) -> RemoteInfo:
        """It is synced at once, with what it is now."""
        async with self._lock((repo.id, name)):
            record = await self._record(repo.id, name)
            given = request.model_dump(mode="json", exclude_unset=True)
            for field in ("name", "url", "direction", "branches", "tags", "username", "hook_secret"):
                if field in given and given[field] is None:
                    raise InvalidRequest(f"{field} cannot be null; leave it out to keep it as it is", field=field)
            current = {field: getattr(record, field) for field in RemoteUpdate.model_fields if field != "hook_secret"}
            _refuse_bad(RemoteCreate.model_validate({**current, **given}))
            if "hook_secret" in given:
                given["hook_secret"] = self._secrets.seal(f"remote:{record.id}", given["hook_secret"])
            if given.get("github_app") is not None:
                given["username"] = "x-access-token"
            moved = given.get("url", record.url) != record.url
            if moved:
                self._ways.refuse(given["url"], HOW)
            changed = await self._store.update_remote(record.id, given, anew=moved)
            if changed is None:
                raise NotFound(f"there is no remote {name!r} any more")
            if moved:
                await self._exchange.forget(repo.path, record.id)
            self._known.setdefault(repo.id, {}).pop(name, None)
            self._due.pop((repo.id, name), None)
            self._known[repo.id][changed.name] = changed
            self._failures.pop((repo.id, name), None)
            self._soon((repo.id, changed.name))
        return await self.get(repo, changed.name)

    async def list(self, repo: Repo) -> list[RemoteInfo]:
        apart = await self._store.remotes_out_of_step(repo.id)
        return [_info(record, apart) for record in await self._store.list_remotes(repo.id)]

    async def get(self, repo: Repo, name: str) -> RemoteInfo:
        record = await self._record(repo.id, name)
        return _info(record, await self._store.remotes_out_of_step(repo.id))

    async def refs(self, repo: Repo, name: str) -> Sequence[RefState]:
        """As of the last sync; those not in step first."""
        known = await self._store.remote_refs((await self._record(repo.id, name)).id)
        return _states(known.values())

    async def delete(self, repo: Repo, name: str) -> None:
        """Both sides stay as they are."""
        record = await self._record(repo.id, name)
        async with self._lock((repo.id, name)):
            await self._store.remove_remote(record.id)
            self._known.get(repo.id, {}).pop(name, None)
            self._due.pop((repo.id, name), None)
            await self._exchange.forget(repo.path, record.id)

    async def _record(self, repo_id: str, name: str) -> RemoteRecord:
        record = await self._store.remote(repo_id, name)
        if record is None:
            raise NotFound(f"this repository has no remote {name!r}; `forkyard git remotes ls` lists them")
        return record

    # ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def pushed(self, repo: Repo, _changes: Sequence[RefChange], by: str | None) -> None:
        for name, record in self._known.get(repo.id, {}).items():
            # What has come from a remote is there already; the others shall hear of it.
            if record.direction != "in" and by != _signature(name):
                self._soon((repo.id, name))

    async def hook_secret(self, repo_id_or_name: str, name: str) -> tuple[_Place, str] | None:
        try:
            repo = await self._repositories.get(repo_id_or_name)
            record = await self._record(repo.id, name)
        except NotFound:
            return None
        return (repo.id, name), self._secrets.unseal(f"remote:{record.id}", record.hook_secret)

    def hooked(self, found: tuple[_Place, str] | None, signature: str, body: hmac.HMAC) -> None:
        """`body` was made with the secret of `found`, or with any. Whoever has not the secret learns nothing, not even
        whether there is such a remote."""
        right = hmac.compare_digest(f"sha256={body.hexdigest()}".encode(), signature.encode("utf-8", "replace"))
        if found is None or not right:
            raise Unauthenticated("the signature in X-Hub-Signature-256 is not that of this remote's hook secret")
        self._soon(found[0])

    def tracked(self, found: tuple[_Place, str]) -> RemoteRecord | None:
        return self._known.get(found[0][0], {}).get(found[0][1])

    def _soon(self, place: _Place) -> None:
        self._due[place] = 0.0
        self._news.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._news.clear()
                now = loop.time()
                for place, at in sorted(self._due.items(), key=lambda item: item[1]):
                    if at <= now and place not in self._running and len(self._running) < AT_ONCE:
                        del self._due[place]
                        self._running[place] = asyncio.create_task(self._attempt(place), name=f"sync {place}")
                waits = [at - now for place, at in self._due.items() if at > now]
                try:
                    async with asyncio.timeout(min(waits, default=None)):
                        await self._news.wait()
                except TimeoutError:
                    pass
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _attempt(self, place: _Place) -> None:
        record = self._known.get(place[0], {}).get(place[1])
        wait_s: float | None = None
        try:
            await self.now(await self._repositories.get(place[0]), place[1])
            self._failures.pop(place, None)
            wait_s = None if record is None else record.poll_s
        except NotFound:
            self._known.get(place[0], {}).pop(place[1], None)
        except Exception as error:
            failures = self._failures[place] = self._failures.get(place, 0) + 1
            wait_s = min(_FIRST_RETRY_S * 2.0 ** (failures - 1), _LAST_RETRY_S)
            why = error.message if isinstance(error, ForkyardError) else repr(error)
            log.warning("a remote is not in step", repo=place[0], remote=place[1], error=why)
        finally:
            self._running.pop(place, None)
            if wait_s is not None:  # unless it became due meanwhile
                self._due.setdefault(place, asyncio.get_running_loop().time() + wait_s)
            self._news.set()

    # ── the sync itself ──────────────────────────────────────────────────────────────────────────────────────────

    async def now(self, repo: Repo, name: str) -> SyncReport:
        async with self._lock((repo.id, name)):
            record = await self._record(repo.id, name)
            try:
                async with self._exchange.access(repo, record) as access:
                    report = await self._synced(access)
            except ForkyardError as error:
                await self._store.note_remote(record.id, error=error.message[:2000], synced_at=None)
                raise
            await self._store.note_remote(record.id, error=None, synced_at=datetime.now(UTC))
            return report

    def _lock(self, place: _Place) -> asyncio.Lock:
        return self._locks.setdefault(place, asyncio.Lock())

    async def _synced(self, access: Access) -> SyncReport:
        repo, remote = access.repo, access.remote
        there, head = await self._exchange.listed(access)
        there = {ref: sha for ref, sha in there.items() if _concerns(remote, ref)}
        here = {ref: sha for ref, sha in (await self._refs.shas(repo)).items() if _concerns(remote, ref)}
        known = await self._store.remote_refs(remote.id)
        moves = self._moves(here, there, known)
        news = [ref for ref, move in moves.items() if ref in there and move != "none"]
        there |= await self._exchange.fetched(access, news)  # which may have moved on since they were listed
        states = {}
        for ref, move in self._moves(here, there, known).items():
            agreed = known[ref].agreed_sha if ref in known else None
            row = RemoteRef(ref, agreed, here.get(ref), there.get(ref), "in_step")
            states[ref] = await self._judged(repo, remote, row, move)
        pulled = await self._pulled(repo, remote, states)
        pushed = await self._pushed(access, states)
        await self._exchange.point_head(repo, head)
        await self._store.put_remote_refs(remote.id, *_changed(known, states))
        return SyncReport(pulled=[*pulled], pushed=[*pushed], refs=_states(states.values()))

    def _moves(
        self, here: Mapping[str, str], there: Mapping[str, str], known: Mapping[str, RemoteRef]
    ) -> dict[str, Move]:
        found: dict[str, Move] = {}
        for ref in sorted(here.keys() | there.keys() | known.keys()):
            agreed = known[ref].agreed_sha if ref in known else None
            found[ref] = wanted(here.get(ref), there.get(ref), agreed, tag=ref.startswith(_TAGS))
        return found

    async def _judged(self, repo: Repo, remote: RemoteRecord, row: RemoteRef, move: Move) -> RemoteRef:
        """With its state before anything is done: `behind` is to be pulled and `ahead` to be pushed, unless there is a
        `detail` that says why not."""
        local, other = row.local_sha, row.remote_sha
        if move == "none":
            return replace(row, state="in_step", agreed_sha=local)
        if move in ("push", "compare", "pull") and local is not None and other is not None:
            # Whatever was agreed, nothing that one side has may be lost.
            if await self._exchange.contains(repo.path, other, local):
                move = "pull"
            elif await self._exchange.contains(repo.path, local, other):
                move = "push"
            else:
                move = "diverged"
        if move == "diverged":
            return replace(row, state="diverged", detail=_why_apart(row))
        if move == "push":
            stays = "this remote is only read from" if remote.direction == "in" else None
            return replace(row, state="ahead", detail=stays)
        if remote.direction == "out":
            return replace(row, state="behind", detail="this remote is only written to")
        if other is None and row.ref == _HEADS + await self._repositories.default_branch(repo):
            return replace(row, state="ahead", detail="deleted there; here it is the default branch, and stays")
        return replace(row, state="behind")

    async def _pulled(self, repo: Repo, remote: RemoteRecord, states: dict[str, RemoteRef]) -> Sequence[str]:
        rows = [row for row in states.values() if row.state == "behind" and row.detail is None]
        if not rows:
            return []
        # Deletions first: `a` must be gone before there can be `a/b`.
        rows.sort(key=lambda row: row.remote_sha is not None)
        changes = [RefChange(row.ref, row.local_sha or NO_SHA, row.remote_sha or NO_SHA) for row in rows]
        async with self._repositories.writing(repo):
            if not await self._exchange.moved(repo.path, changes):
                changes = [change for change in changes if await self._exchange.moved(repo.path, [change])]
        done = {change.ref for change in changes}
        if done:
            await self._repositories.changed(repo, changes, _signature(remote.name))
        for row in rows:
            if row.ref in done:
                states[row.ref] = replace(row, state="in_step", local_sha=row.remote_sha, agreed_sha=row.remote_sha)
            else:
                why = "it cannot be written here: it has moved meanwhile, or another name is in its way"
                states[row.ref] = replace(row, detail=why)
        return [row.ref for row in rows if row.ref in done]

    async def _pushed(self, access: Access, states: dict[str, RemoteRef]) -> Sequence[str]:
        rows = [row for row in states.values() if row.state == "ahead" and row.detail is None]
        refused = await self._exchange.pushed(access, rows)
        for row in rows:
            if row.ref in refused:
                states[row.ref] = replace(row, detail=f"the remote refuses it: {refused[row.ref]}")
            else:
                states[row.ref] = replace(row, state="in_step", remote_sha=row.local_sha, agreed_sha=row.local_sha)
        return [row.ref for row in rows if row.ref not in refused]


def _signature(name: str) -> str:
    """Who made a change that came from a remote."""
    return f"remote:{name}"


def _concerns(remote: RemoteRecord, ref: str) -> bool:
    """The names are another host's: what would not be a name here is left alone."""
    namespace = next((one for one in (_HEADS, _TAGS) if ref.startswith(one)), None)
    if namespace is None or (namespace == _TAGS and not remote.tags):
        return False
    name = ref.removeprefix(namespace)
    try:
        checked_ref(name)
    except InvalidRequest:
        return False
    return namespace == _TAGS or not remote.branches or any_matches(remote.branches, name)


def _why_apart(row: RemoteRef) -> str:
    if row.local_sha is None:
        return "deleted here and changed there"
    if row.remote_sha is None:
        return "deleted there and changed here"
    if row.ref.startswith(_TAGS):
        return "the tag is elsewhere there, and tags are not moved"
    return "each side has commits that the other lacks; merge them here or there"


def _changed(known: Mapping[str, RemoteRef], states: Mapping[str, RemoteRef]) -> tuple[list[RemoteRef], list[str]]:
    """What is to be written, and what is on neither side any more."""
    there = {ref: row for ref, row in states.items() if row.local_sha is not None or row.remote_sha is not None}
    return [row for ref, row in there.items() if known.get(ref) != row], [ref for ref in known if ref not in there]


def _states(rows: Iterable[RemoteRef]) -> list[RefState]:
    there = [row for row in rows if row.local_sha is not None or row.remote_sha is not None]
    ordered = sorted(there, key=lambda row: (row.state == "in_step", row.ref))
    return [RefState.model_validate(vars(row)) for row in ordered[:MAX_SHOWN]]


def _info(record: RemoteRecord, out_of_step: Collection[str] | None) -> RemoteInfo:
    shown = {name: value for name, value in asdict(record).items() if name not in ("id", "hook_secret")}
    in_step = None
    if out_of_step is not None and record.synced_at is not None:
        in_step = record.error is None and record.id not in out_of_step
    path = f"/api/v1/git/repos/{record.repo_id}/remotes/{quote(record.name)}/hook"
    return RemoteInfo(**shown, in_step=in_step, hook_path=path)


def github_name(url: str) -> tuple[str, str]:
    """Owner and name of a repository on GitHub, or on a server that is like it."""
    parts = urlsplit(url).path.strip("/").removesuffix(".git").split("/")
    if len(parts) != 2 or not all(parts):
        raise InvalidRequest(
            f"{url} is no repository on GitHub, so its pull requests cannot be reviewed", field="review"
        )
    return parts[0], parts[1]


def _refuse_bad(request: RemoteCreate) -> None:
    parts = urlsplit(checked_url(request.url))
    over_http = parts.scheme in ("http", "https")
    if parts.password is not None or (over_http and parts.username is not None):
        raise InvalidRequest(
            "a url with credentials in it would show them; store them (`forkyard secrets set`) and give the name of "
            "the secret",
            field="url",
        )
    if request.review is not None:
        github_name(request.url)
        if request.secret is None and request.github_app is None:
            raise InvalidRequest("a review is posted with the credential of the remote; give one", field="review")
    if request.secret is not None and request.github_app is not None:
        raise InvalidRequest("give a secret or a github_app, not both", field="secret")
    if (request.secret is not None or request.github_app is not None) and not over_http:
        raise InvalidRequest("secrets are for http and https; ssh uses the keys of this host", field="secret")
