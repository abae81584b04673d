"""`fork`, `tree`, `set`, `snapshots`, `ls` against a scripted daemon: what is sent, shown, and given as exit code."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from forkyard import Forkyard, NoCapacity, SnapshotNotFound
from forkyard.cli.app import App
from forkyard.cli.root import cli

from .sdk_script import ID, INFO, Daemon, problem

SNAPSHOT_ID = "sc-aaaaaaaaaaaaaaaaaaaa"
SNAPSHOT = {
    "id": SNAPSHOT_ID,
    "name": "ready",
    "sandbox_id": ID,
    "automatic": True,
    "shape": INFO["shape"],
    "size_bytes": 40 * 2**20,
    "created_at": "2026-01-01T00:00:00Z",
}


def child(letter: str, **fields: Any) -> dict[str, Any]:
    return {**INFO, "id": letter * 20, "parent_id": ID, "created_at": "2026-01-01T00:01:00Z", **fields}


@pytest.fixture(autouse=True)
def _scripted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "client", lambda *_a, **_k: Forkyard(transport=httpx.MockTransport(daemon)))


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def test_fork_prints_the_children_and_fails_if_one_failed(daemon: Daemon) -> None:
    children = [{"sandbox": child("a")}, {"problem": NoCapacity("no room").to_problem()}, {"sandbox": child("b")}]
    daemon.on(f"POST /sandboxes/{ID}/fork", {"parent_id": ID, "paused_ms": 12.5, "children": children})
    done = run("fork", str(ID), "-n", "3", "--label", "a=b")
    assert (done.exit_code, done.stdout.split()) == (1, ["a" * 20, "b" * 20])
    assert "no room" in done.stderr
    body = json.loads(daemon.asked(f"POST /sandboxes/{ID}/fork")[0].content)
    assert body == {"count": 3, "labels": {"a": "b"}}

    document = json.loads(run("fork", str(ID), "-n", "3", "--json").stdout)
    assert (document["parent_id"], document["paused_ms"]) == (ID, 12.5)
    assert [child["sandbox"] and child["sandbox"]["id"] for child in document["children"]] == ["a" * 20, None, "b" * 20]
    assert document["children"][1]["problem"]["code"] == "no_capacity"


def test_a_fork_whose_children_all_run_succeeds(daemon: Daemon) -> None:
    daemon.on(f"POST /sandboxes/{ID}/fork", {"parent_id": ID, "paused_ms": 1, "children": [{"sandbox": child("a")}]})
    assert run("fork", str(ID)).exit_code == 0


def test_tree_draws_parents_above_their_children(daemon: Daemon) -> None:
    dead = {**INFO, "state": "failed", "cause": "vm_crashed", "name": "first"}
    daemon.on("GET /sandboxes", {"items": [child("a", state="paused", name="second"), dead]})
    top, below = run("tree").stdout.splitlines()
    assert top.startswith(f"{ID}  first  failed, vm crashed")
    assert below.split()[:2] == ["└──", "a" * 20]
    assert "second  paused" in below
    (root,) = json.loads(run("tree", "--json").stdout)
    assert root["sandbox"]["id"] == ID
    assert [node["sandbox"]["id"] for node in root["children"]] == ["a" * 20]


def test_ls_says_why_a_sandbox_sleeps_or_ended(daemon: Daemon) -> None:
    crashed = {**INFO, "state": "failed", "cause": "vm_crashed", "cause_detail": "signal 9"}
    daemon.on("GET /sandboxes", {"items": [child("a", state="paused", cause="idle"), crashed, child("b")]})
    header, sleeping, ended, running = run("ls", "--all").stdout.splitlines()
    assert header.split()[-1] == "DETAIL"
    assert sleeping.split()[1:3] == ["paused", "idle"]
    assert "vm crashed" in ended
    assert ended.rstrip().endswith("signal 9")
    assert "ready" not in running


def test_set_sends_what_is_given_and_never_is_null(daemon: Daemon) -> None:
    daemon.on(f"PATCH /sandboxes/{ID}", INFO)
    done = run("set", str(ID), "--idle-timeout", "never", "--ttl", "2h", "--priority", "0", "--label", "a=b")
    assert done.stdout.strip() == ID
    assert json.loads(daemon.asked(f"PATCH /sandboxes/{ID}")[0].content) == {
        "idle_timeout_s": None,
        "ttl_s": 7200.0,
        "priority": 0,
        "labels": {"a": "b"},
    }


def test_create_sends_its_options_and_finds_the_snapshot_by_the_beginning_of_its_id(daemon: Daemon) -> None:
    daemon.on("GET /health", {"status": "ok", "version": "1", "pid": 1}).on("POST /sandboxes", INFO)
    daemon.on("GET /snapshots/sc-a", problem(SnapshotNotFound())).on("GET /snapshots", {"items": [SNAPSHOT]})
    done = run("create", "--snapshot", "sc-a", "--idle-timeout", "never", "--persistence", "persistent")
    assert done.exit_code == 0, done.stderr
    assert json.loads(daemon.asked("POST /sandboxes")[0].content) == {
        "snapshot": SNAPSHOT_ID,
        "idle_timeout_s": None,
        "persistence": "persistent",
    }


def test_snapshots_are_listed_with_their_kind_and_size(daemon: Daemon) -> None:
    daemon.on("GET /snapshots", {"items": [SNAPSHOT]})
    _, row = run("snapshots", "ls", "--automatic").stdout.splitlines()
    assert row.split()[:6] == [SNAPSHOT_ID, "ready", ID, "checkpoint", "40", "MiB"]
    assert daemon.requests[0].url.params["automatic"] == "true"


def test_snapshots_rm_goes_on_after_one_that_is_not_there(daemon: Daemon) -> None:
    daemon.on("GET /snapshots/nosuch", problem(SnapshotNotFound())).on("GET /snapshots", {"items": []})
    daemon.on("GET /snapshots/ready", SNAPSHOT).on(f"DELETE /snapshots/{SNAPSHOT_ID}", httpx.Response(204))
    done = run("snapshots", "rm", "nosuch", "ready", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, {"deleted": [SNAPSHOT_ID]})
    assert "forkyard snapshots ls" in done.stderr
    assert run("snapshots", "rm", "-f", "nosuch").exit_code == 0
