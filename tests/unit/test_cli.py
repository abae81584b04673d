"""The command line by itself: parsing, formatting, help, and pages generated from it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from forkyard import Cause, SandboxInfo, Shape, State
from forkyard.cli import show
from forkyard.cli.app import NEVER, given, seconds
from forkyard.cli.copy import Remote, parse_place
from forkyard.cli.execs import exec_command, exit_status
from forkyard.cli.forks import lineage
from forkyard.cli.root import COMMANDS, cli


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may find, or start, a daemon of this machine."""
    monkeypatch.setenv("FORKYARD_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("FORKYARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FORKYARD_RUN_DIR", str(tmp_path / "run"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_json(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    for leaf in leaves(command):
        assert leaf.help
        assert any("--json" in param.opts for param in leaf.params), leaf.name


def leaves(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return [command]
    return [leaf for below in command.commands.values() for leaf in leaves(below)]


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli, ["destroy-everything"]).exit_code == 2


@pytest.mark.parametrize(
    ("given", "command", "user"),
    [
        (["ID", "--", "ls", "-l"], ("ls", "-l"), None),
        (["ID", "ls", "-l"], ("ls", "-l"), None),
        (["-u", "me", "ID", "ls", "-u"], ("ls", "-u"), "me"),
        (["ID", "-u", "me", "--", "ls", "--", "-u"], ("ls", "--", "-u"), "me"),
        (["ID", "--user=me", "ls"], ("ls",), "me"),
        (["ID", "-ume", "sh", "-c", "x"], ("sh", "-c", "x"), "me"),
    ],
)
def test_the_command_begins_at_the_dashes_or_after_the_id(
    given: list[str], command: tuple[str, ...], user: str | None
) -> None:
    context = exec_command.make_context("exec", list(given))
    assert (context.params["sandbox_id"], context.params["command"], context.params["user"]) == ("ID", command, user)


def test_exec_without_a_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli, ["exec", "ID"]).exit_code == 2
    assert CliRunner().invoke(cli, ["exec", "ID", "--"]).exit_code == 2
    assert CliRunner().invoke(cli, ["exec", "-d", "-t", "ID", "--", "x"]).exit_code == 2


def test_exit_codes_are_those_a_shell_would_give() -> None:
    assert exit_status(0, None, False) == 0
    assert exit_status(7, None, False) == 7
    assert exit_status(None, 9, False) == 137
    assert exit_status(None, 9, True) == 124


@pytest.mark.parametrize(
    ("typed", "place"),
    [
        ("abc:/x", Remote("abc", "/x")),
        ("abc:rel", Remote("abc", "rel")),
        ("abc:", Remote("abc", ".")),
        ("abc:/a:b", Remote("abc", "/a:b")),
        ("./a:b", Path("a:b")),
        ("/a:b", Path("/a:b")),
        ("plain", Path("plain")),
    ],
)
def test_a_place_with_a_colon_before_any_slash_is_in_a_sandbox(typed: str, place: Remote | Path) -> None:
    assert parse_place(typed) == place


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (59, "59s"), (60, "1m"), (3599, "59m"), (7200, "2h"), (200000, "2d"), (-5, "0s")]
)
def test_an_age_is_its_largest_unit(seconds: int, shown: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert show.age(now - timedelta(seconds=seconds), now) == shown


@pytest.mark.parametrize(
    ("before", "now", "fresh"),
    [("", "ab", "ab"), ("ab", "abcd", "cd"), ("abcd", "cdef", "ef"), ("abcd", "xyz", "xyz"), ("ab", "ab", "")],
)
def test_only_the_new_end_of_a_growing_text_is_shown(before: str, now: str, fresh: str) -> None:
    assert show.fresh_text(before, now) == fresh


@pytest.mark.parametrize(
    ("typed", "value"), [("300", 300), ("0.5", 0.5), ("90s", 90), ("5m", 300), ("2h", 7200), ("1d", 86400)]
)
def test_a_time_is_seconds_or_has_a_unit(typed: str, value: float) -> None:
    assert seconds(typed) == value
    assert given({"a": seconds(typed), "b": None, "c": seconds("never")}) == {"a": value, "c": None}


@pytest.mark.parametrize("typed", ["", "soon", "-1", "5 m", "1w", "inf", "nan"])
def test_what_is_no_time_is_a_usage_error_with_an_example(typed: str) -> None:
    result = CliRunner().invoke(cli, ["create", "--idle-timeout", typed])
    assert result.exit_code == 2
    assert "5m" in result.stderr
    assert seconds("never") == NEVER


@pytest.mark.parametrize("command", [["set", "x"], ["resize", "x"], ["snapshots", "rm"], ["rollback", "x"]])
def test_a_change_of_nothing_is_a_usage_error(command: list[str]) -> None:
    assert CliRunner().invoke(cli, command).exit_code == 2


def sandbox(sandbox_id: str, parent_id: str | None = None, *, ended: bool = False, minute: int = 0) -> SandboxInfo:
    at = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
    return SandboxInfo(
        id=sandbox_id,
        parent_id=parent_id,
        state=State.DELETED if ended else State.RUNNING,
        cause=Cause.READY,
        incarnation=1,
        shape=Shape(vcpus=1, memory_mib=512, disk_gib=8),
        created_at=at,
        updated_at=at,
    )


FAMILY = [  # newest first, as the daemon lists them
    sandbox("grandchild", "child", minute=3),
    sandbox("dead-end", "root", ended=True, minute=2),
    sandbox("child", "root", ended=True, minute=1),
    sandbox("root", ended=True),
    sandbox("stranger", "forgotten", minute=1),
    sandbox("gone", ended=True),
]


@pytest.mark.parametrize(
    ("chosen", "everything", "shown"),
    [
        (None, False, ["root", "child", "stranger", "grandchild"]),
        (None, True, ["root", "gone", "child", "stranger", "dead-end", "grandchild"]),
        ("grandchild", False, ["root", "child", "grandchild"]),
        ("dead-end", False, ["root", "child", "dead-end", "grandchild"]),
        ("stranger", True, ["stranger"]),
    ],
)
def test_a_family_is_what_lives_and_what_it_comes_from(chosen: str | None, everything: bool, shown: list[str]) -> None:
    assert [info.id for info in lineage(FAMILY, chosen, everything)] == shown


def test_no_daemon_is_one_line_with_the_next_step() -> None:
    result = CliRunner().invoke(cli, ["ls"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "forkyard up" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("given", [["--json", "ls"], ["ls", "--json"]])
def test_with_json_an_error_is_a_problem_document_on_stderr(given: list[str]) -> None:
    result = CliRunner().invoke(cli, given)
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr)["code"] == "daemon_unreachable"


def test_version_needs_no_daemon() -> None:
    result = CliRunner().invoke(cli, ["version"])
    assert result.exit_code == 0
    assert "no daemon" in result.stdout


def test_rm_wants_ids_or_all_and_not_both() -> None:
    assert CliRunner().invoke(cli, ["rm"]).exit_code == 2
    assert CliRunner().invoke(cli, ["rm", "--all", "x"]).exit_code == 2


def test_the_reference_pages_are_up_to_date() -> None:
    script = Path(__file__).parents[2] / "scripts" / "reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
