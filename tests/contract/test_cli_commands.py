"""The command line against the real API: as a program of its own, found through the machine's socket and key file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox

from .sdk_daemon import Daemon


@pytest.fixture(scope="module")
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create(name="shared") as sandbox:
        yield sandbox


def test_create_ls_and_rm(daemon: Daemon) -> None:
    created = daemon.cli("create", "--name", "box", "--label", "a=b", "--memory", "1024", "-e", "K=V")
    assert created.returncode == 0, created.stderr
    sandbox_id = created.stdout.strip()
    listed = daemon.cli("ls", "--label", "a=b").stdout
    assert sandbox_id in listed
    assert "1024 MiB" in listed
    assert [item["id"] for item in json.loads(daemon.cli("--json", "ls", "--label", "a=b").stdout)] == [sandbox_id]
    assert daemon.cli("rm", "box").stdout.strip() == sandbox_id
    assert sandbox_id not in daemon.cli("ls").stdout
    (gone,) = [item for item in json.loads(daemon.cli("ls", "-a", "--json").stdout) if item["id"] == sandbox_id]
    assert (gone["state"], gone["cause"]) == ("deleted", "deleted_by_user")
    assert "deleted by user" in daemon.cli("ls", "--all").stdout


def test_piped_tables_have_whole_lines_without_colour(daemon: Daemon, sbx: Sandbox) -> None:
    lines = daemon.cli("ls").stdout.splitlines()
    assert lines[0].split() == ["ID", "NAME", "STATE", "CAUSE", "SHAPE", "AGE"]
    assert "\x1b" not in "".join(lines)
    assert any(line.startswith(sbx.id) and "running" in line for line in lines)


def test_rm_goes_on_after_one_that_is_not_there(daemon: Daemon) -> None:
    sandbox_id = daemon.cli("create").stdout.strip()
    done = daemon.cli("rm", "nosuch", sandbox_id, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"deleted": [sandbox_id]}
    assert json.loads(done.stderr)["code"] == "sandbox_not_found"
    assert daemon.cli("rm", "-f", "nosuch").returncode == 0


def test_rm_all_asks_first(daemon: Daemon, sbx: Sandbox) -> None:
    done = daemon.cli("rm", "--all", input="n\n")
    assert done.returncode == 1
    assert "Delete" in done.stderr
    assert sbx.id in daemon.cli("ls").stdout


def test_exec_is_transparent_for_bytes_streams_and_exit_code(daemon: Daemon, sbx: Sandbox) -> None:
    done = daemon.cli("exec", sbx.id, "--", "sh", "-c", "printf '\\377\\000'; echo err >&2; exit 3", text=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"\xff\x00", b"err\n", 3)


def test_one_word_is_run_by_the_shell_and_several_are_not(daemon: Daemon, sbx: Sandbox) -> None:
    assert daemon.cli("exec", sbx.id, "--", "echo a b | tr a-z A-Z").stdout == "A B\n"
    assert daemon.cli("exec", sbx.id, "--", "echo", "a | b", "$HOME").stdout == "a | b $HOME\n"


def test_options_come_before_or_after_the_id_and_dashes_are_optional(daemon: Daemon, sbx: Sandbox) -> None:
    assert daemon.cli("exec", "-e", "A=1", sbx.id, "--cwd", "/", "sh", "-c", "echo $A $PWD").stdout == "1 /\n"
    assert daemon.cli("exec", sbx.id[:6], "-w/tmp", "--", "pwd").stdout == "/tmp\n"
    assert daemon.cli("exec", "shared", "ls", "-d", "--color=never", "/").stdout == "/\n"


def test_piped_input_is_forwarded_and_can_be_refused(daemon: Daemon, sbx: Sandbox) -> None:
    assert daemon.cli("exec", sbx.id, "--", "cat", input="piped\n").stdout == "piped\n"
    assert daemon.cli("exec", "-n", sbx.id, "--", "cat", input="piped\n").stdout == ""
    data = os.urandom(2_000_000)
    assert daemon.cli("exec", sbx.id, "--", "cat", input=data, text=False).stdout == data


def test_timeouts_and_signals_are_exit_codes_as_in_a_shell(daemon: Daemon, sbx: Sandbox) -> None:
    assert daemon.cli("exec", "--timeout", "0.3", sbx.id, "--", "sleep", "100").returncode == 124
    assert daemon.cli("exec", sbx.id, "--", "kill -TERM $$").returncode == 128 + 15


def test_exec_as_json_is_one_document(daemon: Daemon, sbx: Sandbox) -> None:
    done = daemon.cli("exec", "--json", sbx.id, "--", "echo out; echo err >&2; exit 4")
    document = json.loads(done.stdout)
    assert (document["stdout"], document["stderr"], document["exit_code"]) == ("out\n", "err\n", 4)
    assert done.returncode == 4


def test_a_detached_command_is_listed_logged_and_followed(daemon: Daemon, sbx: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    exec_id = daemon.cli("exec", "-d", sbx.id, "--", f"echo begun; cat {tmp_path}/gate; exit 9").stdout.strip()
    while b"begun" not in (now := daemon.cli("logs", sbx.id, "--exec", exec_id, text=False).stdout):
        assert now == b""
    running = {info["id"] for info in json.loads(daemon.cli("ps", sbx.id, "--json").stdout) if info["running"]}
    assert exec_id in running
    (tmp_path / "gate").write_text("more\n")
    assert daemon.cli("logs", sbx.id, "--exec", exec_id, "-f").stdout == "begun\nmore\n"
    (row,) = [line for line in daemon.cli("ps", sbx.id).stdout.splitlines() if line.startswith(exec_id)]
    assert "exit 9" in row


def test_control_c_is_passed_on_to_the_command(daemon: Daemon, sbx: Sandbox) -> None:
    command = [
        sys.executable,
        "-m",
        "forkyard.cli",
        "exec",
        sbx.id,
        "--",
        "trap 'echo caught; exit 42' INT; echo up; sleep 100 & wait",
    ]
    process = subprocess.Popen(command, env=daemon.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == b"caught\n"
    assert process.wait(20) == 42
    process.stdout.close()


def test_a_reader_that_leaves_ends_the_command(daemon: Daemon, sbx: Sandbox) -> None:
    program = f"{sys.executable} -m forkyard.cli exec {sbx.id} -- 'exec yes left-alone' | head -1"
    done = subprocess.run(program, shell=True, env=daemon.env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("left-alone\n", "")
    deadline = time.monotonic() + 20
    while any(info.running and "left-alone" in str(info.command) for info in sbx.execs()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_exec_survives_a_restart_of_the_daemon(daemon: Daemon, sbx: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    command = [
        sys.executable,
        "-m",
        "forkyard.cli",
        "exec",
        sbx.id,
        "--",
        f"echo one; cat {tmp_path}/gate; echo three; exit 5",
    ]
    process = subprocess.Popen(command, env=daemon.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"one\n"
    daemon.restart()
    (tmp_path / "gate").write_text("two\n")
    assert process.stdout.read() == b"two\nthree\n"
    assert process.wait(20) == 5
    process.stdout.close()


def test_cp_copies_files_and_trees_both_ways(daemon: Daemon, sbx: Sandbox, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "tree").mkdir(parents=True)
    there.mkdir()
    (here / "tree" / "leaf").write_text("green")
    (here / "file").write_text("content")
    (here / "file").chmod(0o750)

    assert daemon.cli("cp", f"{here}/file", f"{sbx.id}:{there}/renamed").returncode == 0
    assert (there / "renamed").read_text() == "content"
    assert (there / "renamed").stat().st_mode & 0o777 == 0o750
    done = daemon.cli("cp", f"{here}/file", f"{sbx.id}:{there}", "--json")
    assert json.loads(done.stdout) == {"destination": f"{sbx.id}:{there}/file", "bytes": 7}
    assert daemon.cli("cp", f"{here}/tree", f"{sbx.id}:{there}/new").returncode == 0
    assert (there / "new" / "leaf").read_text() == "green"
    assert daemon.cli("cp", f"{here}/tree", f"shared:{there}").returncode == 0
    assert (there / "tree" / "leaf").read_text() == "green"

    assert daemon.cli("cp", f"{sbx.id}:{there}/file", f"{tmp_path}/back").returncode == 0
    assert (tmp_path / "back").read_text() == "content"
    (tmp_path / "into").mkdir()
    assert daemon.cli("cp", f"{sbx.id}:{there}/tree", f"{tmp_path}/into").returncode == 0
    assert (tmp_path / "into" / "tree" / "leaf").read_text() == "green"


def test_cp_says_what_is_wrong(daemon: Daemon, sbx: Sandbox, tmp_path: Path) -> None:
    assert "no" in daemon.cli("cp", f"{tmp_path}/nothing", f"{sbx.id}:/x").stderr
    assert "must be in a sandbox" in daemon.cli("cp", f"{tmp_path}/a", f"{tmp_path}/b").stderr
    missing = daemon.cli("cp", f"{sbx.id}:{tmp_path}/nothing", str(tmp_path), "--json")
    assert json.loads(missing.stderr)["code"] == "file_missing"


def test_logs_show_milestones_and_console(daemon: Daemon, sbx: Sandbox) -> None:
    shown = daemon.cli("logs", sbx.id).stdout
    assert "agent-ready" in shown
    assert "9000 ms" in shown
    assert "memory console" in shown
    assert json.loads(daemon.cli("logs", sbx.id, "--json").stdout)["console"] == "memory console\n"


def test_events_are_lines_of_json_or_a_table(daemon: Daemon, sbx: Sandbox) -> None:
    lines = daemon.cli("events", "--sandbox", "shared", "--json").stdout.splitlines()
    assert "sandbox.running" in [json.loads(line)["kind"] for line in lines]
    assert "sandbox.running" in daemon.cli("events").stdout
    assert len(daemon.cli("events", "-n", "1", "--json").stdout.splitlines()) == 1


def test_events_are_followed(daemon: Daemon, fy: Forkyard) -> None:
    after = str(fy.events.list()[-1].id)
    command = [sys.executable, "-m", "forkyard.cli", "events", "-f", "--after", after, "--json"]
    process = subprocess.Popen(command, env=daemon.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with fy.sandboxes.create() as sandbox:
        assert json.loads(process.stdout.readline())["sandbox_id"] == sandbox.id
    process.kill()
    process.wait()
    process.stdout.close()


def test_errors_are_a_line_for_people_and_a_problem_for_programs(daemon: Daemon) -> None:
    plain = daemon.cli("exec", "nosuch", "--", "true")
    assert (plain.returncode, plain.stdout) == (1, "")
    assert plain.stderr.startswith("error: ")
    assert "forkyard ls" in plain.stderr
    assert len(plain.stderr.splitlines()) <= 2
    problem = json.loads(daemon.cli("exec", "--json", "nosuch", "--", "true").stderr)
    assert (problem["code"], problem["status"]) == ("sandbox_not_found", 404)
    assert "vcpus=99" in daemon.cli("create", "--vcpus", "99").stderr
    assert "KEY=VALUE" in daemon.cli("create", "--label", "nonsense").stderr


def test_a_beginning_that_fits_several_sandboxes_is_refused_with_their_ids(daemon: Daemon, fy: Forkyard) -> None:
    with fy.sandboxes.create(name="twin") as one, fy.sandboxes.create(name="twin") as two:
        stderr = daemon.cli("exec", "twin", "--", "true").stderr
        assert one.id in stderr
        assert two.id in stderr


def test_the_address_and_key_can_be_given(daemon: Daemon, sbx: Sandbox) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**daemon.env, "FORKYARD_RUN_DIR": "/nonexistent", "FORKYARD_STATE_DIR": "/nonexistent"}
        command = [sys.executable, "-m", "forkyard.cli", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    assert sbx.id in run("--url", daemon.url, "--api-key", daemon.key, "ls").stdout
    refused = run("--url", daemon.url, "--api-key", "wrong", "ls")
    assert refused.returncode == 1
    assert "FORKYARD_API_KEY" in refused.stderr
    nobody = run("--url", "http://127.0.0.1:1", "ls")
    assert nobody.returncode == 1
    assert "forkyard up" in nobody.stderr


def test_keys_are_made_listed_and_removed(daemon: Daemon) -> None:
    made = json.loads(daemon.cli("keys", "create", "ci", "--json").stdout)
    assert made["key"]
    listed = daemon.cli("keys", "ls").stdout
    assert made["id"] in listed
    assert made["key"] not in listed
    assert daemon.cli("keys", "rm", made["id"]).returncode == 0
    assert made["id"] not in daemon.cli("keys", "ls", "--json").stdout


def test_doctor_and_version(daemon: Daemon) -> None:
    assert "host" in daemon.cli("doctor").stdout
    assert json.loads(daemon.cli("doctor", "--json").stdout)[0]["status"] == "ok"
    versions = json.loads(daemon.cli("version", "--json").stdout)
    assert versions["client"] == versions["daemon"]


def test_up_refuses_to_run_beside_a_daemon(daemon: Daemon) -> None:
    done = daemon.cli("up")
    assert done.returncode == 1
    assert "forkyard down" in done.stderr
