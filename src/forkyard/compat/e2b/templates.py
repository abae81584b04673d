"""E2B's templates: requested, given files, built, tagged, found by name. What a name means for a new sandbox."""

from __future__ import annotations

import hmac
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forkyard.builds.templates import Recipe, Templates
from forkyard.compat.e2b import models
from forkyard.compat.e2b.errors import Refused
from forkyard.compat.e2b.network import policy_of
from forkyard.compat.e2b.notes import Note
from forkyard.compat.e2b.recipes import recipe_of
from forkyard.compat.e2b.snapshots import DISK_ALONE, TEAM, find_snapshot, split
from forkyard.compat.e2b.users import User
from forkyard.control.plane import ControlPlane
from forkyard.errors import BuildNotFound, SnapshotNotFound, TemplateNotFound
from forkyard.models.builds import BuildCreate, BuildEnd, BuildInfo, BuildOutput, BuildPhase
from forkyard.models.specs import Size
from forkyard.store.templates import TemplateBuildRecord, TemplateRecord

#: A plain sandbox. Of the others a template may be built, with what code there is to find.
BASE = "base"
PLAIN = frozenset({BASE, "code-interpreter-v1"})
MAX_ENTRIES = 100
DISK_GIB = 8
UPLOAD_S = 3600
_HASH = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_STATUS = {"waiting": "waiting", "building": "building", "ready": "ready", "error": "error"}


@dataclass(frozen=True)
class Origin:
    """What a sandbox is made from; neither a snapshot nor a recipe: the base image."""

    id: str
    alias: str | None
    snapshot: str | None = None
    recipe: Recipe | None = None
    user: str | None = None  # what commands run as, and where
    workdir: str | None = None
    memory: bool = True  # not: it boots the disk of the snapshot


class TemplateRoutes:
    def __init__(self, control: ControlPlane, templates: Templates, default_user: str) -> None:
        self._control = control
        self._templates = templates
        self._default_user = User(default_user)

    async def origin(self, given: str) -> Origin:
        """404 if nothing has this name."""
        name = given.rpartition("/")[2].partition(":")[0]
        if name == BASE:
            return Origin(BASE, BASE)
        try:
            template, recipe = await self._templates.recipe(given)
            return Origin(template.id, template.name, recipe=recipe, user=recipe.user, workdir=recipe.workdir)
        except TemplateNotFound:
            if name in PLAIN:
                return Origin(name, name)
        try:
            found = await find_snapshot(self._control, given)
            note = Note.of(found)
            user, workdir = (None, None) if note is None else (note.user, note.workdir)
            alias = None if found.name is None else split(found.name)[0]
            return Origin(found.id, alias, found.id, None, user, workdir, DISK_ALONE not in found.annotations)
        except SnapshotNotFound:
            raise Refused(404, f"template '{given[:128]}' not found") from None

    # ── build ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def request(self, request: Request) -> Response:
        body = await models.read(request, models.NewTemplate)
        given = body.name or body.alias
        if given is None:
            raise Refused(400, "name is missing")
        name, _, tag = given.rpartition("/")[2].partition(":")
        if name == BASE:
            raise Refused(409, f"{name!r} is the name of a template that is there already; choose another")
        wanted = {"vcpus": body.cpus, "memory_mib": body.memory_mib}
        if body.free_mb:  # besides what a template usually has; what nobody writes takes no room
            wanted["disk_gib"] = DISK_GIB + -(-body.free_mb // 1024)
        size = Size(**{field: value for field, value in wanted.items() if value is not None})
        tags = list(dict.fromkeys([*([tag] if tag else []), *body.tags]))
        made = await self._templates.request(models.checked_name(name), tags, size)
        names = [f"{TEAM}/{name}"]
        answer = {"templateID": made.template_id, "buildID": made.id, "public": False, "tags": made.tags}
        return JSONResponse({**answer, "names": names, "aliases": [name]}, 202)

    async def files(self, request: Request) -> Response:
        files_hash = _hash(request)
        await self._found(request)
        present = await self._templates.upload_of(files_hash) is not None
        until = int(time.time()) + UPLOAD_S
        path = f"templates/{quote(str(request.path_params['template_id']), safe='')}/files/{files_hash}"
        url = f"{request.base_url}{path}?expires={until}&signature={self._signature(files_hash, until)}"
        return JSONResponse({"present": present, "url": url}, 201)

    async def upload(self, request: Request) -> Response:
        """Whoever was given the address may: a client sends no key with it."""
        files_hash, until = _hash(request), request.query_params.get("expires", "")
        valid = until.isascii() and until.isdigit() and len(until) < 15
        wanted = self._signature(files_hash, int(until) if valid else 0)
        given = request.query_params.get("signature", "").encode("utf-8", "replace")
        if not valid or not hmac.compare_digest(given, wanted.encode()):
            raise Refused(401, "this is not an address for uploads that was given by this daemon")
        if int(until) < time.time():
            raise Refused(401, "the time for this upload is over; ask for its address again")
        await self._templates.receive(files_hash, request.stream())
        return Response(status_code=200)

    def _signature(self, files_hash: str, until: int) -> str:
        return self._control.secrets.digest(f"e2b upload of {files_hash} until {until}")

    async def begin(self, request: Request) -> Response:
        body = await models.read(request, models.BuildStart)
        template = await self._found(request)
        build_id = str(request.path_params["build_id"])
        record = await self._build(template.id, build_id)
        origin = Origin(BASE, BASE) if body.from_template is None else await self.origin(body.from_template)
        user = self._default_user if origin.user is None else User(origin.user)
        uploads = {}
        for one in body.steps:
            if one.files_hash and (upload := await self._templates.upload_of(one.files_hash)) is not None:
                uploads[one.files_hash] = upload
        recipe = recipe_of(
            body,
            Size.model_validate(record.size),
            uploads,
            base=origin.recipe,
            snapshot=origin.snapshot,
            default_user=user.name,
            default_home=origin.workdir or user.home,
        )
        wanted = BuildCreate(
            spec=recipe.spec, skip_cache=body.force, network=policy_of(None, None), registry=body.credentials()
        )
        await self._templates.begin(template.id, build_id, recipe, wanted, request.state.principal.id)
        return Response(status_code=202)

    # ── how it goes ──────────────────────────────────────────────────────────────────────────────────────────────

    async def status(self, request: Request) -> Response:
        template = await self._found(request)
        record = await self._build(template.id, str(request.path_params["build_id"]))
        offset = models.number(request.query_params.get("logsOffset"), "logsOffset", 0, 10**8) or 0
        doing = await self._templates.doing(record)
        entries = [] if doing is None else await self._entries(doing.id, offset)
        answer: dict[str, Any] = {
            "templateID": template.id,
            "buildID": record.id,
            "status": _STATUS[record.state],
            "logs": [],
            "logEntries": entries,
        }
        if record.state == "error":
            answer["reason"] = _reason(record, doing)
        return JSONResponse(answer)

    async def build_logs(self, request: Request) -> Response:
        template = await self._found(request)
        record = await self._build(template.id, str(request.path_params["build_id"]))
        doing = await self._templates.doing(record)
        return JSONResponse({"logs": [] if doing is None else await self._entries(doing.id, 0)})

    async def _entries(self, build_id: str, offset: int) -> list[dict[str, Any]]:
        """An entry is a line of our journal, so that an offset means the same in both."""
        entries: list[dict[str, Any]] = []
        async with self._templates.builds.logs(build_id, after=offset) as events:
            async for event in events:
                entries.append(_entry(event))
                if len(entries) == MAX_ENTRIES:
                    break
        return entries

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def alias(self, request: Request) -> Response:
        given = str(request.path_params["alias"])
        try:
            template = await self._templates.template(given)
            return JSONResponse({"templateID": template.id, "public": template.public})
        except TemplateNotFound:
            if given.rpartition("/")[2].partition(":")[0] in PLAIN:
                return JSONResponse({"templateID": given.partition(":")[0], "public": True})
        try:
            return JSONResponse({"templateID": (await find_snapshot(self._control, given)).id, "public": False})
        except SnapshotNotFound:
            raise Refused(404, f"template alias '{given[:128]}' not found") from None

    async def listed(self, _request: Request) -> Response:
        return JSONResponse([await self._described(one) for one in await self._templates.all()])

    async def defaults(self, _request: Request) -> Response:
        return JSONResponse([])

    async def info(self, request: Request) -> Response:
        template = await self._found(request)
        builds = await self._templates.built(template.id)
        return JSONResponse({**await self._described(template), "builds": [_built(one) for one in builds]})

    async def _described(self, template: TemplateRecord) -> dict[str, Any]:
        builds = await self._templates.built(template.id)
        newest = builds[0]
        return {
            "templateID": template.id,
            "buildID": newest.id,
            **_size(newest),
            "public": template.public,
            "aliases": [template.name],
            "names": [f"{TEAM}/{template.name}"],
            "createdAt": _time(template.created_at),
            "updatedAt": _time(template.updated_at),
            "createdBy": None,
            "lastSpawnedAt": None,
            "spawnCount": 0,
            "buildCount": len(builds),
            "envdVersion": models.ENVD_VERSION,
            "buildStatus": _STATUS[newest.state],
        }

    # ── change ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def update(self, request: Request) -> Response:
        body = await models.read(request, models.TemplateUpdate)
        template = await self._found(request)
        if body.public is not None:
            await self._templates.set_public(template.id, body.public)
        return JSONResponse({"names": [f"{TEAM}/{template.name}"]})

    async def delete(self, request: Request) -> Response:
        """A template, or a snapshot: for E2B that is the same."""
        given = str(request.path_params["template_id"])
        try:
            await self._templates.delete(given)
            return Response(status_code=204)
        except TemplateNotFound:
            pass
        try:
            await self._control.snapshots.delete((await find_snapshot(self._control, given)).id)
        except SnapshotNotFound:
            raise Refused(404, f"template '{given[:128]}' not found") from None
        return Response(status_code=204)

    # ── tags ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def tag(self, request: Request) -> Response:
        body = await models.read(request, models.TagTemplate)
        try:
            record = await self._templates.tag(body.target, body.tags)
        except TemplateNotFound as error:
            raise Refused(404, error.message) from None
        return JSONResponse({"buildID": record.id, "tags": body.tags}, 201)

    async def untag(self, request: Request) -> Response:
        body = await models.read(request, models.UntagTemplate)
        try:
            await self._templates.untag(body.name, body.tags)
        except TemplateNotFound as error:
            raise Refused(404, error.message) from None
        return Response(status_code=204)

    async def tags(self, request: Request) -> Response:
        template = await self._found(request)
        tags = await self._templates.tags(template.id)
        return JSONResponse(
            [{"tag": one.tag, "buildID": one.build_id, "createdAt": _time(one.created_at)} for one in tags]
        )

    async def _found(self, request: Request) -> TemplateRecord:
        given = str(request.path_params["template_id"])
        if given.count("/") > 1:  # no name has two; it is a path that nobody serves
            raise Refused(501, f"{request.method} {request.url.path[:200]} is not served by Forkyard yet")
        try:
            return await self._templates.template(given)
        except TemplateNotFound:
            raise Refused(404, f"template '{given[:128]}' not found") from None

    async def _build(self, template_id: str, build_id: str) -> TemplateBuildRecord:
        try:
            return await self._templates.build(template_id, build_id)
        except BuildNotFound:
            raise Refused(404, f"build '{build_id[:64]}' not found") from None


def _hash(request: Request) -> str:
    given = str(request.path_params["hash"])
    if _HASH.fullmatch(given) is None:
        raise Refused(400, "a hash has letters and digits only")
    return given


def _entry(event: BuildPhase | BuildOutput | BuildEnd) -> dict[str, Any]:
    level = "info"
    if isinstance(event, BuildPhase):
        message = event.text if event.phase != "done" else f"{event.text}: done"
    elif isinstance(event, BuildOutput):
        message = event.text.rstrip("\n")
        level = "info" if event.stream == "stdout" else "warn"
    else:
        message = event.message or f"the build has {event.state}"
        level = "info" if event.state == "succeeded" else "error"
    return {"timestamp": _time(event.at), "level": level, "message": message}


def _reason(record: TemplateBuildRecord, doing: BuildInfo | None) -> dict[str, Any]:
    failure = None if doing is None else doing.failure
    if failure is None:
        return {"message": "the build was cancelled"}
    labels = (record.recipe or {}).get("labels", [])
    known = failure.step is not None and failure.step < len(labels)
    lines = [
        {"timestamp": _time(datetime.now(UTC)), "level": "error", "message": line} for line in failure.log.splitlines()
    ]
    return {
        "message": failure.message,
        "logEntries": lines[-MAX_ENTRIES:],
        **({"step": labels[failure.step]} if known else {}),
    }


def _size(record: TemplateBuildRecord) -> dict[str, int]:
    size = Size.model_validate(record.size)
    return {"cpuCount": size.vcpus, "memoryMB": size.memory_mib, "diskSizeMB": size.disk_gib * 1024}


def _built(record: TemplateBuildRecord) -> dict[str, Any]:
    ended = {} if record.finished_at is None else {"finishedAt": _time(record.finished_at)}
    return {
        "buildID": record.id,
        "status": _STATUS[record.state],
        "createdAt": _time(record.created_at),
        "updatedAt": _time(record.finished_at or record.created_at),
        **_size(record),
        **ended,
    }


def _time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
