"""Fork, pause, snapshots and their like from the command line, against the real API."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from forkyard import Forkyard, Sandbox

from .sdk_daemon import Daemon


@pytest.fixture
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create(name="parent") as sandbox:
        yield sandbox


def test_fork_and_tree(daemon: Daemon, sbx: Sandbox) -> None:
    forked = daemon.cli("fork", "parent", "-n", "2", "--name", "child")
    assert forked.returncode == 0, forked.stderr
    one, two = forked.stdout.split()
    drawn = daemon.cli("tree", one[:10]).stdout.splitlines()
    assert drawn[0].startswith(f"{sbx.id}  parent  running")
    assert {line.split()[1] for line in drawn[1:]} == {one, two}
    document = json.loads(daemon.cli("fork", sbx.id, "--json").stdout)
    third = document["children"][0]["sandbox"]["id"]
    assert document["parent_id"] == sbx.id
    (family,) = [tree for tree in json.loads(daemon.cli("tree", "--json").stdout) if tree["sandbox"]["id"] == sbx.id]
    assert {node["sandbox"]["id"] for node in family["children"]} == {one, two, third}
    assert daemon.cli("rm", one, two, third).returncode == 0
    assert daemon.cli("tree", sbx.id).stdout.count("\n") == 1
    assert "deleted by user" in daemon.cli("tree", sbx.id, "--all").stdout
    refused = daemon.cli("fork", sbx.id, "-n", "0")
    assert refused.returncode == 1
    assert "count=0" in refused.stderr


def test_the_last_events_are_shown(daemon: Daemon, sbx: Sandbox) -> None:
    lines = daemon.cli("events", "-n", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["sandbox_id"] for line in lines] == [sbx.id, sbx.id]
    first = str(json.loads(lines[0])["id"])
    assert daemon.cli("events", "-n", "5", "--after", first, "--json").stdout.splitlines() == lines[1:]


def test_pause_and_resume(daemon: Daemon, sbx: Sandbox) -> None:
    assert daemon.cli("pause", "parent").stdout.strip() == sbx.id
    (row,) = [line for line in daemon.cli("ls").stdout.splitlines() if line.startswith(sbx.id)]
    assert "paused by user" in row
    assert json.loads(daemon.cli("resume", sbx.id, "--json").stdout)["state"] == "running"
    daemon.cli("pause", sbx.id)
    assert daemon.cli("exec", sbx.id, "--", "echo awake").stdout == "awake\n"
    daemon.cli("pause", sbx.id)
    assert daemon.cli("resume", sbx.id, "--no-memory").returncode == 0


def test_stop_resize_and_start(daemon: Daemon, sbx: Sandbox) -> None:
    assert json.loads(daemon.cli("stop", sbx.id, "--json").stdout)["state"] == "stopped"
    assert sbx.id in daemon.cli("ls", "--state", "stopped").stdout
    assert json.loads(daemon.cli("resize", sbx.id, "--memory", "1024", "--json").stdout)["shape"]["memory_mib"] == 1024
    assert daemon.cli("start", sbx.id).stdout.strip() == sbx.id
    assert sbx.refresh().state == "running"


def test_set_changes_what_create_was_told(daemon: Daemon) -> None:
    options = ("--idle-timeout", "10m", "--ttl", "1h", "--persistence", "persistent", "--checkpoint-every", "1h")
    created = json.loads(daemon.cli("create", *options, "--json").stdout)
    assert (created["idle_timeout_s"], created["persistence"], created["checkpoint_every_s"]) == (
        600,
        "persistent",
        3600,
    )
    changed = json.loads(daemon.cli("set", created["id"], "--idle-timeout", "never", "--name", "n", "--json").stdout)
    assert (changed["idle_timeout_s"], changed["name"], changed["persistence"]) == (None, "n", "persistent")
    assert daemon.cli("rm", created["id"]).returncode == 0


def test_snapshots_are_made_listed_used_and_removed(daemon: Daemon, sbx: Sandbox) -> None:
    snapshot = daemon.cli("snapshot", "parent", "--name", "ready").stdout.strip()
    assert snapshot.startswith("sc-")
    (row,) = [
        line for line in daemon.cli("snapshots", "ls", "--sandbox", "parent").stdout.splitlines() if sbx.id in line
    ]
    assert row.split()[:2] == [snapshot, "ready"]
    assert json.loads(daemon.cli("rollback", "parent", "ready", "--json").stdout)["snapshot_id"] == snapshot
    other = json.loads(daemon.cli("create", "--snapshot", snapshot[:10], "--json").stdout)
    assert other["snapshot_id"] == snapshot
    assert daemon.cli("rm", other["id"]).returncode == 0
    assert daemon.cli("snapshots", "rm", "ready").stdout.strip() == snapshot
    assert daemon.cli("snapshot", "parent", "--name", "a/b").returncode != 0
    daemon.cli("snapshot", "parent", "--name", "b c?")
    assert daemon.cli("snapshots", "rm", "b c?").returncode == 0
    gone = daemon.cli("rollback", "parent", "ready", "--json")
    assert gone.returncode == 1
    assert json.loads(gone.stderr)["code"] == "snapshot_not_found"
