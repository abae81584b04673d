"""The git-lfs client's wire: the batch API, basic transfers, locks.

An object's address is on this daemon, and the client is told to send the credential it came with.
"""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from forkyard.api.inputs import upload
from forkyard.control.identities import Principal
from forkyard.errors import ForkyardError, InvalidRequest, NotFound, RepoFull, Unauthenticated
from forkyard.git.hosting import GitHosting
from forkyard.git.lfs import is_oid
from forkyard.git.repositories import Repo
from forkyard.models.git import Permission
from forkyard.store.git import LockRecord

MEDIA_TYPE = "application/vnd.git-lfs+json"
MAX_BATCH = 1000
MAX_JSON_BYTES = 2**20
_OBJECT = re.compile(r"objects/([0-9a-f]{64})")
_UNLOCK = re.compile(r"locks/([A-Za-z0-9]{1,32})/unlock")


class LfsApi:
    def __init__(self, hosting: GitHosting) -> None:
        self._hosting = hosting

    async def wanted(self, request: Request, rest: str) -> Permission:
        """What this request needs."""
        if rest == "objects/batch":
            return "write" if (await _json(request)).get("operation") == "upload" else "read"
        return "read" if request.method == "GET" else "write"

    async def answer(self, request: Request, repo: Repo, who: Principal | None, rest: str) -> Response:
        lfs = self._hosting.lfs
        method = request.method
        if method == "POST" and rest == "objects/batch":
            return _answer(await self._batch(request, repo))
        if method == "POST" and rest == "objects/verify":
            body = await _json(request)
            size = await lfs.size(repo, str(body.get("oid")))
            if size is None or size != body.get("size"):
                raise NotFound(f"object {body.get('oid')!r} of {body.get('size')!r} bytes is not here")
            return _answer({})
        if (found := _OBJECT.fullmatch(rest)) is not None and method == "PUT":
            await lfs.put(repo, found[1], upload(request))
            return _answer({})
        if found is not None and method == "GET":
            return await self._download(request, repo, found[1])
        if who is not None and rest.startswith("locks"):
            return await self._locks(request, repo, who, rest)
        raise NotFound(f"git-lfs has nothing at {method} {rest!r}")

    async def _batch(self, request: Request, repo: Repo) -> dict[str, Any]:
        body = await _json(request)
        operation, objects = body.get("operation"), body.get("objects")
        if operation not in ("upload", "download") or not isinstance(objects, list) or len(objects) > MAX_BATCH:
            raise InvalidRequest(f"a batch is an upload or a download of at most {MAX_BATCH} objects")
        if "basic" not in body.get("transfers", ["basic"]) or body.get("hash_algo", "sha256") != "sha256":
            raise InvalidRequest("only basic transfers of objects named by SHA-256 are possible here")
        base = f"{request.url.scheme}://{request.headers.get('host', '')}/git/{repo.id}.git/info/lfs/objects"
        header = {name: request.headers[name] for name in ("authorization", "x-api-key") if name in request.headers}
        room_bytes = repo.room_bytes
        answers = []
        for item in objects:
            oid, size = (item.get("oid"), item.get("size")) if isinstance(item, dict) else (None, None)
            if not isinstance(oid, str) or not is_oid(oid) or not isinstance(size, int) or size < 0:
                raise InvalidRequest(f"{str(item)[:200]!r} is no object")
            lfs = self._hosting.lfs
            here = await (lfs.size(repo, oid) if operation == "download" else lfs.claim(repo, oid))
            entry: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
            if operation == "download":
                if here is None:
                    message = (
                        f"object {oid} is not here; large files do not come with commits from a remote or an import: "
                        "send them from a clone that has them (`git lfs push --all`)"
                    )
                    entry["error"] = {"code": 404, "message": message}
                else:
                    entry["actions"] = {"download": {"href": f"{base}/{oid}", "header": header}}
            elif here is None and size > room_bytes:
                entry["error"] = {"code": RepoFull.status, "message": f"{size} bytes do not fit into the quota"}
            elif here is None:
                room_bytes -= size
                entry["actions"] = {
                    "upload": {"href": f"{base}/{oid}", "header": header},
                    "verify": {"href": f"{base}/verify", "header": header},
                }
            answers.append(entry)
        return {"transfer": "basic", "objects": answers, "hash_algo": "sha256"}

    async def _download(self, request: Request, repo: Repo, oid: str) -> Response:
        size = await self._hosting.lfs.size(repo, oid)
        if size is None:
            raise NotFound(f"object {oid} is not here", oid=oid)
        asked = re.fullmatch(r"bytes=(\d{1,18})-", request.headers.get("range", ""))
        offset = int(asked[1]) if asked and int(asked[1]) < size else 0
        headers = {"content-length": str(size - offset), "accept-ranges": "bytes"}
        if offset:
            headers["content-range"] = f"bytes {offset}-{size - 1}/{size}"
        return StreamingResponse(
            self._hosting.lfs.read(repo, oid, offset),
            status_code=206 if offset else 200,
            headers=headers,
            media_type="application/octet-stream",
        )

    async def _locks(self, request: Request, repo: Repo, who: Principal, rest: str) -> Response:
        lfs = self._hosting.lfs
        if rest == "locks" and request.method == "GET":
            query = request.query_params
            locks, more = await lfs.locks(
                repo,
                path=query.get("path"),
                lock_id=query.get("id"),
                cursor=query.get("cursor"),
                limit=_limit(query.get("limit")),
            )
            return _answer({"locks": [_lock(lock) for lock in locks], **({"next_cursor": more} if more else {})})
        body = await _json(request)
        if rest == "locks/verify" and request.method == "POST":
            locks, more = await lfs.locks(
                repo, path=None, lock_id=None, cursor=body.get("cursor"), limit=_limit(body.get("limit"))
            )
            ours = [_lock(lock) for lock in locks if lock.owner_id == who.id]
            theirs = [_lock(lock) for lock in locks if lock.owner_id != who.id]
            return _answer({"ours": ours, "theirs": theirs, **({"next_cursor": more} if more else {})})
        if rest == "locks" and request.method == "POST":
            lock, made = await lfs.lock(repo, str(body.get("path", "")), who)
            if made:
                return _answer({"lock": _lock(lock)}, 201)
            return _answer({"lock": _lock(lock), "message": f"{lock.path!r} is locked by {lock.owner_name!r}"}, 409)
        if (found := _UNLOCK.fullmatch(rest)) is not None and request.method == "POST":
            return _answer({"lock": _lock(await lfs.unlock(repo, found[1], who, force=body.get("force") is True))})
        raise NotFound(f"git-lfs has nothing at {request.method} {rest!r}")


def lfs_problem(error: ForkyardError) -> Response:
    response = _answer({"message": error.message}, error.status)
    if isinstance(error, Unauthenticated):
        response.headers["lfs-authenticate"] = response.headers["www-authenticate"] = 'Basic realm="Forkyard"'
    return response


async def _json(request: Request) -> dict[str, Any]:
    """Read once, then remembered: what it needs is known only from what it says."""
    known: dict[str, Any] | None = request.scope.setdefault("state", {}).get("lfs_body")
    if known is not None:
        return known
    data = bytearray()
    async for chunk in upload(request):
        data += chunk
        if len(data) > MAX_JSON_BYTES:
            raise InvalidRequest(f"the body is larger than {MAX_JSON_BYTES} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise InvalidRequest("the body is no JSON object")
    request.scope["state"]["lfs_body"] = body
    return body


def _answer(content: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type=MEDIA_TYPE)


def _lock(lock: LockRecord) -> dict[str, Any]:
    return {
        "id": lock.id,
        "path": lock.path,
        "locked_at": lock.locked_at.isoformat(timespec="seconds"),
        "owner": {"name": lock.owner_name},
    }


def _limit(given: Any) -> int:
    text = str(given or "")
    return min(max(int(text), 1), 1000) if text.isascii() and text.isdigit() and len(text) < 10 else 100
