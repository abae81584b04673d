"""Terminals of Freestyle's contract over WebSockets, and its streams: frames that no client sends, clients that leave at any
moment, VMs that go away under them. Whatever comes, nothing breaks and nothing is left behind."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252

DEADLINE_S = 60.0
MAX_MESSAGE = 16 * 2**20
#: Whatever it is given it says again: its terminal takes no byte for a command.
ECHO = "stty raw -echo && echo ready && exec cat"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def api(daemon: Daemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.url, headers=_key(daemon), timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def vm(api: httpx.Client) -> str:
    return _made(api)


@pytest.fixture
def tidy(daemon: Daemon, api: httpx.Client, vm: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What was opened is gone: tasks of the daemon, windows, terminals. And nothing was unexpected."""
    before = _tasks(daemon)
    yield
    for session in api.get(f"/v1/vms/{vm}/pty/sessions").json()["sessions"]:
        assert api.delete(f"/v1/vms/{vm}/pty/sessions/{session['sessionId']}").status_code == 200
    _until(lambda: not daemon._freestyle._parts.pty._sessions)
    _until(lambda: not _tasks(daemon) - before)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def _tasks(daemon: Daemon) -> set[str]:
    """By what they do: one of a connection that is kept open is as good as another."""

    async def look() -> set[str]:
        found = (task.get_coro() for task in asyncio.all_tasks() if task is not asyncio.current_task())
        return {str(getattr(coro, "__qualname__", coro)) for coro in found}

    return daemon._run(look())


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _session(api: httpx.Client, vm: str, session_id: str) -> dict[str, Any]:
    rows = api.get(f"/v1/vms/{vm}/pty/sessions").json()["sessions"]
    return dict(next(row for row in rows if row["sessionId"] == session_id))


def _key(daemon: Daemon) -> dict[str, str]:
    return {"Authorization": f"Bearer {daemon.key}"}


def _made(api: httpx.Client) -> str:
    return str(api.post("/v1/vms", json={}).json()["id"])


@contextlib.contextmanager
def _open(daemon: Daemon, vm: str, path: str = "", **query: object) -> Iterator[ClientConnection]:
    url = httpx.URL(f"{daemon.url}/v1/vms/{vm}/pty{path}", params=dict(query)).copy_with(scheme="ws")
    with connect(str(url), additional_headers=_key(daemon), max_size=None) as terminal:
        yield terminal


def _read_until(terminal: ClientConnection, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        message = terminal.recv(timeout=DEADLINE_S)
        seen += message if isinstance(message, bytes) else b""
    return seen


def _closed(terminal: ClientConnection) -> ConnectionClosed:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            terminal.recv(timeout=DEADLINE_S)
    return closed.value


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────

_leaf = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
_json = st.recursive(_leaf, lambda of: st.lists(of, max_size=4) | st.dictionaries(st.text(max_size=8), of, max_size=4))
_resize = st.fixed_dictionaries({"type": st.just("resize")}, optional={"cols": _json, "rows": _json})
#: No signal that it would end by: their names are in another case.
_signal = st.fixed_dictionaries({"type": st.just("signal")}, optional={"signal": _json | st.just("sigkill")})
_other = st.fixed_dictionaries({"type": _json}, optional={"sessionId": _json, "exitCode": _json})
_frames = st.lists(
    st.one_of(
        (_resize | _signal | _other | _json).map(json.dumps),
        st.text(max_size=60),
        st.binary(max_size=60),
        st.just("[" * 5000),
    ),
    max_size=12,
)
_settings = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


def test_no_frame_breaks_a_terminal(daemon: Daemon, vm: str, tidy: None) -> None:
    with _open(daemon, vm, exec=ECHO, sessionId="echo") as first:
        _read_until(first, b"ready")

        @_settings
        @given(_frames)
        def check(frames: list[str | bytes]) -> None:
            with _open(daemon, vm, "/sessions/echo") as terminal:
                for frame in frames:
                    terminal.send(frame)
                mark = os.urandom(16).hex().encode()
                terminal.send(mark)
                _read_until(terminal, mark)

        check()
        first.send(b"still here")
        _read_until(first, b"still here")


@_settings
@given(st.binary(min_size=1, max_size=200))
def test_no_bytes_break_the_framing(daemon: Daemon, vm: str, tidy: None, data: bytes) -> None:
    """Not masked, reserved, half of a frame: the connection is given up, and that is all."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=DEADLINE_S) as raw:
        key = base64.b64encode(os.urandom(16)).decode()
        request = (
            f"GET /v1/vms/{vm}/pty?exec=true HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {daemon.key}\r\n"
            f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
        )
        raw.sendall(request.encode())
        assert raw.recv(65536).startswith(b"HTTP/1.1 101 ")
        with contextlib.suppress(ConnectionError):
            raw.sendall(data)


def test_a_frame_that_is_too_large_ends_the_connection_and_not_the_session(daemon: Daemon, vm: str, tidy: None) -> None:
    with _open(daemon, vm, exec=ECHO, sessionId="large") as terminal:
        _read_until(terminal, b"ready")
        with contextlib.suppress(ConnectionClosed):
            terminal.send(b"x" * (MAX_MESSAGE + 1))
        assert _closed(terminal).rcvd is not None
    with _open(daemon, vm, "/sessions/large") as terminal:
        for size in (3 * 2**20, 0, 1):
            terminal.send(b"y" * size)
        terminal.send(b"end of it")
        _read_until(terminal, b"end of it")


def test_a_terminal_is_as_small_as_the_smallest_of_its_windows(daemon: Daemon, vm: str, tidy: None) -> None:
    with _open(daemon, vm, exec="while read line; do stty size; done", sessionId="size", cols=100, rows=40) as one:

        def size(wanted: bytes) -> None:
            deadline = time.monotonic() + DEADLINE_S
            while True:
                one.send(b"\n")
                if wanted in _read_until(one, b"\r\n"):
                    return
                assert time.monotonic() < deadline

        size(b"40 100")
        with _open(daemon, vm, "/sessions/size", cols=80, rows=50) as two:
            size(b"40 80")
            two.send('{"type":"resize","cols":120,"rows":20}')
            size(b"20 100")
        size(b"40 100")


# ── before a terminal is open ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "query", "status", "code"),
    [
        ("/sessions/nothing", {}, 404, "SESSION_NOT_FOUND"),
        ("/sessions/not%20an%20id", {}, 400, "INVALID_SESSION_ID"),
        ("", {"sessionId": "a/b"}, 400, "INVALID_SESSION_ID"),
        ("", {"exec": "a\0b"}, 400, "INVALID_REQUEST"),
        ("/elsewhere", {}, 501, "SERVICE_UNAVAILABLE"),
    ],
)
def test_what_cannot_be_opened_says_why(
    daemon: Daemon, vm: str, path: str, query: dict[str, object], status: int, code: str
) -> None:
    with pytest.raises(InvalidStatus) as refused, _open(daemon, vm, path, **query):
        pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body or b"")["code"] == code


def test_a_session_is_closed_as_the_user_whose_it_is(daemon: Daemon, api: httpx.Client, vm: str, tidy: None) -> None:
    where = f"/v1/vms/{vm}/pty/sessions/mine"
    with _open(daemon, vm, exec="sleep 600", sessionId="mine"):
        refused = api.delete(where, headers={"X-Freestyle-Vm-Linux-User-Id": "bob"})
        assert (refused.status_code, refused.json()["code"]) == (403, "SESSION_USER_MISMATCH")
        session = _session(api, vm, "mine")
        assert session["running"]
        assert api.delete(where, headers={"X-Freestyle-Vm-Linux-User-Id": session["user"]}).status_code == 200


def test_a_session_is_opened_once(daemon: Daemon, vm: str, tidy: None) -> None:
    with _open(daemon, vm, exec="sleep 600", sessionId="one"):
        with pytest.raises(InvalidStatus) as refused, _open(daemon, vm, sessionId="one"):
            pass
        assert refused.value.response.status_code == 409
        assert json.loads(refused.value.response.body or b"")["code"] == "SESSION_ALREADY_EXISTS"


@_settings
@given(st.dictionaries(st.sampled_from(["cols", "rows"]), st.text(max_size=8) | st.integers().map(str)))
def test_no_size_breaks_a_terminal(daemon: Daemon, vm: str, tidy: None, query: dict[str, str]) -> None:
    with _open(daemon, vm, exec="true", **query) as terminal:
        assert _closed(terminal).rcvd is not None


# ── a terminal that breaks ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [("DELETE", "", "has ended"), ("POST", "/kill", "is stop"), ("POST", "/stop", "is stop")],
)
def test_a_terminal_whose_vm_goes_away_is_told(
    daemon: Daemon, api: httpx.Client, vm: str, tidy: None, method: str, path: str, reason: str
) -> None:
    other = _made(api)
    with _open(daemon, other, exec=ECHO) as one, _open(daemon, other, exec="sleep 600") as two:
        _read_until(one, b"ready")
        assert api.request(method, f"/v1/vms/{other}{path}").status_code == 200
        for terminal in (one, two):
            closed = _closed(terminal).rcvd
            assert closed is not None
            assert closed.code == 1011
            assert reason in closed.reason
    with pytest.raises(InvalidStatus), _open(daemon, other, "/sessions/gone"):
        pass
    if path:
        assert api.delete(f"/v1/vms/{other}").status_code == 200


def test_a_terminal_sleeps_with_its_vm_and_a_key_wakes_both(daemon: Daemon, api: httpx.Client, tidy: None) -> None:
    other = _made(api)
    with _open(daemon, other, exec=ECHO) as terminal:
        _read_until(terminal, b"ready")
        assert api.post(f"/v1/vms/{other}/suspend").status_code == 200
        for nothing in (b"", "nonsense", '{"type":"signal","signal":"SIGNOTHING"}'):
            terminal.send(nothing)
        terminal.ping().wait(DEADLINE_S)  # it has read them
        assert api.get(f"/v1/vms/{other}").json()["state"] == "suspended"
        terminal.send(b"awake")
        _read_until(terminal, b"awake")
        assert api.get(f"/v1/vms/{other}").json()["state"] == "running"
    assert api.delete(f"/v1/vms/{other}").status_code == 200


def test_a_session_that_has_ended_is_shown_with_its_end(daemon: Daemon, api: httpx.Client, vm: str, tidy: None) -> None:
    with _open(daemon, vm, exec="echo all of it; exit 3", sessionId="ended") as terminal:
        assert _closed(terminal).rcvd is not None
    for _ in range(2):
        with _open(daemon, vm, "/sessions/ended", cols=61, rows=17) as again:
            assert json.loads(again.recv(timeout=DEADLINE_S))["type"] == "sessionInfo"
            _read_until(again, b"all of it")
            assert json.loads(again.recv(timeout=DEADLINE_S)) == {"type": "exited", "exitCode": 3}
            closed = _closed(again).rcvd
            assert closed is not None
            assert closed.code == 1000
    _until(lambda: _session(api, vm, "ended")["attachedCount"] == 0)
    assert not _session(api, vm, "ended")["running"]


def test_keys_after_the_end_of_a_program_break_nothing(daemon: Daemon, vm: str, tidy: None) -> None:
    with _open(daemon, vm, exec="read line; echo $line") as terminal:
        with contextlib.suppress(ConnectionClosed):
            for _ in range(200):
                terminal.send(b"enough\n")
                terminal.send('{"type":"resize","cols":90,"rows":30}')
        assert _closed(terminal).rcvd is not None


def test_clients_that_leave_at_once_leave_nothing(daemon: Daemon, api: httpx.Client, vm: str, tidy: None) -> None:
    for path in ("/pty", "/pty?exec=sleep%20600", "/pty/sessions/nothing"):
        for wait_s in (0.0, 0.01, 0.1):
            with socket.create_connection(("127.0.0.1", daemon.port)) as raw:
                raw.sendall(
                    f"GET /v1/vms/{vm}{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {daemon.key}\r\n"
                    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
                )
                time.sleep(wait_s)


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "path"), [("POST", "watch-files"), ("GET", "stats/stream?interval_ms=100")])
def test_a_stream_ends_with_whoever_reads_it_or_with_its_vm(
    daemon: Daemon, api: httpx.Client, tidy: None, method: str, path: str
) -> None:
    other = _made(api)
    for _ in range(3):
        with api.stream(method, f"/v1/vms/{other}/{path}") as answer:
            assert answer.status_code == 200
    with api.stream(method, f"/v1/vms/{other}/{path}") as answer:
        assert answer.status_code == 200
        assert httpx.delete(f"{daemon.url}/v1/vms/{other}", headers=_key(daemon)).status_code == 200
        for line in answer.iter_lines():
            json.loads(line)
