"""Code: run it in a sandbox, in contexts whose variables live on from run to run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import CodeRoute, Control, checked_env, checked_path, checked_text
from forkyard.api.problem import documented
from forkyard.api.streams import NdjsonStream, lines, opened
from forkyard.errors import (
    CommandNotFound,
    ContextEnded,
    ContextNotFound,
    GuestFailure,
    GuestUnreachable,
    LanguageMissing,
    NoCapacity,
    OperationTimeout,
    SandboxEnded,
    SandboxNotFound,
    StateConflict,
)
from forkyard.models import Page
from forkyard.models.code import CodeRun, ContextCreate, ContextInfo

router = APIRouter(
    prefix="/sandboxes/{sandbox_id}",
    tags=["code"],
    route_class=CodeRoute,
    responses=documented(
        SandboxNotFound,
        ContextNotFound,
        SandboxEnded,
        StateConflict,
        GuestFailure,
        GuestUnreachable,
        CommandNotFound,
        LanguageMissing,
        ContextEnded,
        NoCapacity,
        OperationTimeout,
    ),
)

_LINES: dict[str, Any] = {
    "description": "One `CodeEvent` per line; an empty line every 15 s keeps the connection alive.",
    "content": {
        NdjsonStream.media_type: {
            "schema": {"type": "string"},
            "example": '{"type":"started","context_id":"python","execution_count":1}\n'
            '{"type":"output","stream":"stdout","text":"hello\\n"}\n'
            '{"type":"result","main":true,"text":"42"}\n'
            '{"type":"end","status":"ok","state_kept":true,"untold_chars":0,"duration_ms":41.5}\n',
        }
    },
}
_Id = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$", description="Id of a context of this sandbox.")]


@router.post("/code", response_class=NdjsonStream, summary="Run code and stream what it does", responses={200: _LINES})
async def run(
    sandbox_id: str,
    control: Control,
    body: Annotated[CodeRun, Body(examples=[{"code": "x = 6 * 7\nx", "language": "python", "timeout_s": 60}])],
) -> Response:
    """The stream is `started`, then `output`, `result` and `exception` as they come, then `end`; or `error` as its last
    line if it breaks. A client that disconnects interrupts the code; the context goes on. Runs in one context wait for
    each other."""
    checked_text(body.code, "code")
    checked_env(body.env)
    stack, events = await opened(control.code.run(sandbox_id, body))
    return NdjsonStream(stack, lines(events))


@router.post("/contexts", status_code=201, response_model=ContextInfo, summary="Make a context")
async def create(
    sandbox_id: str, control: Control, body: Annotated[ContextCreate, Body(examples=[{"language": "python"}])]
) -> Response:
    """Answers when it can run code."""
    checked_env(body.env)
    if body.cwd is not None:
        checked_path(body.cwd, "cwd")
    return answer(await control.code.create(sandbox_id, body), 201)


@router.get("/contexts", response_model=Page[ContextInfo], summary="List contexts")
async def list_(sandbox_id: str, control: Control) -> Response:
    return answer(Page[ContextInfo](items=await control.code.list(sandbox_id)))


@router.get("/contexts/{context_id}", response_model=ContextInfo, summary="Get a context")
async def get(sandbox_id: str, context_id: _Id, control: Control) -> Response:
    return answer(await control.code.get(sandbox_id, context_id))


@router.post("/contexts/{context_id}/restart", response_model=ContextInfo, summary="Let a context forget everything")
async def restart(sandbox_id: str, context_id: _Id, control: Control) -> Response:
    """What runs in it is interrupted."""
    return answer(await control.code.restart(sandbox_id, context_id))


@router.post("/contexts/{context_id}/interrupt", status_code=204, summary="Interrupt what runs in a context")
async def interrupt(sandbox_id: str, context_id: _Id, control: Control) -> Response:
    await control.code.interrupt(sandbox_id, context_id)
    return done()


@router.delete("/contexts/{context_id}", status_code=204, summary="Delete a context")
async def delete(sandbox_id: str, context_id: _Id, control: Control) -> Response:
    await control.code.delete(sandbox_id, context_id)
    return done()
