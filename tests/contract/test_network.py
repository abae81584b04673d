"""Policies, secrets and the egress log, through the API, on a host that is only memory."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from forkyard.hosts.base import Incarnation
from forkyard.lifecycle import State
from forkyard.models.network import EgressRecord
from forkyard.net.base import Network, Traffic

from .conftest import World

pytestmark = pytest.mark.anyio
VALUE = "ghp-very-secret-value"
SECRETS = {"GITHUB_TOKEN": {"hosts": ["api.github.com"], "value": VALUE}}


async def created(world: World, **body: Any) -> dict[str, Any]:
    answer = await world.client.post("/sandboxes", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def network(world: World, sandbox_id: str, number: int = 1) -> Network:
    found = world.host.world.machines[Incarnation(sandbox_id, number)].network
    assert found is not None
    return found


def spec_env(world: World, sandbox_id: str, number: int = 1) -> dict[str, str]:
    return dict(world.host.world.machines[Incarnation(sandbox_id, number)].spec.env)


def record(sandbox_id: str, **fields: Any) -> EgressRecord:
    plain = {"at": datetime.now(UTC), "sandbox_id": sandbox_id, "kind": "tcp", "verdict": "allowed"}
    return EgressRecord(**{**plain, **fields})


async def logged(world: World, *records: EgressRecord) -> None:
    for one in records:
        world.host.egress_records.put_nowait(one)
    while not world.host.egress_records.empty():
        await asyncio.sleep(0)
    await world.control.egress.settle()


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_machine_gets_the_policy_it_was_created_with(world: World) -> None:
    policy = {"egress": {"preset": "none", "rules": [{"domain": "Example.COM", "ports": [443]}]}}
    info = await created(world, network=policy)
    assert info["network"]["egress"]["rules"][0]["domain"] == "example.com"
    assert network(world, info["id"]).egress.preset == "none"


async def test_the_default_is_coding(world: World) -> None:
    info = await created(world)
    assert network(world, info["id"]).egress.preset == "coding"
    assert info["network"]["ingress"]["access"] is None


async def test_a_new_policy_is_in_force_when_the_answer_comes(world: World) -> None:
    info = await created(world)
    changed = await world.client.patch(f"/sandboxes/{info['id']}", json={"network": {"egress": {"preset": "open"}}})
    assert changed.json()["network"]["egress"]["preset"] == "open"
    assert network(world, info["id"]).egress.preset == "open"


async def test_a_new_policy_of_a_sleeper_is_in_force_when_it_wakes(world: World) -> None:
    info = await created(world)
    path = f"/sandboxes/{info['id']}"
    await world.client.post(f"{path}/pause", json={})
    await world.client.patch(path, json={"network": {"egress": {"preset": "none"}}})
    assert network(world, info["id"]).egress.preset == "coding"
    await world.client.post(f"{path}/resume", json={})
    assert network(world, info["id"]).egress.preset == "none"


async def test_a_fork_inherits_policy_and_secrets(world: World) -> None:
    info = await created(world, network={"egress": {"preset": "research"}}, secrets=SECRETS)
    answer = await world.client.post(f"/sandboxes/{info['id']}/fork", json={})
    child = answer.json()["children"][0]["sandbox"]
    assert child["network"]["egress"]["preset"] == "research"
    assert child["secret_names"] == ["GITHUB_TOKEN"]
    assert spec_env(world, child["id"]) == spec_env(world, info["id"])
    assert network(world, child["id"]).injections == network(world, info["id"]).injections


async def test_a_start_and_a_rollback_keep_the_policy(world: World) -> None:
    info = await created(world, network={"egress": {"preset": "open"}}, secrets=SECRETS)
    path = f"/sandboxes/{info['id']}"
    snapshot = (await world.client.post(f"{path}/snapshots", json={})).json()["id"]
    await world.client.post(f"{path}/stop")
    await world.client.post(f"{path}/start")
    assert network(world, info["id"], 2).egress.preset == "open"
    assert (await world.client.post(f"{path}/rollback", json={"snapshot": snapshot})).status_code == 200
    assert network(world, info["id"], 3).injections["GITHUB_TOKEN"].value == VALUE
    assert spec_env(world, info["id"], 3)["GITHUB_TOKEN"].startswith("forkyard-secret-")


async def test_from_a_snapshot_the_policy_comes_along_and_secrets_do_not(world: World) -> None:
    info = await created(world, network={"egress": {"preset": "none"}}, secrets=SECRETS)
    snapshot = (await world.client.post(f"/sandboxes/{info['id']}/snapshots", json={})).json()["id"]
    plain = await created(world, snapshot=snapshot)
    assert plain["network"]["egress"]["preset"] == "none"
    assert plain["secret_names"] == []
    assert network(world, plain["id"]).injections == {}
    given = await created(world, snapshot=snapshot, network={"egress": {"preset": "open"}}, secrets=SECRETS)
    assert given["network"]["egress"]["preset"] == "open"
    # Processes of the snapshot have the placeholder in their memory: it is the same again.
    before, now = network(world, info["id"]).injections, network(world, given["id"]).injections
    assert before["GITHUB_TOKEN"].placeholder == now["GITHUB_TOKEN"].placeholder


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"egress": {"preset": "codign"}}, "network.egress.preset"),
        ({"egress": {"rulez": []}}, "network.egress.rulez"),
        ({"egress": {"rules": [{"domain": "exa mple.com"}]}}, "network.egress.rules.0.domain"),
        ({"egress": {"rules": [{"cidr": "10.0.0.0/99"}]}}, "network.egress.rules.0.cidr"),
        ({"egress": {"rules": [{"ports": [70000]}]}}, "network.egress.rules.0.ports.0"),
        ({"egress": {"rules": [{"ports": [0]}]}}, "network.egress.rules.0.ports.0"),
        ({"egress": {"record": "a/b"}}, "network.egress.record"),
        ({"egress": {"record": "a", "replay": "a"}}, "network.egress"),
        ({"ingress": {"ports": {"99999": "public"}}}, "network.ingress.ports.99999"),
    ],
)
async def test_a_policy_with_a_typo_is_refused_by_the_name_of_the_field(
    world: World, policy: dict[str, Any], field: str
) -> None:
    for answer in (
        await world.client.post("/sandboxes", json={"network": policy}),
        await world.client.patch(f"/sandboxes/{await world.sandbox()}", json={"network": policy}),
    ):
        assert answer.status_code == 422
        assert f"body.{field}" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"domain": "10.1.2.3"}, "domain: 10.1.2.3 is an address"),
        ({"domain": "10.1.2.3", "action": "deny"}, "domain: 10.1.2.3 is an address"),
        ({"domain": "host.123"}, "domain: host.123 is an address, or nothing"),
        ({"cidr": "2001:db8::/32"}, "cidr: 2001:db8::/32 is IPv6"),
        ({"domain": "https://example.com/a"}, "domain: give the name alone: example.com;"),
        ({"domain": "example.com:443"}, "domain: give the name alone: example.com;"),
        ({"domain": "example.com."}, "domain: give the name alone: example.com;"),
        ({"domain": "exa mple.com"}, "domain: a domain is letters, digits"),
        ({"domain": "a.test", "cidr": "192.0.2.0/24"}, ": a rule names a domain or a cidr, not both"),
    ],
)
async def test_a_rule_that_could_never_match_is_refused_and_says_what_to_write(
    world: World, rule: dict[str, Any], says: str
) -> None:
    sandbox_id, body = await world.sandbox(), {"network": {"egress": {"rules": [{"domain": "a.test"}, rule]}}}
    for answer in (
        await world.client.post("/sandboxes", json=body),
        await world.client.patch(f"/sandboxes/{sandbox_id}", json=body),
        await world.client.post(f"/sandboxes/{sandbox_id}/egress/rules", json=rule),
    ):
        assert (answer.status_code, says in answer.json()["detail"]) == (422, True), answer.text
    assert network(world, sandbox_id).egress.rules == []


async def test_a_rule_in_vain_of_an_earlier_version_keeps_nobody_from_their_sandbox(world: World) -> None:
    sandbox_id = await world.sandbox()
    old = {"egress": {"rules": [{"domain": "10.1.2.3"}]}}
    await world.control.ground.store.update_sandbox(sandbox_id, {"network": old}, states=[State.RUNNING])
    info = (await world.client.get(f"/sandboxes/{sandbox_id}")).json()
    assert info["network"]["egress"]["rules"][0]["domain"] == "10.1.2.3"
    (await world.client.post(f"/sandboxes/{sandbox_id}/snapshots", json={"name": "old"})).raise_for_status()
    assert (await created(world, snapshot="old"))["network"] == info["network"]
    path = f"/sandboxes/{sandbox_id}/egress/rules"
    assert (await world.client.post(path, json={"cidr": "10.1.2.3"})).status_code == 200


async def test_an_address_of_ipv6_may_be_denied_for_none_is_ever_reached(world: World) -> None:
    info = await created(world, network={"egress": {"rules": [{"action": "deny", "cidr": "fc00::/7"}]}})
    assert info["network"]["egress"]["rules"][0]["cidr"] == "fc00::/7"


async def test_rules_are_put_ahead_and_replace_their_like(world: World) -> None:
    info = await created(world, network={"egress": {"rules": [{"action": "deny", "domain": "a.test"}]}})
    path = f"/sandboxes/{info['id']}/egress/rules"
    await world.client.post(path, json={"domain": "b.test"})
    answer = await world.client.post(path, json={"domain": "a.test"})
    rules = answer.json()["network"]["egress"]["rules"]
    assert [(rule["action"], rule["domain"]) for rule in rules] == [("allow", "a.test"), ("allow", "b.test")]
    assert [rule.domain for rule in network(world, info["id"]).egress.rules] == ["a.test", "b.test"]


async def test_rules_put_in_at_once_are_all_there(world: World) -> None:
    sandbox_id = await world.sandbox()
    path = f"/sandboxes/{sandbox_id}/egress/rules"
    await asyncio.gather(*(world.client.post(path, json={"domain": f"d{n}.test"}) for n in range(8)))
    assert {rule.domain for rule in network(world, sandbox_id).egress.rules} == {f"d{n}.test" for n in range(8)}


async def test_the_257th_rule_is_refused(world: World) -> None:
    rules = [{"domain": f"d{n}.test"} for n in range(256)]
    info = await created(world, network={"egress": {"rules": rules}})
    answer = await world.client.post(f"/sandboxes/{info['id']}/egress/rules", json={"domain": "one.more.test"})
    assert answer.status_code == 422


async def test_adopted_machines_get_their_network_back(world: World) -> None:
    info = await created(world, network={"egress": {"preset": "open"}}, secrets=SECRETS)
    world.host.world.machines[Incarnation(info["id"], 1)].network = None
    await world.control.networks.restore()
    assert network(world, info["id"]).egress.preset == "open"
    assert network(world, info["id"]).injections["GITHUB_TOKEN"].value == VALUE


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def with_header(value: str, name: str = "Authorization") -> dict[str, Any]:
    return {"egress": {"preset": "open", "headers": [{"domain": "api.test", "name": name, "value": value}]}}


def headers_of(world: World, sandbox_id: str) -> list[tuple[str, str]]:
    return [(header.name, header.value) for header in network(world, sandbox_id).headers]


async def test_a_header_has_the_stored_secret_as_it_is_now(world: World) -> None:
    await world.client.put("/secrets/MY_KEY", json={"value": VALUE})
    info = await created(world, network=with_header("Bearer ${secrets.MY_KEY}"))
    assert headers_of(world, info["id"]) == [("Authorization", f"Bearer {VALUE}")]
    assert VALUE not in (await world.client.get(f"/sandboxes/{info['id']}")).text
    await world.client.put("/secrets/MY_KEY", json={"value": "another"})
    assert headers_of(world, info["id"]) == [("Authorization", "Bearer another")]
    await world.client.delete("/secrets/MY_KEY")
    assert headers_of(world, info["id"]) == []


async def test_headers_are_changed_with_the_policy_and_kept_by_forks_but_not_by_snapshots(world: World) -> None:
    await world.client.put("/secrets/MY_KEY", json={"value": VALUE})
    info = await created(world)
    path = f"/sandboxes/{info['id']}"
    changed = await world.client.patch(path, json={"network": with_header("${secrets.MY_KEY}", "X-Api-Key")})
    assert changed.status_code == 200, changed.text
    assert headers_of(world, info["id"]) == [("X-Api-Key", VALUE)]
    (child,) = (await world.client.post(f"{path}/fork", json={"count": 1})).json()["children"]
    assert headers_of(world, child["sandbox"]["id"]) == [("X-Api-Key", VALUE)]
    snapshot = (await world.client.post(f"{path}/snapshots", json={})).json()["id"]
    other = await created(world, snapshot=snapshot)
    assert other["network"]["egress"]["preset"] == "open"
    assert headers_of(world, other["id"]) == []


@pytest.mark.parametrize(
    ("value", "name", "says"),
    [
        ("${secrets.nothing}", "Authorization", "no secret 'nothing' is stored"),
        ("a\r\nb: c", "Authorization", "control characters"),
        ("x", "Transfer-Encoding", "how a request is sent"),
        ("x", "a b", "pattern"),
    ],
)
async def test_a_header_that_cannot_be_is_refused(world: World, value: str, name: str, says: str) -> None:
    refused = await world.client.post("/sandboxes", json={"network": with_header(value, name)})
    assert refused.status_code in (400, 422)
    assert says in refused.text


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_guest_has_a_placeholder_and_the_door_has_the_value(world: World) -> None:
    info = await created(world, env={"A": "1"}, secrets=SECRETS)
    placeholder = spec_env(world, info["id"])["GITHUB_TOKEN"]
    injection = network(world, info["id"]).injections["GITHUB_TOKEN"]
    assert placeholder == injection.placeholder
    assert placeholder.startswith("forkyard-secret-")
    assert (injection.value, injection.hosts, injection.header) == (VALUE, ("api.github.com",), "Authorization")
    assert VALUE not in str(network(world, info["id"]))
    other = await created(world, secrets=SECRETS)
    assert spec_env(world, other["id"])["GITHUB_TOKEN"] != placeholder


async def test_a_value_is_in_no_answer_no_event_no_log_and_not_in_the_database(world: World, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        info = await created(world, secrets=SECRETS)
        await world.client.put("/secrets/STORED", json={"value": VALUE})
        path = f"/sandboxes/{info['id']}"
        texts = [
            (await world.client.get(address)).text
            for address in ("/sandboxes", path, "/secrets", "/secrets/STORED", "/events?limit=1000", f"{path}/logs")
        ]
        refused = await world.client.post("/sandboxes", json={"secrets": {"X": {"hosts": [], "value": VALUE}}})
        wrong = await world.client.post("/sandboxes", json={"secrets": {"X": VALUE}})
    assert (refused.status_code, wrong.status_code) == (422, 422)
    for text in (*texts, refused.text, wrong.text, json.dumps(logs, default=repr)):
        assert VALUE not in text
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or VALUE.encode() not in file.read_bytes(), file


async def test_stored_secrets_are_set_listed_used_changed_and_deleted(world: World) -> None:
    assert (await world.client.put("/secrets/TOKEN", json={"value": "one"})).status_code == 200
    assert [item["name"] for item in (await world.client.get("/secrets")).json()["items"]] == ["TOKEN"]
    info = await created(world, secrets={"TOKEN": {"hosts": ["a.test"]}})
    assert network(world, info["id"]).injections["TOKEN"].value == "one"
    await world.client.put("/secrets/TOKEN", json={"value": "two"})
    assert network(world, info["id"]).injections["TOKEN"].value == "two"
    assert (await world.client.delete("/secrets/TOKEN")).status_code == 204
    assert network(world, info["id"]).injections == {}
    assert (await world.client.get("/secrets/TOKEN")).status_code == 404
    assert (await world.client.delete("/secrets/TOKEN")).status_code == 404


@pytest.mark.parametrize(
    ("secrets", "says"),
    [
        ({"TOKEN": {"hosts": ["a.test"]}}, "secrets.TOKEN"),
        ({"TOKEN": {"hosts": ["a.test"], "value": "a\nb"}}, "secrets.TOKEN.value"),
        ({"TOKEN": {"hosts": ["a.test"], "value": "x", "format": "Bearer"}}, "secrets.TOKEN.format"),
        ({"TOKEN": {"hosts": ["a.test"], "value": "x", "header": "a b"}}, "secrets.TOKEN.header"),
        ({"TOKEN": {"hosts": ["not a host"], "value": "x"}}, "secrets.TOKEN.hosts.0"),
        ({"A": {"hosts": ["a.test"], "value": "x"}}, "A is in env and in secrets"),
    ],
)
async def test_a_secret_that_cannot_work_is_refused(world: World, secrets: dict[str, Any], says: str) -> None:
    answer = await world.client.post("/sandboxes", json={"secrets": secrets, "env": {"A": "1"}})
    assert answer.status_code == 422
    assert says in answer.json()["detail"]


async def test_a_retry_with_another_value_is_another_request(world: World) -> None:
    headers = {"Idempotency-Key": "k"}
    for value, status in (("one", 201), ("one", 201), ("two", 409)):
        body = {"secrets": {"TOKEN": {"hosts": ["a.test"], "value": value}}}
        assert (await world.client.post("/sandboxes", json=body, headers=headers)).status_code == status


# ── the egress log ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_records_are_paged_and_filtered_also_after_the_end(world: World) -> None:
    sandbox_id = await world.sandbox()
    await logged(
        world,
        record(sandbox_id, kind="dns", name="a.test", exec_id="e1", trace_id="t", process="curl (7)"),
        record(sandbox_id, name="a.test", address="192.0.2.1", port=443, bytes_out=10, bytes_in=20, exec_id="e1"),
        record(sandbox_id, name="b.test", port=443, verdict="denied", reason="not allowed", exec_id="e2"),
    )
    await world.client.delete(f"/sandboxes/{sandbox_id}")
    path = f"/sandboxes/{sandbox_id}/egress"

    async def names(**params: Any) -> list[str]:
        return [item["name"] for item in (await world.client.get(path, params=params)).json()["items"]]

    assert await names() == ["a.test", "a.test", "b.test"]
    assert await names(exec_id="e2") == ["b.test"]
    assert await names(kind="dns") == ["a.test"]
    assert await names(verdict="denied") == ["b.test"]
    assert await names(tail=1) == ["b.test"]
    first = (await world.client.get(path, params={"limit": 2})).json()
    assert first["items"][0]["trace_id"] == "t"
    assert await names(after=first["next_cursor"]) == ["b.test"]
    assert (await world.client.get("/sandboxes/x" + "0" * 19 + "/egress")).status_code == 404


async def test_what_has_just_been_recorded_is_there_when_it_is_asked_for(world: World) -> None:
    sandbox_id = (await created(world))["id"]
    world.control.egress.take(record(sandbox_id, name="a.test"))
    found = (await world.client.get(f"/sandboxes/{sandbox_id}/egress")).json()["items"]
    assert [one["name"] for one in found] == ["a.test"]


async def test_only_the_newest_records_are_kept(world: World) -> None:
    sandbox_id, other = await world.sandbox(), await world.sandbox()
    store = world.control.ground.store
    await store.add_egress([record(other, name="other.test")])
    await store.add_egress([record(sandbox_id, name=f"n{number}.test") for number in range(600)], kept=50)
    found = await store.list_egress(sandbox_id)
    assert [found[0].name, found[-1].name, len(found)] == ["n550.test", "n599.test", 50]
    assert len(await store.list_egress(other)) == 1


async def test_records_can_be_followed(world: World, served: httpx.AsyncClient) -> None:
    sandbox_id = await world.sandbox()
    async with served.stream("GET", f"/sandboxes/{sandbox_id}/egress", params={"follow": True}) as answer:
        assert answer.status_code == 200
        await logged(world, record(sandbox_id, name="a.test"), record(await world.sandbox(), name="other.test"))
        await logged(world, record(sandbox_id, name="b.test"))
        found = []
        async for line in answer.aiter_lines():
            if line.strip():
                found.append(json.loads(line)["name"])
            if len(found) == 2:
                break
    assert found == ["a.test", "b.test"]


async def test_a_denial_is_an_event_once_a_minute_for_each_destination(world: World) -> None:
    sandbox_id = await world.sandbox()
    denied = record(sandbox_id, name="b.test", port=443, verdict="denied", reason="allow it with …", exec_id="e2")
    await logged(world, denied, denied, denied.model_copy(update={"name": "c.test"}))
    await logged(world, denied)
    events = (await world.client.get("/events", params={"sandbox_id": sandbox_id})).json()["items"]
    told = [event for event in events if event["kind"] == "egress.denied"]
    assert [event["data"]["name"] for event in told] == ["b.test", "c.test"]
    assert told[0]["detail"] == "allow it with …"


async def test_a_command_that_fails_is_told_what_it_was_refused(world: World) -> None:
    sandbox_id = await world.sandbox()
    for exit_code, expected in ((7, ["b.test:443", "c.test"]), (0, [])):
        await logged(
            world,
            record(sandbox_id, kind="dns", name="b.test", verdict="denied", exec_id=f"e{exit_code}", port=53),
            record(sandbox_id, name="b.test", port=443, verdict="denied", exec_id=f"e{exit_code}"),
            record(sandbox_id, kind="dns", name="c.test", verdict="denied", exec_id=f"e{exit_code}", port=53),
        )
        body = {"command": f"exit {exit_code}", "id": f"e{exit_code}"}
        lines = (await world.client.post(f"/sandboxes/{sandbox_id}/exec", json=body)).text.splitlines()
        last = json.loads(lines[-1])
        assert (last["type"], last["denied"]) == ("exit", expected)


async def test_totals_and_the_byte_budget_go_on_over_machines(world: World) -> None:
    info = await created(world, network={"egress": {"byte_budget": 1000}})
    path = f"/sandboxes/{info['id']}"
    machine = world.host.world.machines[Incarnation(info["id"], 1)]
    machine.traffic = Traffic(100, 200, 3, 1)
    assert (await world.client.get(f"{path}/egress/totals")).json() == {
        "connections": 3,
        "denied": 1,
        "bytes_out": 100,
        "bytes_in": 200,
    }
    usage = (await world.client.get(f"{path}/usage")).json()
    assert (usage["bytes_out"], usage["bytes_in"]) == (100, 200)
    await world.client.patch(path, json={"network": {"egress": {"byte_budget": 2000}}})
    assert network(world, info["id"]).spent_bytes == 0  # its own door counts them
    await world.client.post(f"{path}/stop")
    machine.traffic = Traffic()
    await world.client.post(f"{path}/start")
    assert network(world, info["id"], 2).spent_bytes == 300
    world.host.world.machines[Incarnation(info["id"], 2)].traffic = Traffic(1, 2, 1, 0)
    assert (await world.client.get(f"{path}/egress/totals")).json()["bytes_in"] == 202
    child = (await world.client.post(f"{path}/fork", json={})).json()["children"][0]["sandbox"]
    assert network(world, child["id"]).spent_bytes == 0


async def test_traffic_is_written_down(world: World) -> None:
    info = await created(world)
    world.host.world.machines[Incarnation(info["id"], 1)].traffic = Traffic(5, 6, 1, 0)
    await world.control.upkeep.tick()
    await world.control.networks.save()
    written = await world.control.ground.store.sandbox(info["id"])
    assert written is not None
    assert written.traffic == Traffic(5, 6, 1, 0)


# ── trust, metrics ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_metrics_need_a_key_and_count(world: World) -> None:
    info = await created(world)
    world.host.world.machines[Incarnation(info["id"], 1)].traffic = Traffic(5, 6, 7, 8)
    await world.client.get(f"/sandboxes/{info['id']}/egress/totals")
    await world.client.post(f"/sandboxes/{info['id']}/exec", json={"command": "true"})
    root = str(world.client.base_url).removesuffix("/api/v1/")
    answer = await world.client.get(f"{root}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'forkyard_sandboxes{state="running"} 1.0',
        "forkyard_creates_total 1.0",
        "forkyard_execs_total 1.0",
        "forkyard_network_sent_bytes_total 5.0",
        "forkyard_egress_denied_total 8.0",
    ):
        assert line in answer.text.splitlines()
    refused = await world.client.get(f"{root}/metrics", headers={"Authorization": ""})
    assert refused.status_code == 401
