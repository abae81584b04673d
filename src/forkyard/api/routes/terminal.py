"""A terminal over a WebSocket.

Binary frames are bytes, both ways. Text frames are JSON: the client sends `{"type":"resize","rows":…,"cols":…}` and
`{"type":"signal","signal":2}`; the server sends `{"type":"started",…}` first and `{"type":"exit",…}` or
`{"type":"error","problem":…}` last. A client that goes away leaves the program running: connect again with `exec_id`.
An open terminal does not keep its sandbox awake. It stays open while the sandbox sleeps, and the next key wakes it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from pydantic import BaseModel, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from forkyard.api.inputs import MAX_BODY_BYTES, exec_spec
from forkyard.api.sockets import conversation, say, until_one_ends
from forkyard.api.streams import exec_event
from forkyard.control.plane import ControlPlane
from forkyard.errors import GuestUnreachable, InvalidRequest
from forkyard.guest.base import Execution, Exit, Guest, Output
from forkyard.models import ExecCreate, ExecResize, ExecSignal
from forkyard.models.base import field_of

router = APIRouter(tags=["execs"])

SHELL = ["/bin/bash", "-l"]
M = TypeVar("M", bound=BaseModel)


@router.websocket("/sandboxes/{sandbox_id}/terminal")
async def terminal(
    socket: WebSocket,
    sandbox_id: str,
    command: Annotated[str | None, Query()] = None,
    user: Annotated[str | None, Query()] = None,
    cwd: Annotated[str | None, Query()] = None,
    rows: Annotated[str, Query()] = "24",
    cols: Annotated[str, Query()] = "80",
    exec_id: Annotated[str | None, Query()] = None,
) -> None:
    control: ControlPlane = socket.app.state.control
    async with conversation(socket):
        if exec_id is not None:
            source = control.following.attach(sandbox_id, exec_id)
        else:
            wanted = {"command": command or SHELL, "user": user, "cwd": cwd, "rows": rows, "cols": cols}
            spec = exec_spec(_parsed(ExecCreate, {**wanted, "pty": True, "stdin": True}))
            source = control.following.execute(sandbox_id, spec)
        async with source as execution:
            await say(socket, {"type": "started", "exec_id": execution.id, "pid": execution.pid})
            await until_one_ends(_type(socket, control, sandbox_id, execution.id), _show(socket, execution))


async def _show(socket: WebSocket, execution: Execution) -> None:
    async for item in execution:
        if isinstance(item, Output):
            await socket.send_bytes(item.data)
            continue
        await say(socket, exec_event(item))
        if isinstance(item, Exit):
            return
    raise GuestUnreachable(f"the channel to exec {execution.id} broke; connect again with exec_id={execution.id}")


async def _type(socket: WebSocket, control: ControlPlane, sandbox_id: str, exec_id: str) -> None:
    """Every frame is a use of its own: an open terminal does not keep a sandbox awake, and a key wakes it."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        async with control.sandboxes.use(sandbox_id) as guest:
            if message.get("bytes") is not None:
                data: bytes = message["bytes"]
                for start in range(0, len(data), MAX_BODY_BYTES):
                    await guest.write_stdin(exec_id, data[start : start + MAX_BODY_BYTES])
            else:
                await _control(message["text"], guest, exec_id)


async def _control(text: str, guest: Guest, exec_id: str) -> None:
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError):
        frame = None
    if not isinstance(frame, dict) or "type" not in frame:
        raise InvalidRequest(f"{text[:100]!r} is not a JSON object with a type")
    kind = frame.pop("type")
    if kind == "resize":
        size = _parsed(ExecResize, frame)
        await guest.resize(exec_id, size.rows, size.cols)
    elif kind == "signal":
        sent = _parsed(ExecSignal, {"tree": False, **frame})
        await guest.signal(exec_id, sent.signal, tree=sent.tree)
    else:
        raise InvalidRequest(f"a frame of type {str(kind)[:100]!r} is unknown; send resize or signal")


def _parsed(model: type[M], fields: dict[str, Any]) -> M:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        message = "; ".join(f"{field_of(item['loc'])}: {item['msg']}" for item in error.errors())
        raise InvalidRequest(message) from None
