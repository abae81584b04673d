"""Sandboxes, events and keys through the API."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from forkyard.errors import NoCapacity
from forkyard.hosts.base import Incarnation
from forkyard.models import EventInfo, KeyCreated, KeyInfo, Page, SandboxInfo, SandboxLogs, SandboxUsage
from forkyard.vmm.base import ExitKind, FaultPlan

from .conftest import JSON, World, as_json

pytestmark = pytest.mark.anyio


async def test_the_life_of_a_sandbox(world: World) -> None:
    created = await world.client.post(
        "/sandboxes", json={"name": "box", "memory_mib": 1024, "labels": {"team": "a"}, "env": {"CI": "1"}}
    )
    assert created.status_code == 201
    info = SandboxInfo.model_validate(created.json())
    assert (info.name, info.state, info.shape.memory_mib, info.labels) == ("box", "running", 1024, {"team": "a"})
    assert (await world.client.get(f"/sandboxes/{info.id}")).json() == created.json()
    assert Page[SandboxInfo].model_validate((await world.client.get("/sandboxes")).json()).items == [info]
    logs = SandboxLogs.model_validate((await world.client.get(f"/sandboxes/{info.id}/logs")).json())
    assert [milestone.name for milestone in logs.create] == ["ready"]
    SandboxUsage.model_validate((await world.client.get(f"/sandboxes/{info.id}/usage")).json())
    for _ in range(2):
        deleted = await world.client.delete(f"/sandboxes/{info.id}")
        assert (deleted.status_code, deleted.content) == (204, b"")
    assert (await world.client.get(f"/sandboxes/{info.id}")).json()["state"] == "deleted"
    assert (await world.client.get("/sandboxes")).json()["items"] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/logs"),
        ("GET", "/usage"),
        ("GET", "/execs"),
        ("GET", "/execs/e1"),
        ("GET", "/execs/e1/output"),
        ("GET", "/files?path=/a"),
        ("PUT", "/files?path=/a"),
        ("GET", "/files/list?path=/a"),
        ("GET", "/files/watch?path=/a"),
    ],
)
@pytest.mark.parametrize("sandbox_id", ["nosuchsandbox", "..", "%00", "%ff", "a" * 2000])
async def test_an_unknown_id_is_not_found_everywhere(world: World, method: str, path: str, sandbox_id: str) -> None:
    answer = await world.client.request(method, f"/sandboxes/{sandbox_id}{path}")
    assert answer.status_code == 404 or sandbox_id == ".."
    assert answer.status_code < 500


async def test_an_ended_sandbox_says_why_it_ended(world: World) -> None:
    sandbox_id = await world.sandbox()
    world.host.end(Incarnation(sandbox_id, 1), ExitKind.PANIC, "the guest kernel panicked: oops")
    async with world.control.events.follow(after=0) as events:
        async for event in events:
            if event.kind == "sandbox.failed":
                break
    answer = await world.client.post(f"/sandboxes/{sandbox_id}/exec", json={"command": "true"})
    assert answer.status_code == 410
    assert answer.json()["details"]["cause"] == "guest_panic"
    assert "oops" in answer.json()["detail"]
    assert (await world.client.get(f"/sandboxes/{sandbox_id}/logs")).status_code == 200


async def test_a_failed_create_answers_with_its_error(world: World) -> None:
    world.host.faults = FaultPlan(fail={"create": NoCapacity("all 2 places are taken")})
    answer = await world.client.post("/sandboxes", json={})
    assert answer.status_code == 503
    assert (answer.json()["code"], answer.json()["detail"]) == ("no_capacity", "all 2 places are taken")
    assert answer.headers["retry-after"] == "1"


async def test_creates_with_one_idempotency_key_make_one_sandbox(world: World) -> None:
    world.host.faults = FaultPlan(delay_s={"create": 0.02})
    calls = [world.client.post("/sandboxes", json={}, headers={"Idempotency-Key": "once"}) for _ in range(8)]
    answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = await world.client.post("/sandboxes", json={"name": "other"}, headers={"Idempotency-Key": "once"})
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")


async def test_idempotency_keys_of_two_api_keys_are_apart(world: World) -> None:
    second = (await world.client.post("/keys", json={"name": "second"})).json()["key"]
    first = await world.client.post("/sandboxes", json={}, headers={"Idempotency-Key": "once"})
    other = await world.client.post(
        "/sandboxes", json={}, headers={"Idempotency-Key": "once", "Authorization": f"Bearer {second}"}
    )
    assert first.json()["id"] != other.json()["id"]


@pytest.mark.parametrize("key", ["", "x" * 256, "with space", b"\xe9"])
async def test_a_strange_idempotency_key_is_refused(world: World, key: str | bytes) -> None:
    answer = await world.client.post("/sandboxes", json={}, headers={"Idempotency-Key": key})  # type: ignore[dict-item]
    assert answer.status_code == 422
    assert "Idempotency-Key" in answer.json()["detail"]


async def test_a_list_is_paged_and_filtered(world: World) -> None:
    for number in range(5):
        labels = {"parity": "even" if number % 2 == 0 else "odd", "team": "a=b"}
        await world.client.post("/sandboxes", json={"name": str(number), "labels": labels})
    names: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await world.client.get("/sandboxes", params={"limit": "2", **cursor})).json()
        names += [item["name"] for item in page["items"]]
        await world.sandbox()
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert names == ["4", "3", "2", "1", "0"]
    even = await world.client.get("/sandboxes?label=parity=even&label=team=a%3Db&state=running&state=failed")
    assert [item["name"] for item in even.json()["items"]] == ["4", "2", "0"]
    assert (await world.client.get("/sandboxes?state=failed")).json()["items"] == []


@pytest.mark.parametrize("env", [{"A": "x\0y"}, {"A": "\ud800"}])
async def test_an_environment_that_no_program_can_have_is_refused(world: World, env: dict[str, str]) -> None:
    answer = await world.client.post("/sandboxes", content=as_json({"env": env}), headers=JSON)
    assert answer.status_code == 422
    assert (await world.client.get("/sandboxes?all=true")).json()["items"] == []


# ── events and keys ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_events_are_paged(world: World) -> None:
    sandbox_id = await world.sandbox()
    page = Page[EventInfo].model_validate((await world.client.get(f"/events?sandbox_id={sandbox_id}&limit=1")).json())
    assert [event.kind for event in page.items] == ["sandbox.creating"]
    rest = (await world.client.get(f"/events?sandbox_id={sandbox_id}&after={page.next_cursor}")).json()
    assert [event["kind"] for event in rest["items"]] == ["sandbox.running"]
    assert rest["next_cursor"] is None


async def test_events_are_followed_as_they_happen(world: World, served: httpx.AsyncClient) -> None:
    async with served.stream("GET", "/events", params={"follow": "true"}) as answer:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = answer.aiter_lines()
        sandbox_id = await world.sandbox()
        seen = [json.loads(await anext(lines)) for _ in range(2)]
    assert [(event["kind"], event["sandbox_id"]) for event in seen] == [
        ("sandbox.creating", sandbox_id),
        ("sandbox.running", sandbox_id),
    ]


async def test_keys_are_made_shown_once_listed_and_deleted(world: World) -> None:
    created = KeyCreated.model_validate((await world.client.post("/keys", json={"name": "ci"})).json())
    listed = await world.client.get("/keys")
    assert created.key not in listed.text
    assert "ci" in [key.name for key in Page[KeyInfo].model_validate(listed.json()).items]
    other = {"Authorization": f"Bearer {created.key}"}
    assert (await world.client.get("/sandboxes", headers=other)).status_code == 200
    assert (await world.client.delete(f"/keys/{created.id}")).status_code == 204
    assert (await world.client.get("/sandboxes", headers=other)).status_code == 401
    assert (await world.client.delete(f"/keys/{created.id}")).status_code == 404


async def test_the_last_key_stays(world: World) -> None:
    [key] = (await world.client.get("/keys")).json()["items"]
    answer = await world.client.delete(f"/keys/{key['id']}")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


async def test_doctor_lists_checks(world: World) -> None:
    assert [check["status"] for check in (await world.client.get("/doctor")).json()] == ["ok"]
