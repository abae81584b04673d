"""Fork, sleep, power and snapshots through the API."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from forkyard.control.placement import Limits
from forkyard.errors import GuestUnreachable, HostFailure, VmStartFailed
from forkyard.guest.base import Exit, Output
from forkyard.hosts.base import Capacity, Incarnation
from forkyard.models import ForkResult, Page, SandboxInfo, SnapshotInfo, WatchEvent
from forkyard.vmm.base import FaultPlan

from .conftest import World

pytestmark = pytest.mark.anyio


async def post(world: World, path: str, status: int = 200, **body: Any) -> Any:
    answer = await world.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_fork_answers_with_its_children(world: World) -> None:
    parent = await world.sandbox()
    result = ForkResult.model_validate(await post(world, f"/sandboxes/{parent}/fork", 201, count=3, labels={"a": "b"}))
    assert result.parent_id == parent
    assert [child.sandbox.state for child in result.children if child.sandbox] == ["running"] * 3
    listed = await world.client.get("/sandboxes?label=a=b")
    assert {item["parent_id"] for item in listed.json()["items"]} == {parent}


async def test_a_fork_without_a_body_makes_one_child(world: World) -> None:
    answer = await world.client.post(f"/sandboxes/{await world.sandbox()}/fork")
    assert (answer.status_code, len(answer.json()["children"])) == (201, 1)


@pytest.mark.parametrize("count", [0, -1, 101, 1000, "many", 1.5, None])
async def test_a_fork_of_an_impossible_count_is_refused(world: World, count: object) -> None:
    answer = await world.client.post(f"/sandboxes/{await world.sandbox()}/fork", json={"count": count})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_a_fork_that_failed_in_part_tells_it_per_child_and_one_that_failed_whole_is_an_error(
    world: World,
) -> None:
    parent = await world.sandbox()
    world.host.faults = FaultPlan(fail={"child.1": VmStartFailed("not this one")})
    result = await post(world, f"/sandboxes/{parent}/fork", 201, count=3)
    assert [child["problem"] and child["problem"]["code"] for child in result["children"]] == [
        None,
        "vm_start_failed",
        None,
    ]
    world.host.faults = FaultPlan(fail={"fork": HostFailure("none of them")})
    failed = await post(world, f"/sandboxes/{parent}/fork", 500, count=2)
    assert (failed["code"], failed["detail"]) == ("host_failure", "none of them")


# ── sleep and power ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_pause_resume_stop_start_resize(world: World) -> None:
    sandbox = await world.sandbox()
    assert (await post(world, f"/sandboxes/{sandbox}/pause"))["state"] == "paused"
    assert (await post(world, f"/sandboxes/{sandbox}/pause"))["state"] == "paused"
    assert (await post(world, f"/sandboxes/{sandbox}/resume"))["state"] == "running"
    assert (await world.client.post(f"/sandboxes/{sandbox}/resume")).json()["state"] == "running"
    await post(world, f"/sandboxes/{sandbox}/pause")
    assert (await post(world, f"/sandboxes/{sandbox}/resume", memory=False))["incarnation"] == 2
    assert (await post(world, f"/sandboxes/{sandbox}/stop"))["state"] == "stopped"
    resized = await post(world, f"/sandboxes/{sandbox}/resize", vcpus=2, disk_gib=20)
    assert (resized["shape"]["vcpus"], resized["shape"]["disk_gib"]) == (2, 20)
    assert (await post(world, f"/sandboxes/{sandbox}/resize", 422, disk_gib=10))["code"] == "invalid_shape"
    assert (await post(world, f"/sandboxes/{sandbox}/resize", 422, vcpus=99))["code"] == "invalid_shape"
    assert (await post(world, f"/sandboxes/{sandbox}/resume", 409))["details"]["state"] == "stopped"
    assert SandboxInfo.model_validate(await post(world, f"/sandboxes/{sandbox}/start")).incarnation == 3


@pytest.mark.parametrize("verb", ["fork", "pause", "resume", "stop", "start", "resize", "snapshots"])
async def test_verbs_on_what_is_gone_or_never_was(world: World, verb: str) -> None:
    assert (await post(world, f"/sandboxes/nobody/{verb}", 404))["code"] == "sandbox_not_found"
    sandbox = await world.sandbox()
    await world.client.delete(f"/sandboxes/{sandbox}")
    gone = await post(world, f"/sandboxes/{sandbox}/{verb}", 410)
    assert (gone["code"], gone["details"]["cause"]) == ("sandbox_ended", "deleted_by_user")


async def test_any_call_wakes_a_sleeper_and_looking_does_not(world: World) -> None:
    sandbox = await world.sandbox()
    await post(world, f"/sandboxes/{sandbox}/pause")
    for path in ("", "/logs"):
        assert (await world.client.get(f"/sandboxes/{sandbox}{path}")).status_code == 200
    for path in ("/sandboxes", "/events", "/health"):
        await world.client.get(path)
    assert (await world.client.get(f"/sandboxes/{sandbox}/usage")).status_code == 409
    assert (await world.client.get(f"/sandboxes/{sandbox}")).json()["state"] == "paused"
    assert (await world.client.get(f"/sandboxes/{sandbox}/files/exists?path=/tmp")).json() == {"exists": True}
    now = (await world.client.get(f"/sandboxes/{sandbox}")).json()
    assert (now["state"], now["cause"]) == ("running", "woken")


async def test_a_file_that_is_being_read_keeps_its_sandbox_awake(world: World, served: httpx.AsyncClient) -> None:
    sandbox = await world.sandbox()
    script = world.guests[0].script("/big").feed(b"one")
    async with served.stream("GET", f"/sandboxes/{sandbox}/files?path=/big") as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        assert world.control.ground.activity.in_use(sandbox)
        script.feed(None)
        assert [piece async for piece in pieces] == []
    async with asyncio.timeout(5):
        while world.control.ground.activity.in_use(sandbox):
            await asyncio.sleep(0.005)


async def test_a_waiting_exec_counts_as_a_call_and_a_followed_one_does_not(
    world: World, served: httpx.AsyncClient
) -> None:
    sandbox = await world.sandbox()
    guest = world.guests[0]
    guest.script("make")
    in_use = world.control.ground.activity.in_use
    async with served.stream("POST", f"/sandboxes/{sandbox}/exec", json={"command": "make"}) as answer:
        await anext(answer.aiter_lines())
        assert in_use(sandbox)
    async with served.stream("GET", f"/sandboxes/{sandbox}/execs/make/output") as answer:
        await anext(answer.aiter_lines())
        async with asyncio.timeout(5):
            while in_use(sandbox):
                await asyncio.sleep(0.005)


async def test_output_that_is_followed_goes_on_after_a_cold_sleep(world: World, served: httpx.AsyncClient) -> None:
    sandbox = await world.sandbox()
    guest = world.guests[0]
    script = guest.script("e1").feed(Output("stdout", 0, b"one"))
    async with served.stream("GET", f"/sandboxes/{sandbox}/execs/e1/output") as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["type"] == "started"
        assert json.loads(await anext(lines))["offset"] == 0
        await post(world, f"/sandboxes/{sandbox}/pause")
        assert await world.control.sleep.cool_if_free(sandbox)
        script.feed(GuestUnreachable("the machine is asleep"))
        await asyncio.sleep(0.05)
        assert (await world.client.get(f"/sandboxes/{sandbox}")).json()["state"] == "paused"
        await post(world, f"/sandboxes/{sandbox}/resume")
        script.feed(Output("stdout", 3, b"two"), Exit(0, None, False, 1.0))
        rest = [json.loads(line) for line in [await anext(lines), await anext(lines)]]
    assert [item["type"] for item in rest] == ["output", "exit"]
    assert base64.b64decode(rest[0]["data"]) == b"two"
    assert ("attach", "e1", 3, 0) in guest.calls


async def test_a_watch_goes_on_after_a_cold_sleep_and_says_it_may_have_missed_something(
    world: World, served: httpx.AsyncClient
) -> None:
    sandbox = await world.sandbox()
    script = world.guests[0].script("/repo")
    async with served.stream("GET", f"/sandboxes/{sandbox}/files/watch?path=/repo") as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines)) == {"type": "ready"}
        await post(world, f"/sandboxes/{sandbox}/pause")
        await world.control.sleep.cool_if_free(sandbox)
        script.feed(GuestUnreachable("the machine is asleep"))
        await asyncio.sleep(0.05)
        await post(world, f"/sandboxes/{sandbox}/resume")
        script.feed(WatchEvent(type="created", path="/repo/a"))
        seen = [json.loads(await anext(lines)) for _ in range(2)]
    assert [(item["type"], item["path"]) for item in seen] == [("overflow", "/repo"), ("created", "/repo/a")]


async def test_an_exec_can_be_given_its_id(world: World) -> None:
    sandbox = await world.sandbox()
    started = await post(world, f"/sandboxes/{sandbox}/execs", 201, command="true", id="build.1_a-B")
    assert started["id"] == "build.1_a-B"
    assert (await world.client.get(f"/sandboxes/{sandbox}/execs/build.1_a-B")).status_code == 200
    for wrong in ("", "a b", "x" * 65, "a/b", "ä"):
        await post(world, f"/sandboxes/{sandbox}/execs", 422, command="true", id=wrong)


# ── update, limits ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_sandbox_is_changed_by_patch(world: World) -> None:
    sandbox = await world.sandbox()
    body = {"name": "new", "idle_timeout_s": None, "persistence": "persistent", "priority": 9, "ttl_s": 60}
    changed = (await world.client.patch(f"/sandboxes/{sandbox}", json=body)).json()
    assert {key: changed[key] for key in ("name", "idle_timeout_s", "persistence", "priority")} == {
        "name": "new",
        "idle_timeout_s": None,
        "persistence": "persistent",
        "priority": 9,
    }
    assert changed["expires_at"] is not None
    for wrong in ({"priority": 11}, {"persistence": "forever"}, {"idle_timeout_s": 0}, {"labels": None}, {"vcpus": 2}):
        assert (await world.client.patch(f"/sandboxes/{sandbox}", json=wrong)).status_code == 422, wrong


async def test_no_room_and_used_up_quotas_say_when_to_come_back(world: World) -> None:
    world.host.room = Capacity(64, 2**50)
    refused = await world.client.post("/sandboxes", json={})
    assert (refused.status_code, refused.json()["code"]) == (503, "no_capacity")
    assert refused.headers["retry-after"] == str(int(refused.json()["details"]["retry_after_s"]))
    world.host.room = Capacity(10**6, 2**50)
    world.control.ground.limits = Limits(quota_creates_per_minute=1)
    await world.sandbox()
    refused = await world.client.post("/sandboxes", json={})
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    other = {"Authorization": f"Bearer {(await world.control.keys.create('other')).key}"}
    assert (await world.client.post("/sandboxes", json={}, headers=other)).status_code == 201


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["a/b", "/", "", "new\nline", "x" * 129])
async def test_a_name_that_no_address_could_hold_is_refused(world: World, name: str) -> None:
    answer = await post(world, f"/sandboxes/{await world.sandbox()}/snapshots", 422, name=name)
    assert "name" in json.dumps(answer)


async def test_the_life_of_a_snapshot(world: World) -> None:
    sandbox = await world.sandbox()
    await world.client.put(f"/sandboxes/{sandbox}/files?path=/tmp/a", content=b"then")
    taken = SnapshotInfo.model_validate(await post(world, f"/sandboxes/{sandbox}/snapshots", 201, name="ready"))
    assert (taken.name, taken.sandbox_id, taken.automatic) == ("ready", sandbox, False)
    assert (await world.client.get("/snapshots/ready")).json() == (
        await world.client.get(f"/snapshots/{taken.id}")
    ).json()
    listed = await world.client.get(f"/snapshots?sandbox_id={sandbox}&automatic=false")
    assert Page[SnapshotInfo].model_validate(listed.json()).items == [taken]
    assert (await world.client.get("/snapshots?automatic=true")).json()["items"] == []
    await world.client.put(f"/sandboxes/{sandbox}/files?path=/tmp/a", content=b"now")
    back = await post(world, f"/sandboxes/{sandbox}/rollback", snapshot="ready")
    assert (back["state"], back["snapshot_id"], back["incarnation"]) == ("running", taken.id, 2)
    assert (await world.client.get(f"/sandboxes/{sandbox}/files?path=/tmp/a")).content == b"then"
    other = await post(world, "/sandboxes", 201, snapshot="ready")
    assert (await world.client.get(f"/sandboxes/{other['id']}/files?path=/tmp/a")).content == b"then"
    assert (await world.client.delete("/snapshots/ready")).status_code == 204
    assert (await world.client.delete("/snapshots/ready")).status_code == 404
    assert (await post(world, "/sandboxes", 404, snapshot="ready"))["code"] == "snapshot_not_found"
    assert (await post(world, f"/sandboxes/{sandbox}/rollback", 404, snapshot="ready"))["code"] == "snapshot_not_found"


async def test_a_snapshot_may_have_no_name_but_not_a_taken_one(world: World) -> None:
    sandbox = await world.sandbox()
    for _ in range(2):
        assert (await world.client.post(f"/sandboxes/{sandbox}/snapshots")).status_code == 201
    await post(world, f"/sandboxes/{sandbox}/snapshots", 201, name="ready")
    assert (await post(world, f"/sandboxes/{sandbox}/snapshots", 409, name="ready"))["code"] == "conflict"
    assert (await post(world, f"/sandboxes/{sandbox}/snapshots", 422, name=""))["code"] == "invalid_request"


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_newest_events_come_with_tail(world: World, served: httpx.AsyncClient) -> None:
    sandbox = await world.sandbox()
    await post(world, f"/sandboxes/{sandbox}/pause")
    page = (await world.client.get("/events?tail=2")).json()
    assert [event["kind"] for event in page["items"]] == ["sandbox.pausing", "sandbox.paused"]
    assert page["next_cursor"] is None
    async with served.stream("GET", "/events", params={"follow": "true", "tail": "1"}) as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["kind"] == "sandbox.paused"
        await post(world, f"/sandboxes/{sandbox}/resume")
        assert json.loads(await anext(lines))["kind"] == "sandbox.resuming"
    assert (await world.client.get("/events?tail=2&after=1")).status_code == 422


async def test_the_cause_of_every_end_can_be_read_after_it(world: World) -> None:
    sandbox = str((await post(world, "/sandboxes", 201, persistence="ephemeral"))["id"])
    assert (await post(world, f"/sandboxes/{sandbox}/pause"))["state"] == "deleted"
    ended = (await world.client.get("/sandboxes?all=true")).json()["items"][0]
    assert (ended["id"], ended["cause"]) == (sandbox, "ephemeral")
    refused = await world.client.post(f"/sandboxes/{sandbox}/exec", json={"command": "true"})
    assert (refused.status_code, refused.json()["details"]["cause"]) == (410, "ephemeral")
    assert Incarnation(sandbox, 1) not in world.host.world.machines
