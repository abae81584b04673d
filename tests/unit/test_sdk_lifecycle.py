"""Fork, pause, snapshots and settings of a sandbox: what both clients send, and what they make of the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from forkyard import (
    AsyncForkyard,
    Conflict,
    DaemonUnreachable,
    Forkyard,
    InvalidRequest,
    InvalidShape,
    NoCapacity,
    State,
)

from .sdk_script import ID, INFO, Both, Daemon, problem

SNAPSHOT = {
    "id": "sc-aaaaaaaaaaaaaaaaaaaa",
    "name": "ready",
    "sandbox_id": ID,
    "shape": INFO["shape"],
    "size_bytes": 1000,
    "created_at": "2026-01-01T00:00:00Z",
}
FORK = f"POST /sandboxes/{ID}/fork"


def child(letter: str) -> dict[str, Any]:
    return {**INFO, "id": "c" + letter * 19, "parent_id": ID, "cause": "forked"}


pytestmark = pytest.mark.usefixtures("hurried")


def sent(daemon: Daemon, route: str) -> Any:
    return json.loads(daemon.asked(route)[-1].content)


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fork_gives_its_children_in_order(daemon: Daemon, both: Both) -> None:
    children = [{"sandbox": child("a")}, {"sandbox": child("b")}]
    daemon.on(FORK, httpx.Response(201, json={"parent_id": ID, "paused_ms": 21.5, "children": children}))
    one, two = both.on_sandbox(daemon, "fork", 2, name="try", labels={"k": "v"})
    assert (one.id, two.id) == ("c" + "a" * 19, "c" + "b" * 19)
    assert one.parent_id == ID
    assert sent(daemon, FORK) == {"count": 2, "name": "try", "labels": {"k": "v"}}
    both.on_sandbox(daemon, "fork")
    assert sent(daemon, FORK) == {"count": 1}


def test_a_child_that_failed_is_raised_with_the_ids_of_those_that_run(daemon: Daemon, both: Both) -> None:
    full = NoCapacity("no room", retry_after_s=5).to_problem()
    children = [{"sandbox": child("a")}, {"problem": full}, {"sandbox": child("b")}]
    daemon.on(FORK, {"parent_id": ID, "paused_ms": 20, "children": children})
    with pytest.raises(NoCapacity, match=r"1 of 3 children .* no room") as caught:
        both.on_sandbox(daemon, "fork", 3)
    assert caught.value.details == {"retry_after_s": 5, "children": ["c" + "a" * 19, "c" + "b" * 19]}
    assert "c" + "a" * 19 in caught.value.message


def test_a_partial_fork_tells_the_outcome_of_each_child(daemon: Daemon, both: Both) -> None:
    children = [{"sandbox": child("a")}, {"problem": NoCapacity("no room").to_problem()}]
    daemon.on(FORK, {"parent_id": ID, "paused_ms": 20, "children": children})
    one, two = both.on_sandbox(daemon, "fork", 2, partial=True)
    assert (one.sandbox.id, one.error, one.paused_ms) == ("c" + "a" * 19, None, 20)
    assert two.sandbox is None
    assert isinstance(two.error, NoCapacity)


def test_a_fork_is_never_sent_twice_when_nobody_knows_if_it_happened(daemon: Daemon, both: Both) -> None:
    daemon.on(FORK, httpx.ReadError("reset"))
    with pytest.raises(DaemonUnreachable):
        both.on_sandbox(daemon, "fork")
    assert len(daemon.asked(FORK)) == 1


def test_a_fork_that_never_reached_a_daemon_is_sent_again(daemon: Daemon, both: Both) -> None:
    daemon.on(FORK, httpx.ConnectError("refused"), {"parent_id": ID, "paused_ms": 0, "children": []})
    assert both.on_sandbox(daemon, "fork") == []


@pytest.mark.parametrize("count", [0, -1, 1000])
def test_an_impossible_count_is_refused_before_anything_is_sent(daemon: Daemon, both: Both, count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"count={count}"):
        both.on_sandbox(daemon, "fork", count)
    assert not daemon.asked(FORK)


def test_children_are_those_whose_parent_it_is(daemon: Daemon, both: Both) -> None:
    other = {**INFO, "id": "x" * 20, "parent_id": "y" * 20}
    daemon.on("GET /sandboxes", {"items": [child("a"), other], "next_cursor": "2"}, {"items": [INFO, child("b")]})
    assert [found.id[1] for found in both.on_sandbox(daemon, "children", all=True)] == ["a", "b"]
    assert daemon.asked("GET /sandboxes")[0].url.params["all"] == "true"


# ── states and settings ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("verb", "options", "body"),
    [
        ("pause", {}, None),
        ("stop", {}, None),
        ("start", {}, None),
        ("resume", {}, {}),
        ("resume", {"memory": False}, {"memory": False}),
        ("resize", {"memory_mib": 1024}, {"memory_mib": 1024}),
        ("rollback", {"snapshot": "ready"}, {"snapshot": "ready"}),
    ],
)
def test_a_verb_is_one_request_and_its_answer_the_new_state(
    daemon: Daemon, both: Both, verb: str, options: dict[str, Any], body: Any
) -> None:
    route = f"POST /sandboxes/{ID}/{verb}"
    daemon.on(route, {**INFO, "state": "paused", "cause": "paused_by_user"})
    assert both.on_sandbox(daemon, verb, **options).state == State.PAUSED
    (request,) = daemon.asked(route)
    assert (json.loads(request.content) if request.content else None) == body


def test_what_may_be_so_already_is_sent_again_and_a_rollback_is_not(daemon: Daemon, both: Both) -> None:
    for verb in ("pause", "resume", "stop", "start"):
        daemon.on(f"POST /sandboxes/{ID}/{verb}", httpx.ReadError("reset"), INFO)
        assert both.on_sandbox(daemon, verb).id == ID
    daemon.on(f"POST /sandboxes/{ID}/rollback", httpx.ReadError("reset"), INFO)
    with pytest.raises(DaemonUnreachable):
        both.on_sandbox(daemon, "rollback", "ready")


def test_the_sandbox_knows_the_state_a_verb_left_it_in() -> None:
    daemon = Daemon().on(f"POST /sandboxes/{ID}/pause", {**INFO, "state": "paused"})
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        sandbox = fy.sandboxes.get(ID)
        sandbox.pause()
        assert sandbox.state == State.PAUSED


def test_a_resize_of_nothing_or_to_the_impossible_is_refused_before_anything_is_sent(
    daemon: Daemon, both: Both
) -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        both.on_sandbox(daemon, "resize")
    with pytest.raises(InvalidShape, match="memory_mib=1 "):
        both.on_sandbox(daemon, "resize", memory_mib=1)
    assert {request.method for request in daemon.requests} == {"GET"}


def test_an_update_sends_what_is_given_and_none_is_given(daemon: Daemon, both: Both) -> None:
    route = f"PATCH /sandboxes/{ID}"
    daemon.on(route, httpx.ReadError("reset"), INFO)
    both.on_sandbox(daemon, "update", idle_timeout_s=None, labels={"a": "b"})
    assert [json.loads(request.content) for request in daemon.asked(route)] == [
        {"idle_timeout_s": None, "labels": {"a": "b"}}
    ] * 2
    with pytest.raises(InvalidRequest, match="priority=11"):
        both.on_sandbox(daemon, "update", priority=11)


def test_a_create_sends_what_differs_from_the_defaults(daemon: Daemon, both: Both) -> None:
    daemon.on("POST /sandboxes", INFO)
    both.create(daemon, snapshot="ready", idle_timeout_s=None, persistence="persistent", ttl_s=60, priority=9)
    both.create(daemon, checkpoint_every_s=30, checkpoints_kept=3, idle_timeout_s=300)
    assert [json.loads(request.content) for request in daemon.asked("POST /sandboxes")] == [
        {"snapshot": "ready", "idle_timeout_s": None, "persistence": "persistent", "ttl_s": 60.0, "priority": 9},
        {"checkpoint_every_s": 30.0, "checkpoints_kept": 3},
    ]
    with pytest.raises(InvalidRequest, match="persistence='forever'"):
        both.create(daemon, persistence="forever")


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_snapshot_can_be_created_from_returned_to_and_deleted() -> None:
    daemon = Daemon().on(f"POST /sandboxes/{ID}/snapshots", httpx.Response(201, json=SNAPSHOT))
    daemon.on("POST /sandboxes", INFO).on(f"POST /sandboxes/{ID}/rollback", INFO)
    daemon.on(f"DELETE /snapshots/{SNAPSHOT['id']}", httpx.Response(204))
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        sandbox = fy.sandboxes.get(ID)
        snapshot = sandbox.snapshot("ready")
        assert (snapshot.id, snapshot.name, snapshot.sandbox_id) == (SNAPSHOT["id"], "ready", ID)
        fy.sandboxes.create(snapshot=snapshot)
        sandbox.rollback(snapshot)
        snapshot.delete()
    assert sent(daemon, f"POST /sandboxes/{ID}/snapshots") == {"name": "ready"}
    assert sent(daemon, "POST /sandboxes") == {"snapshot": SNAPSHOT["id"]}
    assert sent(daemon, f"POST /sandboxes/{ID}/rollback") == {"snapshot": SNAPSHOT["id"]}
    assert daemon.asked(f"DELETE /snapshots/{SNAPSHOT['id']}")


def test_a_name_that_is_taken_is_a_conflict(daemon: Daemon, both: Both) -> None:
    daemon.on(f"POST /sandboxes/{ID}/snapshots", problem(Conflict("there is a snapshot 'ready'")))
    with pytest.raises(Conflict, match="ready"):
        both.on_sandbox(daemon, "snapshot", "ready")


def test_snapshots_are_listed_to_the_last_page_and_filtered(daemon: Daemon, both: Both) -> None:
    daemon.on("GET /snapshots", {"items": [SNAPSHOT], "next_cursor": "c2"}, {"items": [SNAPSHOT]})

    async def listed(fy: AsyncForkyard) -> Any:
        return await fy.snapshots.list(sandbox_id=ID, automatic=False)

    found = both.call(daemon, lambda fy: fy.snapshots.list(sandbox_id=ID, automatic=False), listed)
    assert len(found) == 2
    params = [dict(request.url.params) for request in daemon.requests]
    assert params[0] == {"sandbox_id": ID, "automatic": "false", "limit": "500"}
    assert params[1]["cursor"] == "c2"


def test_a_snapshot_is_found_by_a_name_with_any_letter_in_it() -> None:
    daemon = Daemon().on("GET /snapshots/a/b c", SNAPSHOT)
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        assert fy.snapshots.get("a/b c").id == SNAPSHOT["id"]
    assert daemon.requests[0].url.raw_path == b"/api/v1/snapshots/a%2Fb%20c"


# ── the end of history ───────────────────────────────────────────────────────────────────────────────────────────


def events(*numbers: int, more: bool = False) -> dict[str, Any]:
    items = [{"id": n, "at": "2026-01-01T00:00:00Z", "sandbox_id": None, "kind": "daemon.started"} for n in numbers]
    return {"items": items, "next_cursor": str(numbers[-1]) if more else None}


def test_the_last_events_are_asked_for_at_once(daemon: Daemon) -> None:
    daemon.on("GET /events", events(8, 9))
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        assert [event.id for event in fy.events.list(tail=2)] == [8, 9]
        assert [event.id for event in fy.events.list(tail=1, after=7)] == [9]
    assert [request.url.params.get("tail") for request in daemon.requests] == ["2", None]


def test_a_daemon_that_does_not_know_tail_is_read_to_its_end(daemon: Daemon) -> None:
    daemon.on("GET /events", events(1, 2, more=True), events(3, 4, more=True), events(5))
    with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
        assert [event.id for event in fy.events.list(tail=2)] == [4, 5]
    assert [request.url.params.get("after") for request in daemon.requests] == [None, "2", "4"]
    assert ["tail" in request.url.params for request in daemon.requests] == [True, False, False]
