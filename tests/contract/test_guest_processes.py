"""Processes under the real agent: trees, terminals, users, output nobody reads."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkyard.errors import CommandNotFound, Conflict, GuestPermissionDenied, InvalidRequest
from forkyard.guest.base import ExecSpec, Exit, Guest, Identity, Lost, Output
from forkyard.guest.client import connect
from forkyard.guest.local import LocalAgent

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.getuid() != 0, reason="the agent runs as root")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def agent(tmp_path: Path, front: Path | None) -> AsyncIterator[LocalAgent]:
    async with LocalAgent(tmp_path, front) as agent:
        yield agent


@pytest.fixture
async def guest(agent: LocalAgent) -> AsyncIterator[Guest]:
    guest = await connect(agent.socket, timeout_s=10)
    yield guest
    await guest.aclose()


async def run(guest: Guest, command: str | list[str], **options: object) -> tuple[bytes, bytes, Exit]:
    out = {"stdout": b"", "stderr": b""}
    async with guest.execute(ExecSpec(command, **options)) as execution:  # type: ignore[arg-type]
        async for item in execution:
            if isinstance(item, Output):
                out[item.stream] += item.data
            elif isinstance(item, Exit):
                return out["stdout"], out["stderr"], item
    raise AssertionError("no exit")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: object, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_a_timeout_kills_the_whole_tree_even_what_left_the_session(guest: Guest) -> None:
    stdout, _, ended = await run(guest, "setsid sleep 60 & echo $!; setsid -f sleep 61; sleep 62", timeout_s=0.5)
    assert ended.timed_out and ended.signal == signal.SIGKILL
    await until(lambda: not alive(int(stdout)))


async def test_every_process_of_an_exec_is_in_its_cgroup_from_the_start(guest: Guest, agent: LocalAgent) -> None:
    async with guest.execute(ExecSpec("grep '^0::' /proc/self/cgroup")) as execution:
        items = [item async for item in execution]
    assert isinstance(items[0], Output)
    assert items[0].data.decode().strip() == f"0::/{agent.cgroups.name}/exec-{execution.id}"


async def test_a_daemon_started_by_a_command_outlives_it_and_can_still_be_killed(guest: Guest) -> None:
    stdout, _, ended = await run(guest, "sleep 60 & echo $!")
    pid = int(stdout)
    assert ended.exit_code == 0 and ended.duration_ms < 5_000  # what it started takes longer
    assert alive(pid)
    (info,) = await guest.execs()
    assert not info.running
    await guest.signal(info.id, signal.SIGKILL)
    await until(lambda: not alive(pid))


async def test_output_that_a_daemon_writes_later_is_kept(guest: Guest, tmp_path: Path) -> None:
    go = tmp_path / "go"
    stdout, _, _ = await run(guest, f"(while [ ! -e {go} ]; do sleep 0.02; done; echo late) & echo early")
    assert stdout == b"early\n"
    (info,) = await guest.execs()
    go.touch()
    async with asyncio.timeout(10):
        while (await guest.exec_info(info.id)).stdout_bytes < 11:
            await asyncio.sleep(0.02)
    async with guest.attach(info.id, stdout_offset=6) as execution:
        assert await anext(aiter(execution)) == Output("stdout", 6, b"late\n")


PLAIN = [
    *("true", "false", "ls -d /etc", "ls /no-such-file", "printenv PWD", "printenv SHLVL", "printenv HOME", "env -0"),
    *(
        "no-such-program",
        "no-such-program -x",
        "/no/such/program",
        "/etc",
        "/etc/passwd",
        "./my-script",
        "my-script",
        "./words a b",
    ),
    *("cd /", "echo -e x", "test -d /etc", "exit 3", "time", "kill -l", ". ./my-script", ":", "-x", "a:b", "1"),
    *("echo  two", " true", "true ", "A=1", "echo $HOME", "echo a;false", "true\nfalse", "ls *", "ls ~", "[ -d /etc ]"),
]


@pytest.mark.parametrize("command", PLAIN)
async def test_a_command_does_what_bash_makes_of_it(guest: Guest, tmp_path: Path, command: str) -> None:
    """Also one that is started without it."""
    (tmp_path / "my-script").write_text("echo a script without a first line\n")
    (tmp_path / "words").write_text("#!/bin/sh\nprintf '%s.' \"$@\"\n")
    for name in ("my-script", "words"):
        (tmp_path / name).chmod(0o755)
    options = {"cwd": str(tmp_path), "env": {"PATH": f"{os.environ['PATH']}:{tmp_path}"}}
    out, err, ended = await run(guest, command, **options)
    expected_out, expected_err, expected = await run(guest, ["/bin/bash", "-c", command], **options)
    if command == "env -0":
        variables, expected_variables = set(out.split(b"\0")), set(expected_out.split(b"\0"))
        assert {v for v in expected_variables if not v.startswith(b"_=")} == variables - {b"_=/bin/env"}
    else:
        assert (out, err) == (expected_out, expected_err)
    assert (ended.exit_code, ended.signal) == (expected.exit_code, expected.signal)


async def test_a_command_is_left_to_bash_if_functions_are_handed_to_it(guest: Guest) -> None:
    out, _, _ = await run(guest, "uname", env={"BASH_FUNC_uname%%": "() { echo mine; }"})
    assert out == b"mine\n"


async def test_cgroups_of_ended_execs_are_removed(guest: Guest, agent: LocalAgent) -> None:
    await run(guest, "true")
    await until(lambda: not list(agent.cgroups.glob("exec-*")))


async def test_the_end_of_a_signalled_process_is_its_signal(guest: Guest) -> None:
    _, _, ended = await run(guest, "kill -TERM $$")
    assert (ended.exit_code, ended.signal, ended.timed_out) == (None, signal.SIGTERM, False)


async def test_a_signal_reaches_the_tree_or_only_the_first_process(guest: Guest) -> None:
    child = "trap 'echo child' USR1; echo up; while :; do sleep 0.05; done"
    script = f'trap "echo caught" USR1; bash -c "{child}" & wait; wait'
    for tree, wanted in ((False, {b"caught"}), (True, {b"caught", b"child"})):
        async with guest.execute(ExecSpec(script)) as execution:
            items = aiter(execution)
            assert await anext(items) == Output("stdout", 0, b"up\n")
            await guest.signal(execution.id, signal.SIGUSR1, tree=tree)
            seen: set[bytes] = set()
            while not wanted <= seen:
                item = await anext(items)
                assert isinstance(item, Output)
                seen |= set(item.data.split()) if item.stream == "stdout" else set()
            await guest.signal(execution.id, signal.SIGKILL)
        assert seen == wanted


async def test_programs_do_not_inherit_the_agents_ways(guest: Guest) -> None:
    script = (
        "grep -E '^Sig(Ign|Blk)' /proc/self/status; cat /proc/self/oom_score_adj; nice; umask; ls /proc/self/fd|wc -w"
    )
    stdout, _, _ = await run(guest, script)
    ignored, blocked = (int(line.split()[1], 16) for line in sorted(stdout.decode().splitlines()[:2])[::-1])
    # Signal 32 is the C library's own, and nobody can set it: if whoever runs this test ignores it, so do all below.
    ours = int(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if "SigIgn" in line).split()[1], 16
    )
    assert (ignored, blocked) == (ours & (1 << 31), 0)
    assert stdout.decode().split()[-4:] == ["0", "0", "0022", "4"]


async def test_the_environment_has_the_users_basics_the_identity_and_the_request_in_that_order(guest: Guest) -> None:
    stdout, _, _ = await run(
        guest, "echo $HOME $USER $LOGNAME $SHELL $LANG; echo $PATH; echo $EXTRA; pwd", env={"EXTRA": "é x"}
    )
    basics, path, extra, cwd = stdout.decode().splitlines()
    assert basics.split()[:3] == ["/root", "root", "root"] and basics.split()[-1] == "C.UTF-8"
    assert "/usr/bin" in path and extra == "é x" and cwd == "/root"


async def test_a_command_runs_as_another_user_with_all_groups(guest: Guest) -> None:
    stdout, _, _ = await run(guest, "id -un; id -G; touch /etc/forkyard-test", user="nobody", cwd="/")
    name, groups = stdout.decode().splitlines()
    assert name == "nobody" and "0" not in groups.split()
    assert not Path("/etc/forkyard-test").exists()


async def test_what_cannot_be_run_is_told_apart(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "not-executable").write_text("")
    (tmp_path / "script").write_text("echo hi")
    (tmp_path / "script").chmod(0o755)
    for command in (["no-such-program"], [f"{tmp_path}/nothing"], [f"{tmp_path}/script"]):
        with pytest.raises(CommandNotFound):
            await guest.start(ExecSpec(command))
    with pytest.raises(GuestPermissionDenied):
        await guest.start(ExecSpec([f"{tmp_path}/not-executable"]))
    for command in ([], "a\0b", ["x", "\0"]):
        with pytest.raises(InvalidRequest):
            await guest.start(ExecSpec(command))
    assert await guest.execs() == []


async def test_a_terminal_has_a_size_that_can_change_and_passes_keys_on(guest: Guest) -> None:
    spec = ExecSpec(
        "trap 'stty size' WINCH; trap 'exit 7' INT; tty; stty size; echo $TERM; while true; do sleep 0.05; done",
        pty=True,
        rows=30,
        cols=100,
    )
    seen = b""
    async with guest.execute(spec) as execution, asyncio.timeout(20):
        items = aiter(execution)

        async def see(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                item = await anext(items)
                assert isinstance(item, Output)
                seen += item.data

        await see(b"xterm-256color")
        assert b"/dev/pts/" in seen and b"30 100" in seen
        await guest.resize(execution.id, 41, 123)
        await see(b"41 123")
        await guest.write_stdin(execution.id, b"\x03")
        while not isinstance(item := await anext(items), Exit):
            pass
    assert item.exit_code == 7
    with pytest.raises(Conflict):
        await guest.resize(execution.id, 10, 10)


async def test_a_slow_reader_holds_its_process_back_and_loses_nothing(guest: Guest) -> None:
    size = 8 << 20
    async with guest.execute(ExecSpec(f"head -c {size} /dev/urandom | tee >(sha256sum >&2)")) as execution:
        before = -1
        async with asyncio.timeout(20):
            while (produced := (await guest.exec_info(execution.id)).stdout_bytes) != before:
                before = produced
                await asyncio.sleep(0.3)
        assert 1 << 20 <= produced < 4 << 20, "the process ran on although nobody read"
        total = 0
        async for item in execution:
            assert not isinstance(item, Lost)
            if isinstance(item, Output) and item.stream == "stdout":
                assert item.offset == total
                total += len(item.data)
    assert total == size


async def test_a_stuck_reader_does_not_hold_up_others(guest: Guest) -> None:
    async with guest.execute(ExecSpec("yes")) as stuck:
        for _ in range(3):
            async with asyncio.timeout(10):
                assert (await run(guest, "echo fine"))[0] == b"fine\n"
                assert len((await run(guest, "head -c 2000000 /dev/zero"))[0]) == 2_000_000
        await guest.signal(stuck.id, signal.SIGKILL)


async def test_without_a_reader_a_process_runs_on_and_only_recent_output_is_kept(guest: Guest) -> None:
    info = await guest.start(ExecSpec("seq -w 1 1000000; echo err >&2"))
    async with asyncio.timeout(30):
        while (await guest.exec_info(info.id)).running:
            await asyncio.sleep(0.05)
    async with guest.attach(info.id) as execution:
        items = [item async for item in execution]
    lost = [item for item in items if isinstance(item, Lost)]
    kept = b"".join(item.data for item in items if isinstance(item, Output) and item.stream == "stdout")
    assert len(lost) == 1 and lost[0].offset == 0
    assert lost[0].count + len(kept) == 8_000_000
    assert kept.endswith(b"0999999\n1000000\n") and len(kept) > 500_000
    assert b"err\n" in [item.data for item in items if isinstance(item, Output) and item.stream == "stderr"]


async def test_two_readers_get_the_same(guest: Guest) -> None:
    async with guest.execute(ExecSpec("read x; seq 1 200000", stdin=True)) as one, guest.attach(one.id) as two:
        await guest.write_stdin(one.id, b"\n")

        async def all_of(execution: object) -> bytes:
            return b"".join([item.data async for item in execution if isinstance(item, Output)])  # type: ignore[attr-defined]

        first, second = await asyncio.gather(all_of(one), all_of(two))
    assert first == second == b"".join(b"%d\n" % number for number in range(1, 200_001))


async def test_a_process_that_reads_slowly_gets_all_of_a_large_stdin(guest: Guest) -> None:
    data = os.urandom(3 << 20)
    async with guest.execute(ExecSpec("sleep 0.3; wc -c", stdin=True)) as execution:
        await guest.write_stdin(execution.id, data, close=True)
        items = [item async for item in execution]
    assert isinstance(items[0], Output) and items[0].data.split() == [b"%d" % len(data)]


async def test_stdin_of_a_process_that_ended_or_has_none_is_refused(guest: Guest) -> None:
    info = await guest.start(ExecSpec("exit 0", stdin=True))
    async with guest.attach(info.id) as execution:
        [item async for item in execution]
    with pytest.raises(Conflict):
        await guest.write_stdin(info.id, b"x")
    info = await guest.start(ExecSpec("sleep 5"))
    with pytest.raises(Conflict):
        await guest.write_stdin(info.id, b"x")


async def test_an_offset_beyond_the_output_is_refused(guest: Guest) -> None:
    info = await guest.start(ExecSpec("sleep 5"))
    with pytest.raises(InvalidRequest):
        async with guest.attach(info.id, stdout_offset=1):
            pass


async def test_only_the_last_ended_execs_are_remembered(guest: Guest) -> None:
    for number in range(70):
        await run(guest, ["true"], label=str(number))
    assert [int(info.label or "") for info in await guest.execs()] == list(range(70))[-64:]


async def test_a_fork_bomb_is_ended_by_one_signal_while_the_agent_answers(guest: Guest, agent: LocalAgent) -> None:
    # Bounded, because here it shares the machine with everything else; in a VM the pids controller is the bound.
    script = "f() { for i in 1 2 3; do [ $1 -gt 0 ] && f $(($1 - 1)) & done; sleep 60; }; f 4"
    async with guest.execute(ExecSpec(script)) as execution:
        procs = agent.cgroups / f"exec-{execution.id}" / "cgroup.procs"
        await until(lambda: len(procs.read_text().split()) > 100, 30)
        async with asyncio.timeout(10):
            await guest.ping()
        await guest.signal(execution.id, signal.SIGKILL)
        items = [item async for item in execution]
    assert isinstance(items[-1], Exit) and items[-1].signal == signal.SIGKILL
    await until(lambda: not procs.exists() or not procs.read_text())


async def test_a_name_that_is_no_host_name_changes_nothing(guest: Guest) -> None:
    # The rest of `identity` changes the clock of the machine it runs on, and is tested in a VM.
    with pytest.raises(InvalidRequest):
        await guest.adopt_identity(Identity("x", "not a name", os.urandom(32), {"A": "1"}))
    assert (await run(guest, "echo [$A]"))[0] == b"[]\n"


async def test_commands_have_the_user_and_directory_that_the_identity_names(guest: Guest, tmp_path: Path) -> None:
    there = tmp_path / "there"
    env = {"FORKYARD_USER": "nobody", "FORKYARD_WORKDIR": str(there)}
    await guest.adopt_identity(Identity("a", "a", b"x" * 32, env))
    home = (await run(guest, "pwd", user="root"))[0]
    there.mkdir()
    tmp_path.chmod(0o755)
    assert (await run(guest, "pwd; id -un", user=None, cwd="/"))[0] == b"/\nnobody\n"
    assert (await run(guest, "pwd", user="root"))[0] == f"{there}\n".encode() != home
    assert (await run(guest, "pwd", user="root", cwd="~"))[0] == home
