"""Commands in a real machine."""

import threading
import time

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.errors import CommandNotFound, ExecNotFound


def test_stdout_stderr_and_exit_code_are_apart(sbx: Sandbox) -> None:
    result = sbx.exec("echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert result.signal is None
    assert not result.timed_out


def test_a_list_is_run_without_a_shell(sbx: Sandbox) -> None:
    assert sbx.exec(["printf", "%s|", "a b", "$HOME", "*"]).stdout == "a b|$HOME|*|"


def test_output_is_bytes(sbx: Sandbox) -> None:
    result = sbx.exec("printf '\\000\\377\\376x'")
    assert result.stdout_bytes == b"\x00\xff\xfex"


def test_cwd_env_and_user(sbx: Sandbox) -> None:
    result = sbx.exec("pwd; id -un; echo $COLOUR; echo $HOME", cwd="/tmp", env={"COLOUR": "blü"}, user="user")
    assert result.stdout == "/tmp\nuser\nblü\n/home/user\n"
    assert sbx.exec("pwd; id -un").stdout == "/root\nroot\n"
    assert sbx.exec("sudo id -un", user="user").stdout == "root\n"


def test_env_of_the_sandbox_reaches_every_exec(fy: Forkyard) -> None:
    with fy.sandboxes.create(env={"PROJECT": "forkyard"}) as sbx:
        assert sbx.exec("echo $PROJECT").stdout == "forkyard\n"


def test_the_tools_an_agent_expects_are_there(sbx: Sandbox) -> None:
    tools = "bash python python3 pip git curl gcc make tmux rg jq unzip tput node npm npx bun sudo sshd"
    for user in ("root", "user"):
        missing = sbx.exec(f"for t in {tools}; do command -v $t >/dev/null || echo $t; done", user=user).stdout
        assert missing in ("", "sshd\n"), missing
    assert sbx.exec("node -e 'console.log(1+1)' && bun -e 'console.log(2+2)'", timeout_s=60).stdout == "2\n4\n"
    # Without pip: unpacking it is a minute of work for an emulated processor, and says no more.
    venv = "python3 -c 'import ensurepip' && python3 -m venv --without-pip /tmp/v && /tmp/v/bin/python -c 'print(3)'"
    assert sbx.exec(venv, timeout_s=120).stdout.endswith("3\n")
    assert sbx.exec("systemctl is-system-running").stdout == "running\n"


def test_stdin_reaches_the_command_and_ends(sbx: Sandbox) -> None:
    assert sbx.exec("wc -c", stdin=b"x" * 100_000).stdout.strip() == "100000"
    assert sbx.exec("cat").stdout == "", "without stdin it is empty, not open"


def test_a_timeout_kills_all_that_was_started(sbx: Sandbox) -> None:
    started = time.monotonic()
    result = sbx.exec("(setsid sleep 1234 &); sh -c 'sleep 1234' & sleep 1234", timeout_s=1)
    assert result.timed_out
    assert time.monotonic() - started < 20
    assert sbx.exec("pgrep -fc 'sleep 1234'").stdout.strip() == "0"


def test_a_process_killed_by_a_signal_says_so(sbx: Sandbox) -> None:
    result = sbx.exec("kill -SEGV $$")
    assert (result.exit_code, result.signal) == (None, 11)


def test_unknown_programs_users_and_directories_are_typed_errors(sbx: Sandbox) -> None:
    for kwargs in (
        {"command": ["no-such-program"]},
        {"command": "true", "user": "nobody2"},
        {"command": "true", "cwd": "/no"},
    ):
        with pytest.raises(CommandNotFound):
            sbx.exec(**kwargs)
    assert sbx.exec("no-such-program").exit_code == 127


def test_background_processes_are_listed_attached_and_signalled(sbx: Sandbox) -> None:
    process = sbx.spawn("echo first; read line; echo got $line; sleep 1000", stdin=True)
    assert process.id in {p.id for p in sbx.execs()}
    process.write_stdin(b"hello\n")
    seen = b""
    for chunk in process.output():
        seen += chunk.data
        if b"got hello" in seen:
            break
    assert seen == b"first\ngot hello\n"
    process.signal(15)
    result = process.wait()
    assert result.signal == 15
    with pytest.raises(ExecNotFound):
        sbx.process("nope").info()


def test_far_more_output_than_any_buffer_holds_arrives_whole(sbx: Sandbox) -> None:
    # 256 MB: it keeps the suite quick.
    total, line = 0, b""
    for chunk in sbx.exec_stream("head -c 256000000 /dev/zero", timeout_s=200):
        total += len(chunk.data)
        line = chunk.data
    assert total == 256_000_000
    assert set(line) == {0}


def test_a_reader_that_sleeps_holds_back_only_its_own_command(sbx: Sandbox) -> None:
    stream = iter(sbx.exec_stream("seq 1 2000000"))
    next(stream)
    started = time.monotonic()
    assert sbx.exec("echo quick").stdout == "quick\n"
    assert time.monotonic() - started < 10
    rest = b"".join(c.data for c in stream)
    assert rest.endswith(b"2000000\n")


def test_a_fork_bomb_can_be_killed_and_the_machine_goes_on(sbx: Sandbox) -> None:
    result = sbx.exec("bomb() { bomb | bomb & }; bomb; sleep 60", timeout_s=5)
    assert result.timed_out
    assert sbx.exec("echo fine", timeout_s=60).stdout == "fine\n"


def test_many_execs_at_once(sbx: Sandbox) -> None:
    results: dict[int, str] = {}

    def one(i: int) -> None:
        results[i] = sbx.exec(f"echo {i}").stdout

    threads = [threading.Thread(target=one, args=(i,)) for i in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: f"{i}\n" for i in range(20)}


def test_a_terminal_has_colours_size_and_control_c(sbx: Sandbox) -> None:
    with sbx.terminal(command="bash --norc", rows=40, cols=100) as terminal:
        terminal.send(b"stty size; tput colors; tty\n")
        text = terminal.read_until(b"/dev/pts/", timeout_s=30)
        assert b"40 100" in text
        assert b"256" in text
        terminal.resize(rows=10, cols=20)
        terminal.send(b"stty size\n")
        terminal.read_until(b"10 20", timeout_s=30)
        terminal.send(b"sleep 1000\n")
        time.sleep(0.5)
        terminal.send(b"\x03")
        terminal.send(b"echo status $?\n")
        terminal.read_until(b"status 130", timeout_s=30)
