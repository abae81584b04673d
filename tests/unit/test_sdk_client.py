"""The client against a scripted daemon whose connections break where the test wants them to. Sync and async alike."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from forkyard import (
    AsyncForkyard,
    CommandFailed,
    DaemonUnreachable,
    ExecNotFound,
    Forkyard,
    GuestUnreachable,
    InvalidRequest,
    InvalidShape,
    OperationTimeout,
    OutputChunk,
    SandboxNotFound,
)

from .sdk_script import BREAK, EXIT, ID, INFO, STARTED, Both, Daemon, Script, out, problem, route_of

pytestmark = pytest.mark.usefixtures("hurried")


# ── exec ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_exec_collects_both_streams_and_the_exit(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, out(b"a"), None, out(b"E", stream="stderr"), out(b"b", 1), EXIT])
    result = both.exec(daemon, "echo", cwd="/tmp", env={"A": "1"}, timeout_s=5)
    assert (result.stdout, result.stderr, result.exit_code, result.exec_id) == ("ab", "E", 0, "e1")
    assert result.duration_ms == 12.5
    body = json.loads(daemon.asked(f"POST /sandboxes/{ID}/exec")[0].content)
    assert body == {"command": "echo", "cwd": "/tmp", "env": {"A": "1"}, "timeout_s": 5.0}


def test_exec_attaches_again_where_the_stream_broke(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, out(b"one "), out(b"err", stream="stderr"), BREAK])
    daemon.on(
        f"GET /sandboxes/{ID}/execs/e1/output",
        httpx.ConnectError("refused"),
        httpx.ConnectError("refused"),
        [STARTED, out(b"two ", 4), BREAK],
        [STARTED, out(b"wo three", 5), EXIT],  # a daemon that replays a little more than asked for
    )
    result = both.exec(daemon)
    assert (result.stdout, result.stderr, result.truncated) == ("one two three", "err", False)
    asked = [dict(request.url.params) for request in daemon.asked(f"GET /sandboxes/{ID}/execs/e1/output")]
    assert asked[-2:] == [
        {"stdout_offset": "4", "stderr_offset": "3"},
        {"stdout_offset": "8", "stderr_offset": "3"},
    ]
    assert len(daemon.asked(f"POST /sandboxes/{ID}/exec")) == 1


def test_a_stream_that_ends_without_an_exit_is_a_broken_stream(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, out(b"a")])
    daemon.on(f"GET /sandboxes/{ID}/execs/e1/output", [STARTED, out(b"b", 1), EXIT])
    assert both.exec(daemon).stdout == "ab"


def test_a_retryable_error_in_the_stream_is_followed_by_attaching_again(daemon: Daemon, both: Both) -> None:
    broken = {"type": "error", "problem": GuestUnreachable().to_problem()}
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, out(b"a"), broken])
    daemon.on(f"GET /sandboxes/{ID}/execs/e1/output", problem(GuestUnreachable()), [STARTED, EXIT])
    assert both.exec(daemon).stdout == "a"


def test_a_final_error_in_the_stream_is_raised(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, out(b"a"), BREAK])
    daemon.on(f"GET /sandboxes/{ID}/execs/e1/output", problem(ExecNotFound("exec e1 is forgotten")))
    with pytest.raises(ExecNotFound, match="forgotten"):
        both.exec(daemon)


def test_a_command_is_never_sent_twice_when_nobody_knows_if_it_started(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/exec", [BREAK])
    with pytest.raises(DaemonUnreachable):
        both.exec(daemon)
    daemon.on(f"POST /sandboxes/{ID}/exec", httpx.ReadError("reset"))
    with pytest.raises(DaemonUnreachable):
        both.exec(daemon)
    assert len(daemon.asked(f"POST /sandboxes/{ID}/exec")) == 2


def test_a_command_that_never_reached_a_daemon_is_sent_again(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/exec", httpx.ConnectError("refused"), [STARTED, EXIT])
    assert both.exec(daemon).exit_code == 0


def test_output_beyond_the_limit_is_drained_and_not_kept(daemon: Daemon, both: Both) -> None:
    pieces = [out(b"x" * 1000, offset) for offset in range(0, 100_000, 1000)]
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, *pieces, EXIT])
    result = both.exec(daemon, max_output_bytes=2500)
    assert (len(result.stdout_bytes), result.truncated, result.exit_code) == (2500, True, 0)


def test_output_that_is_no_longer_kept_marks_the_result(daemon: Daemon, both: Both) -> None:
    lost = {"type": "lost", "stream": "stdout", "offset": 0, "bytes": 10}
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, lost, out(b"end", 10), EXIT])
    result = both.exec(daemon)
    assert (result.stdout, result.truncated) == ("end", True)


def test_a_failed_command_is_data_unless_checked(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, {**EXIT, "exit_code": 2}])
    assert both.exec(daemon).exit_code == 2
    with pytest.raises(CommandFailed) as caught:
        both.exec(daemon, check=True)
    assert caught.value.result is not None
    assert caught.value.result.exit_code == 2


def test_stdin_is_written_in_pieces_and_closed_with_the_last(daemon: Daemon, both: Both) -> None:
    route = f"POST /sandboxes/{ID}/execs/e1/stdin"
    written: list[bytes] = []
    daemon.on(route, httpx.Response(204))
    daemon.on(f"POST /sandboxes/{ID}/exec", [STARTED, BREAK])

    def attach_once_all_is_written(request: httpx.Request) -> httpx.Response:
        if route_of(request) == f"GET /sandboxes/{ID}/execs/e1/output":
            closed = any(r.url.params.get("close") == "true" for r in daemon.asked(route))
            return httpx.Response(200, stream=Script([STARTED, EXIT] if closed else [STARTED, BREAK]))
        return daemon(request)

    data = bytes(range(256)) * 3000
    if both.asynchronous:

        async def run() -> Any:
            async with AsyncForkyard(transport=httpx.MockTransport(attach_once_all_is_written)) as fy:
                return await (await fy.sandboxes.get(ID)).exec("wc", stdin=data)

        result = asyncio.run(run())
    else:
        with Forkyard(transport=httpx.MockTransport(attach_once_all_is_written)) as fy:
            result = fy.sandboxes.get(ID).exec("wc", stdin=data)
    assert result.exit_code == 0
    asked = daemon.asked(route)
    written = [request.content for request in asked]
    assert b"".join(written) == data
    assert [request.url.params["close"] for request in asked] == ["false"] * (len(asked) - 1) + ["true"]
    assert json.loads(daemon.asked(f"POST /sandboxes/{ID}/exec")[0].content)["stdin"] is True


def test_exec_stream_yields_chunks_and_then_knows_the_exit() -> None:
    daemon = Daemon().on(f"POST /sandboxes/{ID}/exec", [STARTED, out("ü".encode()), {**EXIT, "exit_code": 4}])
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        stream = fy.sandboxes.get(ID).exec_stream(["a", "b"])
        assert stream.exit_code is None
        assert list(stream) == [OutputChunk("stdout", "ü".encode(), 0, "ü")]
        assert (stream.exit_code, stream.exec_id) == (4, "e1")


def test_waiting_for_a_process_ends_at_its_timeout_and_leaves_it_running() -> None:
    daemon = Daemon().on(f"GET /sandboxes/{ID}/execs/e1/output", httpx.ReadTimeout("silence"))
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        process = fy.sandboxes.get(ID).process("e1")
        with pytest.raises(OperationTimeout, match="goes on"):
            process.wait(timeout_s=0.2)
    assert all(request.method == "GET" for request in daemon.requests)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_create_is_retried_under_one_idempotency_key(daemon: Daemon, both: Both) -> None:
    daemon.on("POST /sandboxes", httpx.ReadError("reset"), INFO)
    assert both.create(daemon, name="n").id == ID
    keys = {request.headers["Idempotency-Key"] for request in daemon.asked("POST /sandboxes")}
    assert len(daemon.asked("POST /sandboxes")) == 2
    assert len(keys) == 1


def test_two_creates_have_two_idempotency_keys(daemon: Daemon, both: Both) -> None:
    daemon.on("POST /sandboxes", INFO)
    both.create(daemon)
    both.create(daemon)
    assert len({request.headers["Idempotency-Key"] for request in daemon.requests}) == 2


def test_reading_is_retried_and_appending_is_not(daemon: Daemon, both: Both) -> None:
    daemon.on(f"GET /sandboxes/{ID}/files", httpx.ReadError("reset"), httpx.Response(200, content=b"text"))
    daemon.on(f"PUT /sandboxes/{ID}/files", httpx.ReadError("reset"))

    async def read(fy: AsyncForkyard) -> str:
        return await (await fy.sandboxes.get(ID)).files.read("/a")

    async def append(fy: AsyncForkyard) -> object:
        return await (await fy.sandboxes.get(ID)).files.append("/a", "x")

    assert both.call(daemon, lambda fy: fy.sandboxes.get(ID).files.read("/a"), read) == "text"
    with pytest.raises(DaemonUnreachable):
        both.call(daemon, lambda fy: fy.sandboxes.get(ID).files.append("/a", "x"), append)
    assert len(daemon.asked(f"PUT /sandboxes/{ID}/files")) == 1


def test_a_daemon_that_never_answered_is_given_up_with_the_next_step(daemon: Daemon, both: Both) -> None:
    daemon.on(f"GET /sandboxes/{ID}", httpx.ConnectError("refused"))

    async def get(fy: AsyncForkyard) -> object:
        return await fy.sandboxes.get(ID)

    with pytest.raises(DaemonUnreachable, match="forkyard up"):
        both.call(daemon, lambda fy: fy.sandboxes.get(ID), get)


def test_an_error_answer_is_the_same_class_as_in_the_daemon(daemon: Daemon, both: Both) -> None:
    daemon.on(f"GET /sandboxes/{ID}", problem(SandboxNotFound("no sandbox x", sandbox_id="x")))

    async def get(fy: AsyncForkyard) -> object:
        return await fy.sandboxes.get(ID)

    with pytest.raises(SandboxNotFound, match="no sandbox x") as caught:
        both.call(daemon, lambda fy: fy.sandboxes.get(ID), get)
    assert caught.value.details == {"sandbox_id": "x"}
    assert len(daemon.requests) == 1


def test_an_impossible_shape_is_refused_before_anything_is_sent(daemon: Daemon, both: Both) -> None:
    with pytest.raises(InvalidShape, match="vcpus=99"):
        both.create(daemon, vcpus=99)
    assert daemon.requests == []


@pytest.mark.parametrize(
    "secret", [{"value": "hunter2", "hostz": ["a.test"]}, {"value": "hunter2", "hosts": 1}, "hunter2"]
)
def test_an_impossible_secret_is_refused_and_not_shown(daemon: Daemon, both: Both, secret: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        both.create(daemon, secrets={"KEY": secret})
    assert "hunter2" not in str(refused.value) and daemon.requests == []


def test_lists_are_read_to_the_last_page(daemon: Daemon, both: Both) -> None:
    daemon.on("GET /sandboxes", {"items": [INFO], "next_cursor": "c2"}, {"items": [{**INFO, "id": "sbbbbbbbbbbbbbbb"}]})

    async def listed(fy: AsyncForkyard) -> object:
        return await fy.sandboxes.list(labels={"a": "b"}, all=True)

    found = both.call(daemon, lambda fy: fy.sandboxes.list(labels={"a": "b"}, all=True), listed)
    assert [sandbox.id for sandbox in found] == [ID, "sbbbbbbbbbbbbbbb"]
    first, second = daemon.requests
    assert (first.url.params["label"], first.url.params["all"]) == ("a=b", "true")
    assert second.url.params["cursor"] == "c2"


def test_leaving_the_block_deletes_the_sandbox(daemon: Daemon) -> None:
    daemon.on("POST /sandboxes", INFO).on(f"DELETE /sandboxes/{ID}", httpx.Response(204))
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy, fy.sandboxes.create() as sandbox:
        assert sandbox.id == ID
        assert not daemon.asked(f"DELETE /sandboxes/{ID}")
    assert len(daemon.asked(f"DELETE /sandboxes/{ID}")) == 1


def test_events_are_followed_over_a_break_from_the_last_one_seen(daemon: Daemon) -> None:
    def event(number: int) -> dict[str, Any]:
        return {"id": number, "at": "2026-01-01T00:00:00Z", "sandbox_id": None, "kind": "daemon.started"}

    daemon.on("GET /events", [event(5), None, BREAK], [event(6), event(7), BREAK])
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        follow = fy.events.follow(after=4)
        assert [next(follow).id, next(follow).id, next(follow).id] == [5, 6, 7]
        follow.close()
    assert [request.url.params["after"] for request in daemon.requests] == ["4", "5"]


def test_the_key_is_presented_and_never_shown() -> None:
    daemon = Daemon()
    with Forkyard(api_key="fy_secret", transport=httpx.MockTransport(daemon)) as fy:
        fy.sandboxes.get(ID)
        assert daemon.requests[0].headers["Authorization"] == "Bearer fy_secret"
        assert "fy_secret" not in repr(fy._transport._endpoint)
