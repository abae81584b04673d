"""The sync client against the real API, over TCP and over the unix socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from forkyard import (
    CommandNotFound,
    DaemonUnreachable,
    ExecNotFound,
    FileConflict,
    FileMissing,
    Forkyard,
    IdempotencyConflict,
    NotFound,
    OperationTimeout,
    Sandbox,
    SandboxEnded,
    SandboxNotFound,
    State,
    Unauthenticated,
)

from .sdk_daemon import Daemon


@pytest.fixture(scope="module", params=["socket", "url"])
def fy(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Forkyard]:
    if request.param == "url":
        client = Forkyard(daemon.url, daemon.key)
    else:
        client = Forkyard(socket=daemon.socket, key_file=daemon.key_file)
    with client:
        yield client


@pytest.fixture(scope="module")
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create() as sandbox:
        yield sandbox


def test_a_sandbox_from_create_to_delete(fy: Forkyard) -> None:
    sandbox = fy.sandboxes.create(name="mine", labels={"team": "a"}, memory_mib=1024)
    assert sandbox.state == State.RUNNING
    assert sandbox.info.shape.memory_mib == 1024
    assert sandbox.id in {found.id for found in fy.sandboxes.list(labels={"team": "a"})}
    assert fy.sandboxes.list(labels={"team": "b"}) == []
    assert [mark.name for mark in sandbox.logs().create] == ["ready"]
    assert sandbox.usage().pss_mib > 0
    (sample,) = sandbox.usage_history()
    assert sample.memory_mib > 0
    assert sandbox.usage_history(end=sample.at - timedelta(seconds=1)) == []
    assert sandbox.usage_history(start=datetime.now() + timedelta(hours=1)) == []
    sandbox.delete()
    sandbox.delete()
    assert sandbox.refresh().state == State.DELETED
    assert sandbox.id not in {found.id for found in fy.sandboxes.list()}
    assert sandbox.id in {found.id for found in fy.sandboxes.list(all=True)}
    with pytest.raises(SandboxEnded):
        sandbox.exec("true")
    kinds = [event.kind for event in fy.events.list(sandbox_id=sandbox.id)]
    assert kinds[-1] == "sandbox.deleted"


def test_the_same_idempotency_key_gives_the_same_sandbox(fy: Forkyard) -> None:
    key = os.urandom(8).hex()
    with fy.sandboxes.create(name="one", idempotency_key=key) as first:
        assert fy.sandboxes.create(name="one", idempotency_key=key).id == first.id
        with pytest.raises(IdempotencyConflict):
            fy.sandboxes.create(name="two", idempotency_key=key)


def test_unknown_things_are_typed_errors(fy: Forkyard, sbx: Sandbox) -> None:
    for unknown in ("nope", "sabcdefghijklmno", ""):
        with pytest.raises(SandboxNotFound):
            fy.sandboxes.get(unknown)
    with pytest.raises(NotFound):
        fy.sandboxes.get("../keys")
    with pytest.raises(ExecNotFound):
        sbx.process("nope").info()
    with pytest.raises(CommandNotFound):
        sbx.exec(["no-such-program"])


def test_a_wrong_key_is_told_what_to_do(daemon: Daemon) -> None:
    with Forkyard(daemon.url, "wrong") as client, pytest.raises(Unauthenticated, match="FORKYARD_API_KEY"):
        client.sandboxes.list()


def test_exec_gives_streams_code_and_signal(sbx: Sandbox) -> None:
    result = sbx.exec("echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert sbx.exec(["printf", "%s|", "a b", "$HOME"]).stdout == "a b|$HOME|"
    assert sbx.exec("kill -SEGV $$").signal == 11
    assert sbx.exec("sleep 100", timeout_s=0.3).timed_out
    assert sbx.exec("printf '\\000\\377'").stdout_bytes == b"\x00\xff"


def test_stdin_larger_than_any_buffer_meets_output_larger_than_any_buffer(sbx: Sandbox) -> None:
    data = os.urandom(3_000_000)
    assert sbx.exec("cat", stdin=data).stdout_bytes == data


def test_a_command_that_does_not_want_its_input_ends_well(sbx: Sandbox) -> None:
    assert sbx.exec("head -c 3", stdin=b"abc" * 1_000_000).stdout == "abc"


def test_the_head_of_much_output_is_kept_and_the_command_runs_to_its_end(sbx: Sandbox, tmp_path: Path) -> None:
    result = sbx.exec(f"seq 1 300000; touch {tmp_path}/done", max_output_bytes=1000)
    assert (len(result.stdout_bytes), result.truncated, result.exit_code) == (1000, True, 0)
    assert (tmp_path / "done").exists()


def test_output_streams_as_it_comes(sbx: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    stream = sbx.exec_stream(f"echo first; cat {tmp_path}/gate; echo last")
    pieces = iter(stream)
    assert next(pieces).text == "first\n"
    (tmp_path / "gate").write_text("open\n")
    assert "".join(piece.text for piece in pieces) == "open\nlast\n"
    assert stream.exit_code == 0


def test_an_exec_goes_on_over_restarts_of_the_daemon_without_loss(daemon: Daemon, sbx: Sandbox, tmp_path: Path) -> None:
    gates = [tmp_path / name for name in ("a", "b")]
    for gate in gates:
        os.mkfifo(gate)
    command = f"seq 1 20000; cat {gates[0]}; seq 20001 40000 >&2; cat {gates[1]}; seq 40001 60000; exit 3"
    out, err, breaks = b"", b"", 0
    stream = sbx.exec_stream(command)
    for chunk in stream:
        if chunk.stream == "stdout":
            out += chunk.data
        else:
            err += chunk.data
        if breaks == 0 and out.endswith(b"20000\n"):
            breaks = 1
            daemon.restart()
            threading.Thread(target=gates[0].write_text, args=("",)).start()
        elif breaks == 1 and err.endswith(b"40000\n"):
            breaks = 2
            daemon.break_connections()
            threading.Thread(target=gates[1].write_text, args=("",)).start()
    assert breaks == 2
    numbers = [int(line) for line in out.split()]
    assert numbers == [*range(1, 20001), *range(40001, 60001)]
    assert [int(line) for line in err.split()] == list(range(20001, 40001))
    assert stream.exit_code == 3


def test_a_process_is_found_again_by_its_id(fy: Forkyard, sbx: Sandbox) -> None:
    process = sbx.spawn("echo first; read line; echo got $line; exec sleep 1000", stdin=True, label="server")
    again = fy.sandboxes.get(sbx.id).process(process.id)
    again.write_stdin("hello\n")
    seen = b""
    with again.output() as output:
        for chunk in output:
            seen += chunk.data
            if b"got" in seen:
                break
    assert seen == b"first\ngot hello\n"
    assert "server" in {info.label for info in sbx.execs() if info.running}
    started = time.monotonic()
    with pytest.raises(OperationTimeout):
        again.wait(timeout_s=0.3)
    assert time.monotonic() - started < 5
    again.kill()
    assert again.wait(timeout_s=20).signal == 9
    assert not process.info().running


def test_files_are_written_read_and_arranged(sbx: Sandbox, tmp_path: Path) -> None:
    base = str(tmp_path)
    sbx.files.write(f"{base}/deep/er/a.txt", "grüße\n", mode=0o640)
    assert sbx.files.read(f"{base}/deep/er/a.txt") == "grüße\n"
    assert sbx.files.append(f"{base}/deep/er/a.txt", b"\xff").size == 9
    assert sbx.files.read_bytes(f"{base}/deep/er/a.txt", offset=8) == b"\xff"
    assert sbx.files.stat(f"{base}/deep/er/a.txt").mode == 0o640
    sbx.files.move(f"{base}/deep/er/a.txt", f"{base}/b")
    sbx.files.chmod(f"{base}/b", 0o600)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
    sbx.files.mkdir(f"{base}/deep/more")
    names = {(info.path, info.type) for info in sbx.files.list(f"{base}/deep", depth=2)}
    assert names == {(f"{base}/deep/er", "directory"), (f"{base}/deep/more", "directory")}
    with pytest.raises(FileConflict):
        sbx.files.remove(f"{base}/deep")
    sbx.files.remove(f"{base}/deep", recursive=True)
    assert not sbx.files.exists(f"{base}/deep")
    with pytest.raises(FileMissing):
        sbx.files.read(f"{base}/deep")


def test_names_that_are_no_utf8_survive(sbx: Sandbox, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 +&?")
    sbx.files.write(name, "latin")
    assert [os.fsencode(path.name) for path in tmp_path.iterdir()] == [b"caf\xe9 +&?"]
    assert sbx.files.read(name) == "latin"
    (listed,) = sbx.files.list(str(tmp_path))
    assert sbx.files.read(listed.path) == "latin"
    sbx.files.move(name, str(tmp_path / "plain"))
    assert (tmp_path / "plain").read_text() == "latin"


def test_large_files_are_streamed_both_ways(sbx: Sandbox, tmp_path: Path) -> None:
    piece = os.urandom(100_000)
    info = sbx.files.write_stream(f"{tmp_path}/big", (piece for _ in range(50)))
    assert info.size == 5_000_000
    assert b"".join(sbx.files.read_stream(f"{tmp_path}/big")) == piece * 50
    assert b"".join(sbx.files.read_stream(f"{tmp_path}/big", offset=100_000, length=5)) == piece[:5]


def test_an_upload_that_fails_on_our_side_changes_nothing(sbx: Sandbox, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("disk on fire")

    sbx.files.write(f"{tmp_path}/file", "old")
    with pytest.raises(RuntimeError, match="fire"):
        sbx.files.write_stream(f"{tmp_path}/file", pieces())
    assert (tmp_path / "file").read_text() == "old"
    assert sbx.exec("echo on").stdout == "on\n"


def test_trees_go_up_and_come_back(sbx: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "src").mkdir(parents=True)
    (source / "src" / "main.py").write_text("print(1)")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("src/main.py")
    moved: list[int] = []
    sbx.files.upload(source, f"{tmp_path}/there", progress=moved.append)
    assert sum(moved) > 0
    assert (tmp_path / "there" / "link").readlink() == Path("src/main.py")
    sbx.files.download(f"{tmp_path}/there", tmp_path / "back")
    assert (tmp_path / "back" / "src" / "main.py").read_text() == "print(1)"
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o777 == 0o755
    sbx.files.download(f"{tmp_path}/there/link", tmp_path / "one.py")
    assert (tmp_path / "one.py").read_text() == "print(1)"


def test_a_local_file_that_is_not_there_is_a_typed_error(sbx: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="this machine"):
        sbx.files.upload(tmp_path / "no", "/tmp/no")
    sbx.files.write(f"{tmp_path}/f", "x")
    with pytest.raises(FileConflict, match="this machine"):
        sbx.files.download(f"{tmp_path}/f", tmp_path / "no" / "where")


def test_changes_are_watched_from_the_first_line_of_the_block(sbx: Sandbox, tmp_path: Path) -> None:
    with sbx.files.watch(str(tmp_path)) as changes:
        (tmp_path / "new").write_text("x")
        (tmp_path / "new").unlink()
        seen = []
        for change in changes:
            seen.append((change.type, change.path))
            if change.type == "deleted":
                break
    assert seen[0] == ("created", f"{tmp_path}/new")


def test_watching_what_is_not_there_is_a_typed_error(sbx: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileMissing), sbx.files.watch(f"{tmp_path}/no"):
        pass


def test_a_terminal_takes_keys_sizes_and_control_c(sbx: Sandbox) -> None:
    with sbx.terminal("bash --norc", rows=40, cols=100) as terminal:
        terminal.send(b"stty size; tty\n")
        assert b"40 100" in terminal.read_until(b"/dev/pts/", timeout_s=20)
        terminal.resize(rows=10, cols=20)
        terminal.send(b"stty size\n")
        terminal.read_until(b"10 20", timeout_s=20)
        terminal.send(b"sh -c 'echo u\"\"p; exec cat'\n")
        terminal.read_until(b"up\r\n", timeout_s=20)
        terminal.send(b"\x03")
        terminal.read_until(b"# ", timeout_s=20)
        terminal.send(b"echo status $?; exit 5\n")
        terminal.read_until(b"status 130", timeout_s=20)
        for _ in terminal:
            pass
        assert terminal.end is not None
        assert terminal.end.exit_code == 5


def test_a_terminal_is_attached_again_where_it_broke(daemon: Daemon, sbx: Sandbox) -> None:
    with sbx.terminal("bash --norc") as terminal:
        terminal.send(b"echo on''ce\n")
        terminal.read_until(b"once\r\n", timeout_s=20)
        daemon.break_connections()
        with pytest.raises(DaemonUnreachable):
            for _ in terminal:
                pass
    with sbx.terminal(exec_id=terminal.exec_id, offset=terminal.offset) as again:
        again.send(b"echo tw''ice; exit\n")
        rest = b"".join(again)
    assert b"twice" in rest
    assert b"once" not in rest


def test_a_terminal_with_a_wrong_command_is_a_typed_error(sbx: Sandbox) -> None:
    with pytest.raises(CommandNotFound), sbx.terminal(cwd="/no/such/place"):
        pass
    with pytest.raises(ExecNotFound), sbx.terminal(exec_id="nope"):
        pass


def test_keys_are_made_used_and_deleted(daemon: Daemon, fy: Forkyard) -> None:
    made = fy.keys.create("ci")
    with Forkyard(daemon.url, made.key) as other:
        assert other.sandboxes.list() is not None
    assert "ci" in {key.name for key in fy.keys.list()}
    fy.keys.delete(made.id)
    with Forkyard(daemon.url, made.key) as other, pytest.raises(Unauthenticated):
        other.sandboxes.list()


def test_events_arrive_as_they_happen(fy: Forkyard) -> None:
    after = fy.events.list()[-1].id
    follow = fy.events.follow(after=after)
    with fy.sandboxes.create() as sandbox:
        pass
    kinds = []
    for event in follow:
        kinds.append(event.kind)
        assert event.sandbox_id == sandbox.id
        if event.kind == "sandbox.deleted":
            break
    follow.close()
    assert "sandbox.running" in kinds


def test_doctor_and_health_answer(fy: Forkyard) -> None:
    assert fy.health().status == "ok"
    assert {check.status for check in fy.doctor()} == {"ok"}


def test_many_commands_at_once_from_one_client(sbx: Sandbox) -> None:
    results: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: sbx.exec(f"echo {i}").stdout})) for i in range(30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"{i}\n" for i in range(30)}
