"""Execs: run and stream, start in the background, list, follow, feed, signal."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control, RunningGuest, exec_spec, raw_body
from forkyard.api.problem import documented
from forkyard.api.streams import NdjsonStream, exec_lines, opened
from forkyard.errors import (
    CommandNotFound,
    Conflict,
    ExecNotFound,
    GuestUnreachable,
    HostFailure,
    NoCapacity,
    OperationTimeout,
    QuotaExceeded,
    SandboxEnded,
    SandboxNotFound,
    StateConflict,
)
from forkyard.models import ExecCreate, ExecInfo, ExecResize, ExecSignal, Page

router = APIRouter(
    prefix="/sandboxes/{sandbox_id}",
    tags=["execs"],
    route_class=BoundedRoute,
    responses=documented(
        SandboxNotFound,
        ExecNotFound,
        SandboxEnded,
        StateConflict,
        Conflict,
        QuotaExceeded,
        HostFailure,
        GuestUnreachable,
        NoCapacity,
        OperationTimeout,
    ),
)

_STARTING = documented(CommandNotFound)
_LINES: dict[str, Any] = {
    "description": "One `ExecEvent` per line; an empty line every 15 s keeps the connection alive.",
    "content": {
        NdjsonStream.media_type: {
            "schema": {"type": "string"},
            "example": '{"type":"started","exec_id":"e1","pid":312}\n'
            '{"type":"output","stream":"stdout","offset":0,"data":"aGVsbG8K"}\n'
            '{"type":"exit","exit_code":0,"signal":null,"timed_out":false,"duration_ms":41.5}\n',
        }
    },
}
_Offset = Annotated[int, Query(ge=0, le=2**63 - 1, description="Skip this many bytes of the stream.")]
_ExecBody = Annotated[
    ExecCreate,
    Body(
        openapi_examples={
            "shell": {"summary": "A shell command", "value": {"command": "echo $HOME | wc -c"}},
            "argv": {
                "summary": "A program with arguments, as another user, with a limit",
                "value": {"command": ["pytest", "-q"], "cwd": "/repo", "user": "user", "timeout_s": 300},
            },
        }
    ),
]
_ExecId = Annotated[str, Path(description="Id of an exec of this sandbox.")]


@router.post(
    "/exec",
    response_class=NdjsonStream,
    summary="Run a command and stream its output",
    responses=_STARTING | {200: _LINES},
)
async def run(sandbox_id: str, body: _ExecBody, control: Control) -> Response:
    """The stream is `started`, then `output` pieces, then `exit`; or `error` as its last line if it breaks. A client
    that disconnects leaves the process running: follow it again with `…/execs/{exec_id}/output`.

    While a client waits here for a command without a terminal or open input, the sandbox does not fall asleep. Other
    streams keep it awake only while something flows; they stay open while it sleeps and go on when it wakes."""
    spec = exec_spec(body)
    hold = not spec.pty and not spec.stdin
    stack, execution = await opened(control.following.execute(sandbox_id, spec, hold=hold))
    return NdjsonStream(stack, exec_lines(execution, partial(control.egress.denials, sandbox_id)))


@router.post(
    "/execs", status_code=201, response_model=ExecInfo, summary="Start a command in the background", responses=_STARTING
)
async def start(body: _ExecBody, guest: RunningGuest, control: Control) -> Response:
    info = await guest.start(exec_spec(body))
    control.metrics.execs.inc()
    return answer(info, 201)


@router.get("/execs", response_model=Page[ExecInfo], summary="List commands, running and recently ended")
async def list_(guest: RunningGuest) -> Response:
    return answer(Page[ExecInfo](items=await guest.execs()))


@router.get("/execs/{exec_id}", response_model=ExecInfo, summary="Get a command")
async def get(exec_id: _ExecId, guest: RunningGuest) -> Response:
    return answer(await guest.exec_info(exec_id))


@router.get(
    "/execs/{exec_id}/output",
    response_class=NdjsonStream,
    summary="Replay the recent output of a command, then follow it",
    responses={200: _LINES},
)
async def output(
    sandbox_id: str, exec_id: _ExecId, control: Control, stdout_offset: _Offset = 0, stderr_offset: _Offset = 0
) -> Response:
    """Does not keep the sandbox awake while the command is quiet. If the sandbox sleeps, the stream stays open, and
    goes on when it is woken."""
    stack, execution = await opened(
        control.following.attach(sandbox_id, exec_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset)
    )
    return NdjsonStream(stack, exec_lines(execution, partial(control.egress.denials, sandbox_id)))


@router.post(
    "/execs/{exec_id}/stdin",
    status_code=204,
    summary="Write to standard input",
    openapi_extra=raw_body("Bytes for standard input, at most 1 MiB at once."),
)
async def stdin(exec_id: _ExecId, request: Request, guest: RunningGuest, close: bool = False) -> Response:
    await guest.write_stdin(exec_id, await request.body(), close=close)
    return done()


@router.post("/execs/{exec_id}/signal", status_code=204, summary="Send a signal")
async def signal(exec_id: _ExecId, body: ExecSignal, guest: RunningGuest) -> Response:
    await guest.signal(exec_id, body.signal, tree=body.tree)
    return done()


@router.post("/execs/{exec_id}/resize", status_code=204, summary="Resize the terminal of a command")
async def resize(exec_id: _ExecId, body: ExecResize, guest: RunningGuest) -> Response:
    await guest.resize(exec_id, body.rows, body.cols)
    return done()
