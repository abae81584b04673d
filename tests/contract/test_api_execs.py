"""Execs and terminals through the API: streams that end, break, stay silent, or lose their reader."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
import websockets
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, unix_connect

from forkyard.errors import CommandNotFound, GuestUnreachable
from forkyard.guest.base import Exit, Lost, Output
from forkyard.models import ExecEvent, ExecExit, ExecInfo, ExecLost, ExecOutput, ExecStarted, Page

from .conftest import JSON, ScriptedGuest, World, as_json

pytestmark = pytest.mark.anyio

_EVENT: TypeAdapter[Any] = TypeAdapter(ExecEvent)
DONE = Exit(0, None, False, 12.5)


async def guest_of(world: World) -> tuple[str, ScriptedGuest]:
    return await world.sandbox(), world.guests[-1]


async def test_an_exec_streams_started_output_and_exit(world: World) -> None:
    sandbox_id, guest = await guest_of(world)
    script = guest.script("build").feed(
        Output("stdout", 0, b"\xff\x00"), Lost("stderr", 0, 10), Output("stderr", 10, b"e"), DONE
    )
    answer = await world.client.post(f"/sandboxes/{sandbox_id}/exec", json={"command": "build", "cwd": "/repo"})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    events = [_EVENT.validate_json(line) for line in answer.text.splitlines()]
    assert events == [
        ExecStarted(exec_id="build", pid=7),
        ExecOutput(stream="stdout", offset=0, data=base64.b64encode(b"\xff\x00").decode()),
        ExecLost(stream="stderr", offset=0, bytes=10),
        ExecOutput(stream="stderr", offset=10, data=base64.b64encode(b"e").decode()),
        ExecExit(exit_code=0, duration_ms=12.5),
    ]
    assert script.attached == 0
    assert guest.specs[-1].cwd == "/repo"


async def test_an_exec_that_cannot_start_is_an_ordinary_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox_id, guest = await guest_of(world)

    def refuse(spec: object) -> None:
        raise CommandNotFound("there is no program 'nope'")

    monkeypatch.setattr(guest, "execute", refuse)
    answer = await world.client.post(f"/sandboxes/{sandbox_id}/exec", json={"command": ["nope"]})
    assert (answer.status_code, answer.json()["code"]) == (400, "command_not_found")


@pytest.mark.parametrize("broken", [GuestUnreachable("the channel broke"), None])
async def test_a_stream_that_breaks_ends_with_an_error_line(world: World, broken: GuestUnreachable | None) -> None:
    sandbox_id, guest = await guest_of(world)
    guest.script("build").feed(Output("stdout", 0, b"x"), broken)
    answer = await world.client.post(f"/sandboxes/{sandbox_id}/exec", json={"command": "build"})
    last = json.loads(answer.text.splitlines()[-1])
    assert answer.status_code == 200
    assert (last["type"], last["problem"]["code"]) == ("error", "guest_unreachable")


async def test_a_client_that_goes_away_detaches_at_once(world: World, served: httpx.AsyncClient) -> None:
    sandbox_id, guest = await guest_of(world)
    script = guest.script("server").feed(Output("stdout", 0, b"listening"))
    async with served.stream("POST", f"/sandboxes/{sandbox_id}/exec", json={"command": "server"}) as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["type"] == "started"
        assert json.loads(await anext(lines))["type"] == "output"
        assert script.attached == 1
    await asyncio.wait_for(script.detached.wait(), 5)
    assert script.attached == 0


async def test_a_silent_stream_is_kept_alive_by_empty_lines(
    world: World, served: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkyard.api.streams.KEEP_ALIVE_S", 0.02)
    sandbox_id, guest = await guest_of(world)
    script = guest.script("think")
    async with served.stream("POST", f"/sandboxes/{sandbox_id}/exec", json={"command": "think"}) as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["type"] == "started"
        assert [await anext(lines) for _ in range(2)] == ["", ""]
        script.feed(DONE)
        rest = [line async for line in lines if line]
    assert json.loads(rest[-1])["type"] == "exit"


async def test_a_reader_that_is_slow_holds_only_its_own_stream_back(world: World, served: httpx.AsyncClient) -> None:
    sandbox_id, guest = await guest_of(world)
    piece = b"x" * 65536
    script = guest.script("flood").feed(*(Output("stdout", n * len(piece), piece) for n in range(200)), DONE)
    async with served.stream("POST", f"/sandboxes/{sandbox_id}/exec", json={"command": "flood"}) as answer:
        await asyncio.sleep(0.05)
        assert script._items.qsize() > 0  # the server did not read it all into memory
        guest.script("quick").feed(DONE)
        other = await served.post(f"/sandboxes/{sandbox_id}/exec", json={"command": "quick"})
        assert '"exit"' in other.text
        count = sum([len(line) async for line in answer.aiter_lines()])
    assert count > 200 * len(piece)


async def test_output_is_followed_from_an_offset(world: World) -> None:
    sandbox_id, guest = await guest_of(world)
    guest.script("e1").feed(Output("stdout", 5, b"later"), DONE)
    answer = await world.client.get(f"/sandboxes/{sandbox_id}/execs/e1/output?stdout_offset=5&stderr_offset=2")
    assert guest.calls == [("attach", "e1", 5, 2)]
    assert [json.loads(line)["type"] for line in answer.text.splitlines()] == ["started", "output", "exit"]


async def test_background_execs_are_started_and_listed(world: World) -> None:
    sandbox_id, _ = await guest_of(world)
    created = await world.client.post(f"/sandboxes/{sandbox_id}/execs", json={"command": "sleep 0"})
    assert created.status_code == 201
    info = ExecInfo.model_validate(created.json())
    listed = Page[ExecInfo].model_validate((await world.client.get(f"/sandboxes/{sandbox_id}/execs")).json())
    assert [one.id for one in listed.items] == [info.id]
    got = await world.client.get(f"/sandboxes/{sandbox_id}/execs/{info.id}")
    assert got.json()["command"] == "sleep 0"


@pytest.mark.parametrize("path", ["/execs/nope", "/execs/nope/output"])
async def test_an_unknown_exec_is_not_found(world: World, path: str) -> None:
    sandbox_id, _ = await guest_of(world)
    answer = await world.client.get(f"/sandboxes/{sandbox_id}{path}")
    assert (answer.status_code, answer.json()["code"]) == (404, "exec_not_found")


async def test_stdin_signals_and_sizes_reach_the_guest(world: World) -> None:
    sandbox_id, guest = await guest_of(world)
    at = f"/sandboxes/{sandbox_id}/execs/e1"
    answers = [
        await world.client.post(f"{at}/stdin", content=b"\x00\xff"),
        await world.client.post(f"{at}/stdin?close=true", content=b""),
        await world.client.post(f"{at}/signal", json={"signal": 9, "tree": False}),
        await world.client.post(f"{at}/resize", json={"rows": 50, "cols": 132}),
    ]
    assert [answer.status_code for answer in answers] == [204] * 4
    assert guest.calls == [
        ("stdin", "e1", b"\x00\xff", False),
        ("stdin", "e1", b"", True),
        ("signal", "e1", 9, False),
        ("resize", "e1", 50, 132),
    ]


async def test_a_piece_of_stdin_has_a_limit(world: World) -> None:
    sandbox_id, guest = await guest_of(world)
    answer = await world.client.post(f"/sandboxes/{sandbox_id}/execs/e1/stdin", content=b"x" * (2**20 + 1))
    assert answer.status_code == 422
    assert guest.calls == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": ""},
        {"command": []},
        {"command": 5},
        {"command": "a\0b"},
        {"command": ["a", "b\0"]},
        {"command": "\ud800"},
        {"command": "true", "cwd": ""},
        {"command": "true", "cwd": "/a\0"},
        {"command": "true", "env": {"A": "\0"}},
        {"command": "true", "env": {"A=B": "c"}},
        {"command": "true", "user": "../root"},
        {"command": "true", "timeout_s": 0},
        {"command": "true", "timeout_s": -1},
        {"command": "true", "rows": 0},
        {"command": "true", "shell": "zsh"},
    ],
)
@pytest.mark.parametrize("route", ["exec", "execs"])
async def test_an_impossible_command_is_refused(world: World, body: dict[str, Any], route: str) -> None:
    sandbox_id, guest = await guest_of(world)
    answer = await world.client.post(f"/sandboxes/{sandbox_id}/{route}", content=as_json(body), headers=JSON)
    assert answer.status_code == 422
    assert guest.specs == []


# ── terminals ────────────────────────────────────────────────────────────────────────────────────────────────────


def connect(world: World, served: httpx.AsyncClient, sandbox_id: str, query: str = "", **options: Any) -> unix_connect:
    path = served._transport._pool._uds  # type: ignore[attr-defined]
    headers = options.pop("headers", {"Authorization": f"Bearer {world.key}"})
    uri = f"ws://localhost/api/v1/sandboxes/{sandbox_id}/terminal{query}"
    return unix_connect(path, uri, additional_headers=headers, **options)


async def said(socket: ClientConnection) -> dict[str, Any]:
    message = await asyncio.wait_for(socket.recv(), 5)
    assert isinstance(message, str), message
    return dict(json.loads(message))


async def test_a_terminal_carries_bytes_sizes_and_signals(world: World, served: httpx.AsyncClient) -> None:
    sandbox_id, guest = await guest_of(world)
    script = guest.script("/bin/bash -l").feed(Output("stdout", 0, b"\x1b[1m$ "))
    async with connect(world, served, sandbox_id, "?rows=40&cols=100&user=user&cwd=/tmp") as socket:
        assert await said(socket) == {"type": "started", "exec_id": "/bin/bash -l", "pid": 7}
        assert await socket.recv() == b"\x1b[1m$ "
        await socket.send(b"ls\r")
        await socket.send('{"type":"resize","rows":50,"cols":132}')
        await socket.send('{"type":"signal","signal":2}')
        while len(guest.calls) < 3:
            await asyncio.wait_for(guest.called.wait(), 5)
            guest.called.clear()
        script.feed(Exit(None, 2, False, 5.0))
        assert await said(socket) == {
            "type": "exit",
            "exit_code": None,
            "signal": 2,
            "timed_out": False,
            "duration_ms": 5.0,
        }
        with pytest.raises(websockets.ConnectionClosedOK):
            await socket.recv()
    exec_id = "/bin/bash -l"
    assert guest.calls == [
        ("stdin", exec_id, b"ls\r", False),
        ("resize", exec_id, 50, 132),
        ("signal", exec_id, 2, False),
    ]
    spec = guest.specs[-1]
    assert (spec.pty, spec.stdin, spec.rows, spec.cols, spec.user, spec.cwd) == (True, True, 40, 100, "user", "/tmp")


async def test_a_terminal_that_is_closed_detaches_and_can_be_attached_again(
    world: World, served: httpx.AsyncClient
) -> None:
    sandbox_id, guest = await guest_of(world)
    script = guest.script("top")
    async with connect(world, served, sandbox_id, "?command=top") as socket:
        assert (await said(socket))["type"] == "started"
    await asyncio.wait_for(script.detached.wait(), 5)
    assert guest.calls == []  # neither killed nor fed
    async with connect(world, served, sandbox_id, "?exec_id=top") as socket:
        assert (await said(socket))["exec_id"] == "top"
        script.feed(DONE)
        assert (await said(socket))["type"] == "exit"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("?exec_id=nope", "exec_not_found"),
        ("?rows=0", "invalid_request"),
        ("?rows=x", "invalid_request"),
        ("?user=a%20b", "invalid_request"),
        ("?cwd=%00", "invalid_path"),
    ],
)
async def test_a_terminal_that_cannot_open_says_why(
    world: World, served: httpx.AsyncClient, query: str, code: str
) -> None:
    sandbox_id, _ = await guest_of(world)
    async with connect(world, served, sandbox_id, query) as socket:
        message = await said(socket)
        assert (message["type"], message["problem"]["code"]) == ("error", code)
        with pytest.raises(websockets.ConnectionClosedError):
            await socket.recv()


async def test_a_terminal_of_no_sandbox_says_so(world: World, served: httpx.AsyncClient) -> None:
    async with connect(world, served, "nosuchsandbox") as socket:
        assert (await said(socket))["problem"]["code"] == "sandbox_not_found"


@pytest.mark.parametrize("frame", ["no json", "[]", "{}", '{"type":"dance"}', '{"type":"resize","rows":-1,"cols":1}'])
async def test_a_frame_that_makes_no_sense_ends_the_terminal_with_an_error(
    world: World, served: httpx.AsyncClient, frame: str
) -> None:
    sandbox_id, guest = await guest_of(world)
    script = guest.script("/bin/bash -l")
    async with connect(world, served, sandbox_id) as socket:
        await said(socket)
        await socket.send(frame)
        assert (await said(socket))["problem"]["code"] == "invalid_request"
    await asyncio.wait_for(script.detached.wait(), 5)


async def test_a_terminal_accepts_the_key_in_the_query(world: World, served: httpx.AsyncClient) -> None:
    sandbox_id, guest = await guest_of(world)
    guest.script("/bin/bash -l").feed(DONE)
    async with connect(world, served, sandbox_id, f"?key={world.key}", headers={}) as socket:
        assert (await said(socket))["type"] == "started"


@pytest.mark.parametrize("query", ["", "?key=wrong"])
async def test_a_terminal_without_a_key_is_refused(world: World, served: httpx.AsyncClient, query: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as raised:
        async with connect(world, served, "anything", query, headers={}):
            pass
    assert raised.value.response.status_code == 401
    assert json.loads(raised.value.response.body)["code"] == "unauthenticated"
