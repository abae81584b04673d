"""E2B's control plane: sandboxes. A timeout there is a ttl here, which deletes or, with `autoPause`, pauses."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forkyard.builds.builds import Builds
from forkyard.compat.e2b import models, objects
from forkyard.compat.e2b.errors import Refused, body_of, status_of
from forkyard.compat.e2b.network import policy_of
from forkyard.compat.e2b.notes import Note, is_up
from forkyard.compat.e2b.templates import TemplateRoutes
from forkyard.compat.e2b.traffic import Traffic
from forkyard.control.pages import cursor_after, place_of
from forkyard.control.plane import ControlPlane
from forkyard.errors import BY_CODE, ForkyardError, GuestUnreachable, OperationTimeout, SandboxEnded, SandboxNotFound
from forkyard.lifecycle import ENDED, State
from forkyard.models import SandboxCreate, SandboxFork, SandboxInfo, SandboxUpdate
from forkyard.store.records import Place

DEFAULT_TIMEOUT_S = 300
V1_TIMEOUT_S = 15
MAX_PAGE = 100
#: Of logs. Each includes those after it.
LEVELS = ("debug", "info", "warn", "error")
#: Seconds of some far year; what is more are milliseconds.
FAR = 10**11
HTTPS_PORT = 443
#: Whether anybody is at home is asked so long, at most, before a pause.
ANSWER_S = 5.0
UNRESPONSIVE = "sandbox_snapshot_guest_agent_unresponsive"
_IDEMPOTENCY_KEY = re.compile(r"[a-z0-9-]{1,255}", re.ASCII)


class Sandboxes:
    def __init__(
        self,
        control: ControlPlane,
        builds: Builds,
        templates: TemplateRoutes,
        token_of: Callable[[str], str],
        traffic: Traffic,
    ) -> None:
        self._control = control
        self._builds = builds
        self._templates = templates
        self._token_of = token_of
        self._traffic = traffic

    # ── create ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, request: Request) -> Response:
        return await self._create(request, V1_TIMEOUT_S)

    async def create_v2(self, request: Request) -> Response:
        return await self._create(request, DEFAULT_TIMEOUT_S)

    async def _create(self, request: Request, default_timeout_s: int) -> Response:
        body = await models.read(request, models.NewSandbox)
        for name in ("iam", "mcp"):
            if getattr(body, name):
                raise Refused(400, f"{name} is not served here yet; leave it out")
        key = request.headers.get("idempotency-key")
        if key is not None and _IDEMPOTENCY_KEY.fullmatch(key) is None:
            raise Refused(400, "Idempotency-Key has 1 to 255 of a-z, 0-9 and -")
        metadata = body.metadata or {}
        timeout_s = default_timeout_s if body.timeout is None else body.timeout
        origin = await self._templates.origin(body.template)
        note = Note(
            template=origin.id,
            alias=origin.alias,
            user=origin.user,
            workdir=origin.workdir,
            metadata=metadata,
            timeout_s=timeout_s,
            auto_resume=body.auto_resume is not None and body.auto_resume.enabled,
            allow_internet=body.allow_internet,
            network=None if body.network is None else body.network.told(),
        )
        wanted = SandboxCreate(
            labels={name: value for name, value in list(metadata.items())[:64] if objects.is_label(name, value)},
            annotations=note.annotations(),
            env=body.env or {},
            idle_timeout_s=None,
            ttl_s=max(timeout_s, 0.001),
            on_ttl=("pause" if body.pause_memory else "stop") if body.auto_pause else "delete",
            network=policy_of(body.network, body.allow_internet),
            **objects.mounts(body.volumes),
            **({} if origin.snapshot is None else {"snapshot": origin.snapshot}),
            **({} if origin.recipe is None else {"spec": origin.recipe.spec}),
        )
        create = self._control.sandboxes.create if origin.recipe is None else self._builds.sandbox
        made = await create(wanted, api_key_id=request.state.principal.id, idempotency_key=key)
        if not origin.memory and made.incarnation == 1:  # else this is a second answer
            made = await self._booted(made)
        return JSONResponse(self._sandbox(made), 201)

    async def _booted(self, made: SandboxInfo) -> SandboxInfo:
        """Without the memory of its snapshot."""
        try:
            await self._control.sleep.pause(made.id)
            return await self._control.sleep.resume(made.id, memory=False)
        except ForkyardError:
            await self._control.sandboxes.delete(made.id)
            raise

    def _sandbox(self, info: SandboxInfo) -> dict[str, Any]:
        return {
            "templateID": objects.template_of(info),
            "sandboxID": info.id,
            "clientID": objects.CLIENT_ID,
            "envdVersion": models.ENVD_VERSION,
            "envdAccessToken": self._token_of(info.id),
            **self._traffic.told(info),
            **self._domain(),
        }

    def _domain(self) -> dict[str, Any]:
        """Of its hosts, if there is one. A client asks them over HTTPS, whatever it is told."""
        address = self._control.previews.address
        if address.domain == "localhost":
            return {}
        outside = f":{address.port}" if address.scheme == "https" and address.port != HTTPS_PORT else ""
        return {"domain": address.domain + outside}

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def info(self, request: Request) -> Response:
        info = await self._living(request)
        note = Note.of(info)
        return JSONResponse(
            {
                **objects.listed(info),
                "envdAccessToken": self._token_of(info.id),
                **self._domain(),
                "lifecycle": {
                    "autoResume": note is None or note.auto_resume,
                    "onTimeout": "kill" if info.on_ttl == "delete" else "pause",
                },
                "allowInternetAccess": _internet(info, note),
                **_pause_mode(info),
                **({"network": note.network} if note is not None and note.network is not None else {}),
            }
        )

    async def listed(self, request: Request) -> Response:
        query = request.query_params
        limit = models.number(query.get("limit"), "limit", 1, 10_000) or MAX_PAGE
        wanted = objects.states(query.getlist("state"))
        metadata = objects.metadata(query.get("metadata"))
        after = objects.instant(query.get("startedAfter"))
        template, order = await self._template_meant(query.get("template")), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise Refused(400, "order is asc or desc")
        found = [
            one
            for one in await self._all()
            if ("running" if is_up(one.state) else "paused") in wanted
            and metadata.items() <= objects.metadata_of(one).items()
            and (after is None or one.created_at >= after)
            and (template is None or template == objects.template_of(one))
        ]
        found.sort(key=lambda one: (one.created_at, one.id), reverse=order == "desc")
        last = place_of(query.get("nextToken") or None)
        if last is not None:
            place = (last.created_at, last.id)
            found = [
                one for one in found if ((one.created_at, one.id) < place) == (order == "desc") and one.id != last.id
            ]
        page, more = found[: min(limit, MAX_PAGE)], len(found) > min(limit, MAX_PAGE)
        headers = {"x-next-token": cursor_after(Place(page[-1].created_at, page[-1].id))} if more else {}
        return JSONResponse([objects.listed(one) for one in page], headers=headers)

    async def _template_meant(self, given: str | None) -> str | None:
        """By id or name; what is no template any more may still have sandboxes."""
        if not given:
            return None
        try:
            return (await self._templates.origin(given)).id
        except Refused:
            return given

    async def list_running(self, request: Request) -> Response:
        metadata = objects.metadata(request.query_params.get("metadata"))
        found = [one for one in await self._all() if is_up(one.state)]
        return JSONResponse(
            [objects.listed(one) for one in found if metadata.items() <= objects.metadata_of(one).items()]
        )

    async def _all(self) -> list[SandboxInfo]:
        """Newest first."""
        found: list[SandboxInfo] = []
        cursor = None
        states = [state for state in State if state not in ENDED and state is not State.DELETING]
        while True:
            page = await self._control.sandboxes.list(states=states, limit=1000, cursor=cursor)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def metrics(self, request: Request) -> Response:
        """What was seen of it from `start` to `end`, with these seconds. Nobody is woken."""
        info = await self._living(request)
        start, end = (_time_given(request, name) for name in ("start", "end"))
        if start is not None and end is not None and start > end:
            raise Refused(400, "start is after end")
        last = None if end is None else end + timedelta(microseconds=999_999)
        found = await self._control.history.of(info.id, start, last)
        return JSONResponse([objects.metric(info, one) for one in found])

    async def metrics_of_all(self, request: Request) -> Response:
        """The newest of each."""
        ids = [one for one in request.query_params.get("sandbox_ids", "").split(",") if one][:MAX_PAGE]
        found = {}
        for sandbox_id in ids:
            with contextlib.suppress(ForkyardError):
                info = await self._control.sandboxes.get(sandbox_id)
                samples = await self._control.history.of(info.id) if info.state is State.RUNNING else []
                if samples:
                    found[sandbox_id] = objects.metric(info, samples[-1])
        return JSONResponse({"sandboxes": found})

    async def logs(self, request: Request) -> Response:
        entries = await self._log_entries(request)
        lines = [{"timestamp": one["timestamp"], "line": one["message"]} for one in entries]
        return JSONResponse({"logs": lines, "logEntries": entries})

    async def logs_v2(self, request: Request) -> Response:
        return JSONResponse({"logs": await self._log_entries(request)})

    async def _log_entries(self, request: Request) -> list[dict[str, Any]]:
        """Lines of the console. They have no time of their own: it is that of the start of the machine."""
        info, query = await self._living(request), request.query_params
        limit = models.number(query.get("limit"), "limit", 0, 10_000)
        cursor_ms = models.number(query.get("cursor") or query.get("start"), "cursor", 0, 1000 * FAR)
        backward, search = query.get("direction") == "backward", query.get("search", "").lower()
        if query.get("direction", "forward") not in ("forward", "backward"):
            raise Refused(400, "direction is forward or backward")
        if query.get("level") and query["level"] not in LEVELS:
            raise Refused(400, f"level is one of {', '.join(LEVELS)}")
        begun_ms = int(info.created_at.timestamp() * 1000)
        elsewhere = cursor_ms is not None and (begun_ms > cursor_ms if backward else begun_ms < cursor_ms)
        if elsewhere or LEVELS.index(query.get("level") or "debug") > LEVELS.index("info"):
            return []
        console = (await self._control.sandboxes.logs(info.id)).console.splitlines()
        lines = [line for line in (reversed(console) if backward else console) if search in line.lower()]
        at = objects.time_of(info.created_at)
        entries = [{"timestamp": at, "message": line, "level": "info", "fields": {}} for line in lines]
        return entries[: MAX_PAGE * 10 if limit is None else limit]

    # ── change ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def kill(self, request: Request) -> Response:
        info = await self._living(request)
        await self._control.sandboxes.delete(info.id)
        return Response(status_code=204)

    async def set_timeout(self, request: Request) -> Response:
        body = await models.read(request, models.SetTimeout)
        return await self._last(request, body.timeout)

    async def refresh(self, request: Request) -> Response:
        body = await models.read(request, models.Refresh)
        return await self._last(request, body.duration)

    async def _last(self, request: Request, timeout_s: int) -> Response:
        info = await self._living(request)
        if not is_up(info.state):
            raise Refused(404, f"sandbox {info.id} is not running")
        await self._extend(info, timeout_s)
        return Response(status_code=204)

    async def _extend(self, info: SandboxInfo, timeout_s: float) -> None:
        await self._control.sandboxes.update(info.id, SandboxUpdate(ttl_s=max(timeout_s, 0.001)))

    async def pause(self, request: Request) -> Response:
        body = await models.read(request, models.Pause)
        info = await self._living(request)
        if not is_up(info.state):
            raise Refused(409, f"sandbox {info.id} is already paused")
        answers = await self._answers(info.id)
        if not answers and (body.strict or not body.memory):
            why = f"sandbox {info.id} was not paused: nobody answers in it"
            raise Refused(503, why, headers={"Should-Retry": "false"})
        note = Note.of(info)
        if note is not None and note.unresponsive is answers:
            change = SandboxUpdate(annotations=replace(note, unresponsive=not answers).annotations(info.annotations))
            await self._control.sandboxes.update(info.id, change)
        # A paused one has no end: its time begins anew when it runs again, whoever wakes it.
        if body.memory:
            await self._control.sleep.pause(info.id, hold_ttl=True)
        else:
            await self._control.power.stop(info.id, hold_ttl=True)
        return Response(status_code=204)

    async def _answers(self, sandbox_id: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S), self._control.sandboxes.use(sandbox_id) as guest:
                await guest.ping()
        except (GuestUnreachable, OperationTimeout, TimeoutError):
            return False
        return True

    async def connect(self, request: Request) -> Response:
        """Running: it lasts at least so long. Paused: it is resumed."""
        body = await models.read(request, models.Connect)
        info = await self._living(request)
        timeout_s = DEFAULT_TIMEOUT_S if body.timeout is None else body.timeout
        if is_up(info.state):
            wanted = datetime.now(UTC) + timedelta(seconds=timeout_s)
            if info.expires_at is not None and info.expires_at < wanted:
                await self._extend(info, timeout_s)
            return JSONResponse(self._sandbox(info))
        return await self._resumed(info, timeout_s, body.memory)

    async def resume(self, request: Request) -> Response:
        body = await models.read(request, models.Resume)
        info = await self._living(request)
        if is_up(info.state):
            raise Refused(409, f"sandbox {info.id} is already running")
        if body.auto_pause is not None:
            on_ttl = SandboxUpdate(on_ttl="pause" if body.auto_pause else "delete")
            await self._control.sandboxes.update(info.id, on_ttl)
        return await self._resumed(info, V1_TIMEOUT_S if body.timeout is None else body.timeout, body.memory)

    async def _resumed(self, info: SandboxInfo, timeout_s: int, memory: bool | None) -> Response:
        note, ttl_s = Note.of(info), max(timeout_s, 0.001)
        if note is not None and note.unresponsive and memory is not False and info.state is State.PAUSED:
            why = f"nobody answered in sandbox {info.id} when it was paused; resume it without its memory"
            raise Refused(409, why, error_code=UNRESPONSIVE)
        if info.state in (State.STOPPED, State.STOPPING):  # paused without its memory
            resumed = await self._control.power.start(info.id, ttl_s=ttl_s)
        else:
            resumed = await self._control.sleep.resume(info.id, memory=memory is not False, ttl_s=ttl_s)
        if note is not None and (note.timeout_s != timeout_s or note.unresponsive):
            changed = replace(note, timeout_s=timeout_s, unresponsive=False)
            change = SandboxUpdate(annotations=changed.annotations(info.annotations))
            await self._control.sandboxes.update(info.id, change)
        return JSONResponse(self._sandbox(resumed), 201)

    async def fork(self, request: Request) -> Response:
        body = await models.read(request, models.Fork)
        info = await self._living(request)
        if not is_up(info.state):
            raise Refused(409, f"sandbox {info.id} is paused; connect to it first")
        forked = await self._control.forks.fork(
            info.id, SandboxFork(count=body.count), api_key_id=request.state.principal.id
        )
        results: list[dict[str, Any]] = []
        for child in forked.children:
            if child.sandbox is None:
                problem = child.problem or {}
                error = BY_CODE.get(str(problem.get("code")), ForkyardError)(str(problem.get("detail", "")))
                results.append({"error": body_of(status_of(error), error.message)})
                continue
            await self._extend(child.sandbox, DEFAULT_TIMEOUT_S if body.timeout is None else body.timeout)
            results.append({"sandbox": self._sandbox(child.sandbox)})
        return JSONResponse(results, 201)

    async def set_network(self, request: Request) -> Response:
        body = await models.read(request, models.Network)
        info = await self._living(request)
        policy = policy_of(body, body.allow_internet)
        if body.allow_public is None:  # only what may leave is replaced
            policy = policy.model_copy(update={"ingress": info.network.ingress})
        note = Note.of(info) or Note(objects.template_of(info))
        # What may enter stays as it was.
        kept = {name: value for name, value in (note.network or {}).items() if name in models.OF_INGRESS}
        note = replace(note, network={**kept, **body.told()}, allow_internet=body.allow_internet)
        change = SandboxUpdate(network=policy, annotations=note.annotations(info.annotations))
        await self._control.sandboxes.update(info.id, change)
        return Response(status_code=204)

    async def _living(self, request: Request) -> SandboxInfo:
        sandbox_id = str(request.path_params["sandbox_id"])
        try:
            info = await self._control.sandboxes.get(sandbox_id)
        except (SandboxNotFound, SandboxEnded):
            info = None
        if info is None or info.state in ENDED or info.state is State.DELETING:
            raise Refused(404, f"sandbox '{sandbox_id[:64]}' not found")
        return info


def _internet(info: SandboxInfo, note: Note | None) -> bool | None:
    """None: nobody said anything of it."""
    if note is None:
        return False if info.network.egress.preset == "none" else None
    return note.allow_internet


def _pause_mode(info: SandboxInfo) -> dict[str, str]:
    """Once it is paused, and not before."""
    if info.state not in (State.PAUSED, State.STOPPED):
        return {}
    return {"pauseMode": "full" if info.state is State.PAUSED else "filesystem"}


def _time_given(request: Request, name: str) -> datetime | None:
    """In seconds; the oldest clients say it in milliseconds."""
    given = models.number(request.query_params.get(name), name, 0, 1000 * FAR)
    if given is None:
        return None
    return datetime.fromtimestamp(given if given <= FAR else given // 1000, UTC)
