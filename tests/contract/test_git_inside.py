"""`git.forkyard.internal` behind the door: who a request is of is what the door says, and nothing the guest says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from forkyard.api.inside import InsideGit
from forkyard.control.ground import machine
from forkyard.control.inside import DOOR_HEADER, GIT_HOST
from forkyard.net.base import SANDBOX_HEADER, Network

from .conftest import World

pytestmark = pytest.mark.anyio
REFS = "/app.git/info/refs?service=git-upload-pack"


class Yard:
    def __init__(self, world: World, client: httpx.AsyncClient, identity_id: str) -> None:
        self.world, self.client, self.identity_id = world, client, identity_id

    async def sandbox(self, **fields: Any) -> str:
        answer = await self.world.client.post("/sandboxes", json={"identity": "agent", **fields})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def headers(self, sandbox_id: str) -> dict[str, str]:
        """What the door of this sandbox puts on a request."""
        service = (await self._network(sandbox_id)).services[GIT_HOST]
        return {**service.headers, SANDBOX_HEADER: sandbox_id}

    async def services(self, sandbox_id: str) -> set[str]:
        return set((await self._network(sandbox_id)).services)

    async def _network(self, sandbox_id: str) -> Network:
        record = await self.world.control.ground.record(sandbox_id)
        network = self.world.host.world.machines[machine(record)].network
        assert network is not None
        return network


@pytest.fixture
async def yard(world: World) -> AsyncIterator[Yard]:
    world.control.inside.port = 7071
    made = await world.client.post("/git/repos", json={"name": "app", "source": {"type": "files", "files": [
        {"path": "a", "content": "a"}]}})  # fmt: skip
    identity = (await world.client.post("/identities", json={"name": "agent"})).json()["id"]
    path = f"/identities/{identity}/permissions/repos/{made.json()['id']}"
    assert (await world.client.put(path, json={"permission": "read"})).is_success
    app = InsideGit(world.app.state.git, world.control.inside)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{GIT_HOST}") as client:
        yield Yard(world, client, identity)


async def test_a_sandbox_reads_what_its_identity_may_and_the_log_names_it(yard: Yard) -> None:
    sandbox_id = await yard.sandbox()
    answer = await yard.client.get(REFS, headers=await yard.headers(sandbox_id))
    assert answer.status_code == 200 and b"refs/heads/main" in answer.content
    entry = (await yard.world.client.get("/audit", params={"action": "git.fetch"})).json()["items"][0]
    assert (entry["actor_id"], entry["sandbox_id"]) == (yard.identity_id, sandbox_id)
    push = REFS.replace("upload", "receive")
    assert (await yard.client.get(push, headers=await yard.headers(sandbox_id))).status_code == 403


async def test_a_sandbox_without_an_identity_has_no_such_name(yard: Yard) -> None:
    plain = await yard.sandbox(identity=None)
    assert await yard.services(plain) == set()
    known = await yard.headers(await yard.sandbox())
    assert (await yard.client.get(REFS, headers={**known, SANDBOX_HEADER: plain})).status_code == 403


async def test_an_identity_can_be_given_taken_and_deleted_while_it_runs(yard: Yard) -> None:
    sandbox_id = await yard.sandbox()
    headers = await yard.headers(sandbox_id)
    await yard.world.client.patch(f"/sandboxes/{sandbox_id}", json={"identity": None})
    assert await yard.services(sandbox_id) == set()
    assert (await yard.client.get(REFS, headers=headers)).status_code == 403
    answer = await yard.world.client.patch(f"/sandboxes/{sandbox_id}", json={"identity": yard.identity_id})
    assert answer.json()["identity_id"] == yard.identity_id
    assert (await yard.client.get(REFS, headers=headers)).status_code == 200
    await yard.world.client.delete(f"/identities/{yard.identity_id}")
    # No 401: git would ask for a password.
    assert (await yard.client.get(REFS, headers=headers)).status_code == 403


async def test_forks_have_the_identity_and_snapshots_give_none(yard: Yard) -> None:
    sandbox_id = await yard.sandbox()
    fork = (await yard.world.client.post(f"/sandboxes/{sandbox_id}/fork", json={})).json()["children"][0]["sandbox"]
    assert fork["identity_id"] == yard.identity_id and await yard.services(fork["id"]) == {GIT_HOST}
    taken = (await yard.world.client.post(f"/sandboxes/{sandbox_id}/snapshots", json={})).json()["id"]
    other = (await yard.world.client.post("/sandboxes", json={"snapshot": taken})).json()
    assert other["identity_id"] is None


async def test_who_is_no_door_gets_nothing_whatever_he_shows(yard: Yard) -> None:
    sandbox_id = await yard.sandbox()
    for headers in (
        {SANDBOX_HEADER: sandbox_id},
        {SANDBOX_HEADER: sandbox_id, DOOR_HEADER: "guess"},
        {"authorization": f"Bearer {yard.world.key}", SANDBOX_HEADER: sandbox_id},
    ):
        assert (await yard.client.get(REFS, headers=headers)).status_code == 403
    door = await yard.headers(sandbox_id)
    for path in ("/api/v1/sandboxes", "/git/../api/v1/sandboxes", "/", "/metrics"):
        answer = await yard.client.get(path, headers={**door, "authorization": f"Bearer {yard.world.key}"})
        assert answer.status_code == 404, path


async def test_an_unknown_identity_is_refused(yard: Yard) -> None:
    answer = await yard.world.client.post("/sandboxes", json={"identity": "nobody"})
    assert answer.status_code == 404
    await yard.world.client.post("/identities", json={"name": "agent"})
    answer = await yard.world.client.post("/sandboxes", json={"identity": "agent"})
    assert answer.status_code == 422 and "give the id" in answer.json()["detail"]


async def test_large_files_are_answered_without_what_opened_the_door(yard: Yard) -> None:
    sandbox_id = await yard.sandbox()
    door = await yard.headers(sandbox_id)
    body = {"operation": "download", "objects": [{"oid": "0" * 64, "size": 1}]}
    answer = await yard.client.post(
        "/app.git/info/lfs/objects/batch",
        content=json.dumps(body),
        headers={**door, "authorization": "Basic eDp5", "content-type": "application/vnd.git-lfs+json"},
    )
    assert answer.status_code == 200, answer.text
    assert door[DOOR_HEADER] not in answer.text and "eDp5" not in answer.text
