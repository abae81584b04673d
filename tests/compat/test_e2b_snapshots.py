"""E2B's snapshots: their names and tags, and what is kept with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .e2b_wire import envd_of, is_error, made, ran


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def sandbox(api: httpx.Client) -> dict[str, str]:
    return made(api)


def snapshot(api: httpx.Client, sandbox: dict[str, str], **body: Any) -> dict[str, Any]:
    answer = api.post(f"/sandboxes/{sandbox['sandboxID']}/snapshots", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def ids(api: httpx.Client, **query: str) -> list[str]:
    return [one["snapshotID"] for one in api.get("/snapshots", params=query).json()]


def test_a_tag_of_a_snapshot_is_part_of_its_name(api: httpx.Client, sandbox: dict[str, str]) -> None:
    first, second, plain = (snapshot(api, sandbox, name=name) for name in ("tagged:v1", "team/tagged:v2", "tagged"))
    assert [one["names"] for one in (first, second, plain)] == [
        ["forkyard/tagged:v1"],
        ["forkyard/tagged:v2"],
        ["forkyard/tagged:default"],
    ]
    assert ids(api, name="tagged:v2") == ids(api, name="x/tagged:v2") == [second["snapshotID"]]
    assert ids(api, name="tagged:default") == [plain["snapshotID"]]
    assert len(ids(api, name="tagged")) == 3
    assert ids(api, name=first["snapshotID"]) == [first["snapshotID"]]
    assert ids(api, name="tagged:v9") == ids(api, name="tag") == []
    assert api.post("/v2/sandboxes", json={"templateID": "tagged:v9"}).status_code == 404
    for name in ("tagged", "forkyard/tagged:v1"):
        again = made(api, templateID=name)
        assert api.delete(f"/sandboxes/{again['sandboxID']}").status_code == 204


def test_a_name_goes_to_the_snapshot_that_was_given_it_last(api: httpx.Client, sandbox: dict[str, str]) -> None:
    old, new = snapshot(api, sandbox, name="again:v1"), snapshot(api, sandbox, name="again:v1")
    assert ids(api, name="again:v1") == [new["snapshotID"]]
    assert old["snapshotID"] in ids(api)
    before = len(ids(api))
    refused = api.post(f"/sandboxes/{sandbox['sandboxID']}/snapshots", json={"name": "\x01"})
    assert refused.status_code == 400
    assert is_error(refused)
    assert len(ids(api)) == before


def test_pages_of_snapshots_of_one_name_end(api: httpx.Client, sandbox: dict[str, str]) -> None:
    wanted = {snapshot(api, sandbox, name=f"paged:v{n}")["snapshotID"] for n in range(3)}
    found, token = [], ""
    while True:
        page = api.get("/snapshots", params={"name": "paged", "limit": "2", "nextToken": token})
        found += [one["snapshotID"] for one in page.json()]
        token = page.headers.get("x-next-token", "")
        if not token:
            break
    assert len(found) == 3
    assert set(found) == wanted


def test_what_a_template_says_of_its_user_is_kept_with_snapshots(daemon: Daemon, api: httpx.Client) -> None:
    asked = api.post("/v3/templates", json={"name": "users"}).json()
    steps = [{"type": "USER", "args": ["daemon"]}, {"type": "WORKDIR", "args": ["/tmp"]}]
    build = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    assert api.post(f"/v2{build}", json={"fromImage": "debian:12", "steps": steps}).status_code == 202
    while (status := api.get(f"{build}/status").json())["status"] in ("building", "waiting"):
        time.sleep(0.05)
    assert status["status"] == "ready", status
    first = made(api, templateID="users")
    kept = snapshot(api, first)
    assert api.delete(f"/sandboxes/{first['sandboxID']}").status_code == 204
    again = made(api, templateID=kept["snapshotID"])
    note = snapshot(api, again)
    third = made(api, templateID=note["snapshotID"])
    for one in (again, third):
        with envd_of(daemon, one) as envd:
            assert ran(envd, "id -un; pwd") == "daemon\n/tmp\n"
        assert api.delete(f"/sandboxes/{one['sandboxID']}").status_code == 204


def test_what_is_made_from_a_disk_alone_was_booted(daemon: Daemon, api: httpx.Client, sandbox: dict[str, str]) -> None:
    kept = snapshot(api, sandbox, memory=False)
    key = {"Idempotency-Key": "from-a-disk"}
    body = {"templateID": kept["snapshotID"], "timeout": 600}
    first, second = (api.post("/v2/sandboxes", json=body, headers=key) for _ in range(2))
    assert first.status_code == second.status_code == 201, first.text
    assert first.json()["sandboxID"] == second.json()["sandboxID"]
    machines = [one.number for one in daemon.host.world.machines if one.sandbox_id == first.json()["sandboxID"]]
    assert machines == [2]
    assert api.delete(f"/sandboxes/{first.json()['sandboxID']}").status_code == 204
