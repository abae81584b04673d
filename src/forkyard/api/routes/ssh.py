"""SSH: where the gateway is, public keys, passwords of one sandbox; and ports of a sandbox over a WebSocket.

A port is a WebSocket at `/sandboxes/{id}/ports/{port}`: binary frames are bytes, both ways. The server sends the text
frame `{"type":"open"}` first, when the connection is made, or `{"type":"error","problem":…}`. Either side sends
`{"type":"end"}` when it has no more bytes to send.
"""

from __future__ import annotations

import ipaddress
import json
from typing import Annotated

from fastapi import APIRouter, Body, Path, Request, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.api.sockets import conversation, say, until_one_ends
from forkyard.control.plane import ControlPlane
from forkyard.control.tunnels import Tunnel
from forkyard.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, SandboxNotFound
from forkyard.models import Page
from forkyard.models.ssh import SshAccess, SshAccessCreate, SshDoor, SshKeyCreate, SshKeyInfo

router = APIRouter(tags=["ssh"], route_class=BoundedRoute)


@router.get("/ssh", response_model=SshDoor, summary="Where the SSH gateway is", responses=documented(Conflict))
async def door(request: Request, control: Control) -> Response:
    """Its host keys are what belongs into `known_hosts`."""
    return answer(control.ssh.door(_asked_by(request)))


@router.get("/ssh-keys", response_model=Page[SshKeyInfo], summary="List public keys")
async def list_keys(control: Control) -> Response:
    return answer(Page[SshKeyInfo](items=await control.ssh.list_keys()))


@router.post("/ssh-keys", status_code=201, response_model=SshKeyInfo, summary="Add a public key")
async def add_key(
    body: Annotated[SshKeyCreate, Body(examples=[{"public_key": "ssh-ed25519 AAAAC3… laptop"}])],
    request: Request,
    control: Control,
) -> Response:
    """It opens every sandbox, until it or the API key of this request is deleted. Adding it again is fine."""
    return answer(await control.ssh.add_key(body.public_key, body.name, api_key_id=request.state.api_key_id), 201)


@router.delete("/ssh-keys/{ssh_key_id}", status_code=204, summary="Delete a public key", responses=documented(NotFound))
async def delete_key(ssh_key_id: str, control: Control) -> Response:
    await control.ssh.delete_key(ssh_key_id)
    return done()


@router.post(
    "/sandboxes/{sandbox_id}/ssh",
    status_code=201,
    response_model=SshAccess,
    summary="Make a password for SSH",
    responses=documented(SandboxNotFound, SandboxEnded, Conflict),
)
async def access(
    sandbox_id: Annotated[str, Path()],
    request: Request,
    control: Control,
    body: Annotated[SshAccessCreate | None, Body()] = None,
) -> Response:
    """For this sandbox only, and for a while. The answer shows it this once. Does not wake the sandbox."""
    wanted = body or SshAccessCreate()
    made = await control.ssh.access(
        sandbox_id, wanted.ttl_s, api_key_id=request.state.api_key_id, host=_asked_by(request)
    )
    return answer(made, 201)


def _asked_by(request: Request) -> str | None:
    """The name this client reaches us by; None if it came by the unix socket."""
    server = request.scope.get("server")
    if server is None or str(server[0]).startswith("/"):
        return None
    host = request.url.hostname
    try:
        unspecified = ipaddress.ip_address(host or "").is_unspecified
    except ValueError:
        unspecified = not host
    return None if unspecified else host


@router.websocket("/sandboxes/{sandbox_id}/ports/{port}")
async def port(socket: WebSocket, sandbox_id: str, port: str) -> None:
    control: ControlPlane = socket.app.state.control
    async with conversation(socket):
        tunnel = await control.tunnels.open(sandbox_id, _port(port))
        try:
            await say(socket, {"type": "open"})
            await until_one_ends(_up(socket, tunnel), _down(socket, tunnel))
        finally:
            await tunnel.aclose()


async def _up(socket: WebSocket, tunnel: Tunnel) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        if message.get("bytes") is not None:
            await tunnel.write(message["bytes"])
        elif _kind(message.get("text") or "") == "end":
            await tunnel.end()
        else:
            raise InvalidRequest('a text frame is {"type":"end"} and nothing else; bytes are binary frames')


async def _down(socket: WebSocket, tunnel: Tunnel) -> None:
    while data := await tunnel.read():
        await socket.send_bytes(data)
    await say(socket, {"type": "end"})


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536 and len(text) < 6):
        raise InvalidRequest(f"{text[:20]!r} is no port; ports are 1 to 65535", field="port")
    return int(text)


def _kind(text: str) -> str | None:
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return str(frame.get("type")) if isinstance(frame, dict) else None
