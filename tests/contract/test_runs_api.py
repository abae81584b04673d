"""Runs and schedules as users have them: SDK and command line, over the API."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, InvalidRequest, NotFound, RunCreate

from .sdk_daemon import Daemon, running_daemon

ADD = "export default ({ a, b }) => { console.log('adding'); return { sum: a + b } }"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(socket=daemon.socket, key_file=daemon.key_file) as client:
        yield client


def test_a_run_is_there_with_its_outcome_when_the_call_returns(fy: Forkyard) -> None:
    made = fy.runs.create(ADD, payload={"a": 1, "b": 2}, env={"WHO": "me"})
    assert made.state == "succeeded"
    assert made.outcome is not None
    assert made.outcome.result == {"sum": 3}
    assert [line.message for line in made.outcome.logs] == ["adding"]
    assert fy.runs.get(made.id) == made
    assert made in fy.runs.list()


def test_a_script_that_fails_is_an_outcome(fy: Forkyard) -> None:
    made = fy.runs.create("export default () => { throw new Error('broken') }")
    assert made.outcome is not None
    assert (made.state, made.outcome.kind, made.outcome.error) == ("failed", "runtime", "broken")


def test_what_is_not_there_or_not_right_is_said(fy: Forkyard) -> None:
    with pytest.raises(NotFound):
        fy.runs.get("run-nothing")
    with pytest.raises(NotFound):
        fy.cron.runs("sch-nothing")
    with pytest.raises(InvalidRequest, match="cron"):
        fy.cron.create("now and then", "export default 1")
    with pytest.raises(InvalidRequest, match="env"):
        fy.runs.create("export default 1", env={"not a name": "x"})


def test_a_schedule_is_made_changed_turned_off_and_deleted(fy: Forkyard) -> None:
    made = fy.cron.create("0 12 * * mon-fri", ADD, name="noon", timezone="Europe/Berlin", payload={"a": 1, "b": 1})
    assert (made.active, made.timezone, made.run.payload) == (True, "Europe/Berlin", {"a": 1, "b": 1})
    assert made.next_at is not None
    assert fy.cron.list() == [made]
    changed = fy.cron.update(made.id, cron="0 0 1 1 *", run=RunCreate(script="export default 2"))
    assert (changed.cron, changed.name, changed.run.script) == ("0 0 1 1 *", "noon", "export default 2")
    off = fy.cron.update(made.id, active=False)
    assert (off.active, off.next_at) == (False, None)
    assert fy.cron.runs(made.id) == []
    fy.cron.delete(made.id)
    assert fy.cron.list() == []
    with pytest.raises(NotFound):
        fy.cron.get(made.id)


def test_the_command_line_prints_the_result_and_fails_with_the_script(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "add.js"
    script.write_text(ADD)
    done = daemon.cli("runs", "create", str(script), "--payload", '{"a": 1, "b": 2}')
    assert (json.loads(done.stdout), done.stderr, done.returncode) == ({"sum": 3}, "adding\n", 0)
    script.write_text("export default () => { throw new Error('broken') }")
    failed = daemon.cli("runs", "create", str(script))
    assert (failed.stdout, failed.returncode) == ("", 1)
    assert "broken" in failed.stderr
    listed = json.loads(daemon.cli("runs", "ls", "--json").stdout)
    assert [run["state"] for run in listed[:2]] == ["failed", "succeeded"]
    shown = daemon.cli("runs", "show", listed[1]["id"])
    assert json.loads(shown.stdout) == {"sum": 3}


def test_the_command_line_makes_schedules(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "job.js"
    script.write_text("export default 1")

    def cli(*args: str) -> subprocess.CompletedProcess[str]:
        done = daemon.cli("cron", *args)
        assert done.returncode == 0, done.stderr
        return done

    made = cli("create", "*/5 * * * *", str(script), "--name", "often", "--retries", "2").stdout.strip()
    assert cli("off", made).stdout.strip() == made
    (found,) = json.loads(cli("ls", "--json").stdout)
    assert (found["id"], found["name"], found["retries"], found["active"]) == (made, "often", 2, False)
    cli("on", made)
    assert "often" in cli("ls").stdout
    assert json.loads(cli("runs", made, "--json").stdout) == []
    cli("rm", made)
    assert json.loads(cli("ls", "--json").stdout) == []
