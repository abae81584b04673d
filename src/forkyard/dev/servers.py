"""Dev servers: made of a repository, reloaded when it is pushed to, looked at, removed.

Owns: the steps from a repository to a server that answers, and back: whatever was made for one that fails is removed. What
runs is a service of a sandbox (`control.services`), so it sleeps, wakes and forks as that does; pushes come as deliveries
of a trigger (`git.triggers`), so none is missed. Never does: guessing a command (`detection`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import structlog

from forkyard.control import services
from forkyard.control.commands import Finished, run
from forkyard.control.identities import Principal
from forkyard.control.plane import ControlPlane
from forkyard.dev import answers
from forkyard.dev.checkout import WRITTEN, Checkout, Left
from forkyard.dev.detection import READ, Setup, detect
from forkyard.errors import (
    DevServerFailed,
    DevServerNotFound,
    ForkyardError,
    InvalidRequest,
    NotFound,
    ServiceNotReady,
    StateConflict,
)
from forkyard.git import repositories, triggers
from forkyard.git.actions import CreateSandbox
from forkyard.git.clones import inner_url
from forkyard.git.hosting import GitHosting
from forkyard.git.repositories import Repo
from forkyard.git.webhooks import Outcome
from forkyard.guest.base import ExecSpec, Guest
from forkyard.lifecycle import State
from forkyard.models import SandboxInfo
from forkyard.models.dev_servers import DevServerCreate, DevServerInfo
from forkyard.models.git import GitSource, RepoCreate
from forkyard.models.git_triggers import Action, DevServerAction, TriggerCreate
from forkyard.models.labels import marked
from forkyard.models.specs import Service
from forkyard.store.dev_servers import DevServerRecord
from forkyard.store.triggers import DeliveryRecord, TriggerRecord

log = structlog.get_logger(__name__)

SERVICE = "dev-server"
LABEL = "forkyard.dev-server"
GIT_S = 600.0
INSTALL_S = 3600.0
#: In the clone's `.git`, for as long as a reload takes.
BROUGHT = ".git/forkyard-fetch"
_MAX_TEXT_BYTES = 2**20


class DevServers:
    def __init__(self, control: ControlPlane, hosting: GitHosting, make_sandbox: CreateSandbox) -> None:
        self._control = control
        self._hosting = hosting
        self._make_sandbox = make_sandbox
        self._store = control.ground.store
        self._locks: dict[str, asyncio.Lock] = {}
        self._making: dict[str, asyncio.Task[DevServerRecord]] = {}

    async def start(self) -> None:
        """What an earlier daemon had begun is removed: nobody waits for it any more."""
        for record in await self._store.list_dev_servers():
            if record.state == "starting":
                await self._abandon(record.id)
            elif "sandbox" in record.request:  # an older daemon kept all of it
                await self._changed(record.id, request=_kept(record.request))

    async def stop(self) -> None:
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    # ── create ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, request: DevServerCreate, by: Principal) -> DevServerInfo:
        """Returns when it answers. It is made also if its caller goes away."""
        now, server_id = datetime.now(UTC), "dev" + secrets.token_hex(8)
        asked = _kept(request.model_dump(mode="json"))
        record = DevServerRecord(server_id, request.name or server_id, by.id, asked, created_at=now, updated_at=now)
        await self._store.add_dev_server(record)
        task = asyncio.create_task(self._create(record, request, by), name=f"dev server {server_id}")
        self._making[server_id] = task
        task.add_done_callback(lambda _: self._making.pop(server_id, None))
        try:
            return await self._info(await asyncio.shield(task))
        except asyncio.CancelledError:
            if task.cancelled():
                raise DevServerFailed(f"dev server {record.name} was deleted before it was up") from None
            raise

    async def _create(self, record: DevServerRecord, request: DevServerCreate, by: Principal) -> DevServerRecord:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._abandon, record.id)
            repo = await self._source(record, request, by)
            branch = request.branch or (await self._hosting.repositories.default_branch(repo) if repo else None)
            sandbox = await self._machine(record, request, repo, branch)
            await self._changed(record.id, sandbox_id=sandbox.id)
            async with self._control.sandboxes.use(sandbox.id) as guest:
                setup = await self._set_up(guest, request)
                branch, sha = await _where(guest, request)
                await self._start(guest, request, setup)
            record = await self._changed(
                record.id,
                repo_id=None if repo is None else repo.id,
                repo_url=request.repo or "" if repo is None else repo.record.name,
                branch=branch,
                sha=sha,
                setup=asdict(setup),
            )
            if repo is not None and request.on_push != "ignore":
                wanted = TriggerCreate(branches=[branch], action=DevServerAction(dev_server_id=record.id))
                trigger_id = triggers.new_id()
                await self._changed(record.id, trigger_id=trigger_id)  # first: whatever there is can be found
                await self._hosting.triggers.create(repo, wanted, by, trigger_id=trigger_id)
            record = await self._changed(record.id, state="running")
            undo.pop_all()
        return record if record.trigger_id is None or repo is None else await self._caught_up(record, repo)

    async def _caught_up(self, record: DevServerRecord, repo: Repo) -> DevServerRecord:
        """With what was pushed while it was made: no trigger told of it, or it was not up yet."""
        head = (await self._hosting.refs.shas(repo)).get(f"refs/heads/{record.branch}")
        if head is not None and head != record.sha:
            with contextlib.suppress(ForkyardError):  # it is in the record
                await self.reload(record.id, pushed=True)
        return await self._record(record.id)

    async def _source(self, record: DevServerRecord, request: DevServerCreate, by: Principal) -> Repo | None:
        """The hosted repository it is made of. None: it is elsewhere."""
        if request.template_repo is None:
            name = self._hosting.clones.hosted_name(request.repo or "")
            return None if name is None else await self._hosting.repositories.get(name)
        repo_id = repositories.new_id()
        await self._changed(record.id, repo_id=repo_id)
        template = self._hosting.clones.hosted_name(request.template_repo)
        if template is None:
            wanted = RepoCreate(name=request.repo, source=GitSource(url=request.template_repo))
            return await self._hosting.create(wanted, by, repo_id=repo_id, password=await self._password(request))
        source = await self._hosting.repositories.get(template)
        return await self._hosting.copy(source, request.repo, repo_id=repo_id)

    async def _password(self, request: DevServerCreate) -> str | None:
        """For the template: a stored secret, or one that the sandbox is given."""
        if request.secret is None:
            return None
        if not (request.template_repo or "").startswith(("http://", "https://")):
            raise InvalidRequest("a secret is for http and https", field="secret")
        own = request.sandbox.secrets.get(request.secret)
        if own is not None and own.value is not None:
            return own.value
        return await self._control.secrets.named(request.secret, "secret")

    async def _machine(
        self, record: DevServerRecord, request: DevServerCreate, repo: Repo | None, branch: str | None
    ) -> SandboxInfo:
        identity = request.sandbox.identity
        if repo is not None and identity is None:
            identity = await self._hosting.only(repo, "write")
        clone = request.clone(repo.id if repo is not None else request.repo or "", branch)
        asked = request.machine(clone, name=request.sandbox.name or record.name, identity=identity)
        return await self._make_sandbox(marked(asked, {LABEL: record.id}), api_key_id=record.key_id)

    async def _set_up(self, guest: Guest, request: DevServerCreate) -> Setup:
        """Found out, and installed."""
        names = [entry.name for entry in await guest.list_dir(request.path) if entry.type in ("file", "symlink")]
        checkout = self._checkout(guest, request)
        left = await checkout.left() if WRITTEN.intersection(names) else Left(frozenset(), frozenset())
        # A lockfile that is not the repository's says nothing of what is in it now.
        kept = [name for name in names if name not in left.all]
        texts = {name: await _text(guest, f"{request.path}/{name}") for name in READ if name in kept}
        found = detect(kept, texts, port=request.port, command=request.command)
        install, script = found.install, found.script
        if request.install is not None:
            install = script = request.install or None
        for what, command, user in (
            (f"fetching {found.manager}", found.fetch, "root"),
            (f"`{install}`", script or install, None),
        ):
            if command is not None:
                done = await self._run(guest, request, command, INSTALL_S, user=user)
                if not done.ok:
                    said = answers.ended(done.tail) or "it printed nothing"
                    raise DevServerFailed(f"{what} {done.why(INSTALL_S)}:\n{said}", log=done.tail)
        await checkout.installed((WRITTEN - set(names)) | left.ours)
        return Setup(found.manager, install, found.command)

    def _checkout(self, guest: Guest, request: DevServerCreate) -> Checkout:
        return Checkout(lambda script: self._run(guest, request, script, GIT_S), request.path)

    async def _start(self, guest: Guest, request: DevServerCreate, setup: Setup) -> None:
        try:
            await services.put(guest, [self._service(request, setup)])
        except ServiceNotReady as error:
            raise await answers.explained(error, guest, request) from None

    def _service(self, request: DevServerCreate, setup: Setup) -> Service:
        return Service(
            name=SERVICE,
            exec=setup.command,
            workdir=request.path,
            user=request.user or "root",
            env={**self._env(request), **request.env},
            restart="always",
            ready=answers.asked(request.port),
            ready_timeout_s=request.ready_timeout_s,
        )

    def _env(self, request: DevServerCreate) -> dict[str, str]:
        domain = self._control.previews.address.domain
        allowed = {} if domain == "localhost" else {"__VITE_ADDITIONAL_SERVER_ALLOWED_HOSTS": f".{domain}"}
        return {"PORT": str(request.port), "BROWSER": "none", **allowed}

    async def _run(
        self, guest: Guest, request: DevServerCreate, command: str, timeout_s: float, *, user: str | None = None
    ) -> Finished:
        env = {**self._env(request), **request.env, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}
        spec = ExecSpec(
            command, cwd=request.path, env=env, user=user or request.user or "root", timeout_s=timeout_s, label=SERVICE
        )
        return await run(guest, spec)

    # ── reload ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def reload(self, id_or_name: str, *, pushed: bool = False) -> DevServerInfo:
        """To the head of its branch, and again if it is there already. What was changed in the sandbox is never lost: if it
        is in the way, this fails."""
        record = await self._record(id_or_name)
        async with self._locks.setdefault(record.id, asyncio.Lock()):
            record = await self._record(record.id)
            if record.state != "running" or record.sandbox_id is None:
                raise StateConflict(f"dev server {record.name} is not up yet; try again when it is")
            request = DevServerCreate.model_validate(record.request)
            try:
                async with (
                    self._control.sandboxes.use(record.sandbox_id) as guest,
                    self._place(guest, record, request) as place,
                ):
                    changes = await self._reloaded(guest, record, request, place, pushed=pushed)
            except ForkyardError as error:
                await self._store.change_dev_server(record.id, error=error.message[:2000])
                raise
            return await self._info(await self._changed(record.id, error=None, **changes))

    @contextlib.asynccontextmanager
    async def _place(self, guest: Guest, record: DevServerRecord, request: DevServerCreate) -> AsyncIterator[str]:
        """What is fetched from. A repository elsewhere whose credential its machine has not is brought there."""
        sandbox = None if record.sandbox_id is None else await self._store.sandbox(record.sandbox_id)
        if record.repo_id is not None:
            yield inner_url(record.repo_id)
            return
        if request.secret is None or sandbox is None or request.secret in sandbox.secrets:
            yield "origin"
            return
        clone = request.clone(request.repo or "", record.branch).model_copy(
            update={"path": f"{request.path}/{BROUGHT}"}
        )
        remove = f"rm -rf -- {BROUGHT}"
        await self._run(guest, request, remove, GIT_S)  # that of a daemon that died
        try:
            async with self._hosting.clones.making(sandbox, [clone], files=False) as put:
                await put(guest)
            yield f"./{BROUGHT}/.git"
        finally:
            await self._run(guest, request, remove, GIT_S)

    async def _reloaded(
        self, guest: Guest, record: DevServerRecord, request: DevServerCreate, place: str, *, pushed: bool
    ) -> dict[str, object]:
        checkout = self._checkout(guest, request)
        before, sha = await checkout.forward(record.branch, place)
        if pushed and before == sha == record.sha and record.error is None:
            return {}  # an earlier push of several has brought it here
        setup = Setup(**record.setup)
        installs = not await checkout.is_installed(record.sha)
        if installs:
            setup = await self._set_up(guest, request)
        if not pushed or installs or request.on_push == "restart" or setup.command != record.setup["command"]:
            await self._start(guest, request, setup)
        return {"sha": sha, "setup": asdict(setup)}

    async def perform(self, _trigger: TriggerRecord, action: Action, _delivery: DeliveryRecord) -> Outcome:
        """Of a trigger."""
        assert isinstance(action, DevServerAction)
        began = time.monotonic()
        try:
            info = await self.reload(action.dev_server_id, pushed=True)
        except ForkyardError as error:
            took_ms = round((time.monotonic() - began) * 1000, 1)
            return Outcome(False, took_ms, error=error.message, retry=error.retryable)
        return Outcome(True, round((time.monotonic() - began) * 1000, 1), response=f"{info.url} serves {info.sha}")

    # ── look, remove ─────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, id_or_name: str) -> DevServerInfo:
        return await self._info(await self._record(id_or_name))

    async def list(self) -> list[DevServerInfo]:
        found = []
        for record in await self._store.list_dev_servers():
            with contextlib.suppress(NotFound):
                if record.state == "running":
                    found.append(await self._info(record))
        return found

    async def logs(self, id_or_name: str, lines: int) -> str:
        record = await self._record(id_or_name)
        if record.sandbox_id is None:
            return ""
        return (await self._control.services.logs(record.sandbox_id, SERVICE, lines)).log

    async def delete(self, id_or_name: str) -> None:
        """With its sandbox. The repository stays."""
        record = await self._record(id_or_name)
        if (making := self._making.get(record.id)) is not None:
            making.cancel()
            await asyncio.wait([making])
            left = await self._store.dev_server(record.id)
            if left is None:  # and all that was made is gone
                return
            record = left
        async with self._locks.setdefault(record.id, asyncio.Lock()):
            await self._remove(record)
        self._locks.pop(record.id, None)

    async def _abandon(self, server_id: str) -> None:
        """One that did not come up, with the repository that was made for it."""
        record = await self._store.dev_server(server_id)
        if record is None:
            return
        if record.repo_id is not None and record.request.get("template_repo") is not None:
            with contextlib.suppress(NotFound):
                await self._hosting.delete(await self._hosting.repositories.get(record.repo_id))
        for left in (await self._control.sandboxes.list(labels={LABEL: record.id})).items:
            await self._control.sandboxes.delete(left.id)
        await self._remove(record)

    async def _remove(self, record: DevServerRecord) -> None:
        if record.trigger_id is not None and record.repo_id is not None:
            with contextlib.suppress(NotFound):
                repo = await self._hosting.repositories.get(record.repo_id)
                await self._hosting.triggers.delete(repo, record.trigger_id)
        if record.sandbox_id is not None:
            with contextlib.suppress(NotFound):
                await self._control.sandboxes.delete(record.sandbox_id)
        await self._store.remove_dev_server(record.id)

    async def _record(self, id_or_name: str) -> DevServerRecord:
        record = await self._store.dev_server(id_or_name)
        if record is None:
            raise DevServerNotFound(
                f"there is no dev server {id_or_name!r}; `forkyard dev ls` lists those there are", id=id_or_name
            )
        return record

    async def _changed(self, server_id: str, **changes: object) -> DevServerRecord:
        record = await self._store.change_dev_server(server_id, **changes)
        if record is None:
            raise DevServerNotFound(f"dev server {server_id!r} was deleted meanwhile")
        return record

    async def _info(self, record: DevServerRecord) -> DevServerInfo:
        """Of one whose sandbox was deleted there is nothing left but its record, which goes now."""
        request = DevServerCreate.model_validate(record.request)
        sandbox = None
        if record.sandbox_id is not None:
            with contextlib.suppress(NotFound):
                sandbox = await self._control.sandboxes.get(record.sandbox_id)
        if sandbox is None or sandbox.state is State.DELETED:
            if record.state == "running":
                await self._remove(record)
            raise DevServerNotFound(f"the sandbox of dev server {record.name} is not there", id=record.id)
        address = self._control.previews.address
        return DevServerInfo(
            id=record.id,
            name=record.name,
            repo_id=record.repo_id,
            repo_url=record.repo_url,
            branch=record.branch,
            sandbox_id=sandbox.id,
            sandbox_state=sandbox.state,
            url=address.url(sandbox.id, request.port),
            port=request.port,
            path=request.path,
            manager=record.setup.get("manager"),
            install=record.setup.get("install"),
            command=str(record.setup.get("command", "")),
            on_push=request.on_push,
            sha=record.sha,
            error=record.error,
            created_at=record.created_at,
            updated_at=record.updated_at,
        )


def _kept(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is written down of a request: nothing of what its sandbox was given, for there may be secrets, nor a password in
    an address."""
    kept = {name: value for name, value in request.items() if name != "sandbox"}
    if kept.get("template_repo"):
        parts = urlsplit(kept["template_repo"])
        kept["template_repo"] = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return kept


async def _where(guest: Guest, request: DevServerCreate) -> tuple[str, str]:
    """The branch and the commit of the clone."""
    spec = ExecSpec(
        "git symbolic-ref -q --short HEAD; git rev-parse -q --verify HEAD",
        cwd=request.path,
        user=request.user or "root",
        timeout_s=GIT_S,
        label=SERVICE,
    )
    lines = (await run(guest, spec)).tail.split()
    if len(lines) != 2:
        raise InvalidRequest(
            f"{request.branch or request.repo!r} is no branch with a commit, and only a branch can be served",
            field="branch",
        )
    return lines[0], lines[1]


async def _text(guest: Guest, path: str) -> str:
    data = b""
    async with guest.read_file(path, length=_MAX_TEXT_BYTES) as chunks:
        async for chunk in chunks:
            data += chunk
    return data.decode("utf-8", "replace")
