"""What E2B's control plane says of sandboxes and templates, where no published client looks closely."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forkyard.guest.base import Guest

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .e2b_wire import envd_of, is_error, made, ran


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def sandbox(api: httpx.Client) -> Iterator[dict[str, str]]:
    sandbox = made(api)
    yield sandbox
    api.delete(f"/sandboxes/{sandbox['sandboxID']}")


def looked_at(api: httpx.Client, sandbox: dict[str, str]) -> dict[str, Any]:
    return dict(api.get(f"/sandboxes/{sandbox['sandboxID']}").json())


def listed(api: httpx.Client, **query: str) -> list[str]:
    return [one["sandboxID"] for one in api.get("/v2/sandboxes", params=query).json()]


def built(api: httpx.Client, name: str, **body: Any) -> str:
    asked = api.post("/v3/templates", json={"name": name, **body}).json()
    build = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    assert api.post(f"/v2{build}", json={"fromImage": "debian:12"}).status_code == 202
    while (status := api.get(f"{build}/status").json())["status"] in ("building", "waiting"):
        time.sleep(0.05)
    assert status["status"] == "ready", status
    return str(asked["templateID"])


# ── what is said of a sandbox ────────────────────────────────────────────────────────────────────────────────────


def test_a_sandbox_is_of_a_template_whatever_it_was_called(api: httpx.Client) -> None:
    template = built(api, "called:v1", tags=["default"])
    names = ("called", "called:v1", "forkyard/called", template)
    ids = {made(api, templateID=name)["sandboxID"] for name in names}
    for name in names:
        assert set(listed(api, template=name)) == ids
    assert listed(api, template="never-built") == []
    for one in ids:
        info = looked_at(api, {"sandboxID": one})
        assert (info["templateID"], info["alias"]) == (template, "called")
        assert api.delete(f"/sandboxes/{one}").status_code == 204


def test_lists_begin_at_the_time_that_was_asked_for(api: httpx.Client, sandbox: dict[str, str], daemon: Daemon) -> None:
    found = httpx.get(
        f"{daemon.url}/api/v1/sandboxes/{sandbox['sandboxID']}", headers={"Authorization": f"Bearer {daemon.key}"}
    )
    assert sandbox["sandboxID"] in listed(api, startedAfter=found.json()["created_at"])


def test_a_list_says_which_volumes_are_in_a_sandbox(api: httpx.Client) -> None:
    assert api.post("/volumes", json={"name": "listed"}).status_code == 201
    mounts = [{"name": "listed", "path": "/mnt/listed"}]
    sandbox = made(api, volumeMounts=mounts)
    (found,) = [one for one in api.get("/v2/sandboxes").json() if one["sandboxID"] == sandbox["sandboxID"]]
    assert found["volumeMounts"] == mounts
    assert api.delete(f"/sandboxes/{sandbox['sandboxID']}").status_code == 204


def test_a_network_is_told_as_it_was_given(api: httpx.Client) -> None:
    sandbox = made(api, network={"allowPublicTraffic": False})
    path = f"/sandboxes/{sandbox['sandboxID']}/network"
    info = looked_at(api, sandbox)
    assert (info["network"], info["allowInternetAccess"]) == ({"allowPublicTraffic": False}, None)
    assert api.put(path, json={"denyOut": ["1.1.1.1"]}).status_code == 204
    info = looked_at(api, sandbox)
    assert info["network"] == {"allowPublicTraffic": False, "denyOut": ["1.1.1.1"]}
    assert info["allowInternetAccess"] is None
    assert api.put(path, json={"allow_internet_access": False}).status_code == 204
    info = looked_at(api, sandbox)
    assert (info["network"], info["allowInternetAccess"]) == ({"allowPublicTraffic": False}, False)
    assert api.delete(f"/sandboxes/{sandbox['sandboxID']}").status_code == 204


# ── nobody answers ───────────────────────────────────────────────────────────────────────────────────────────────


def silent(daemon: Daemon, sandbox: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        raise TimeoutError

    (machine,) = [one for key, one in daemon.host.world.machines.items() if key.sandbox_id == sandbox["sandboxID"]]
    guest: Guest = machine.guest
    monkeypatch.setattr(guest, "ping", never)


def test_what_nobody_answered_in_is_resumed_without_its_memory_alone(
    daemon: Daemon, api: httpx.Client, sandbox: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/sandboxes/{sandbox['sandboxID']}"
    silent(daemon, sandbox, monkeypatch)
    for body in ({"requireHealthyGuest": True}, {"memory": False}):
        refused = api.post(f"{path}/pause", json=body)
        assert (refused.status_code, refused.headers["should-retry"]) == (503, "false")
        assert is_error(refused)
    assert looked_at(api, sandbox)["state"] == "running"
    assert api.post(f"{path}/pause", json={}).status_code == 204
    assert looked_at(api, sandbox)["envdUnresponsiveAtPause"] is True
    refused = api.post(f"/v2{path}/connect", json={"timeout": 60})
    assert refused.status_code == 409
    assert refused.json()["error_code"] == "sandbox_snapshot_guest_agent_unresponsive"
    assert api.post(f"/v2{path}/connect", json={"timeout": 60, "memory": False}).status_code == 201
    info = looked_at(api, sandbox)
    assert info["state"] == "running"
    assert "envdUnresponsiveAtPause" not in info


# ── whom it is told ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_that_calls_the_daemon_by_another_name_is_told_so(daemon: Daemon, api: httpx.Client) -> None:
    called = {"Host": "buildbox:7070", "publisher": "e2b"}
    for path in ("/v2/sandboxes", "/sandboxes/x", "/health"):
        answer = api.get(path, headers=called)
        assert answer.status_code == 400
        assert is_error(answer)
        assert "'buildbox'" in answer.json()["message"]
        assert "FORKYARD_ALLOWED_HOSTS" in answer.json()["message"]
    assert httpx.get(daemon.url, headers={"Host": "buildbox"}).json()["code"] == "domain_not_found"


@pytest.mark.parametrize("path", ["/templates/x/tags/count", "/templates/x/tags/v1/assignments"])
def test_a_path_below_a_template_that_nobody_serves_says_so(api: httpx.Client, path: str) -> None:
    answer = api.get(path)
    assert answer.status_code == 501
    assert is_error(answer)


# ── headers that are put into requests ───────────────────────────────────────────────────────────────────────────

KEY = "sk-that-nobody-sees"


@pytest.fixture(scope="module")
def stored(api: httpx.Client) -> str:
    assert api.post("/secrets", json={"name": "openai-key", "value": KEY}).status_code == 201
    return "${e2b.secrets.openai-key}"


def rules(value: str, host: str = "api.example.com") -> dict[str, Any]:
    return {host: [{"transform": {"headers": {"Authorization": f"Bearer {value}", "X-Team": "red"}}}]}


def added(daemon: Daemon, sandbox: dict[str, str]) -> list[tuple[str, str, str]]:
    (network,) = [
        one.network for key, one in daemon.host.world.machines.items() if key.sandbox_id == sandbox["sandboxID"]
    ]
    assert network is not None
    return [(one.host, one.name, one.value) for one in network.headers]


def test_a_stored_secret_is_put_into_requests_and_never_into_the_sandbox(
    daemon: Daemon, api: httpx.Client, stored: str
) -> None:
    sandbox = made(api, network={"rules": rules(stored)})
    path = f"/sandboxes/{sandbox['sandboxID']}"
    wanted = [("api.example.com", "Authorization", f"Bearer {KEY}"), ("api.example.com", "X-Team", "red")]
    assert added(daemon, sandbox) == wanted
    assert looked_at(api, sandbox)["network"] == {"rules": rules(stored)}
    assert api.put(f"{path}/network", json={}).status_code == 204
    assert added(daemon, sandbox) == []
    assert api.put(f"{path}/network", json={"rules": rules(stored), "denyOut": ["0.0.0.0/0"]}).status_code == 204
    assert added(daemon, sandbox) == wanted
    with envd_of(daemon, sandbox) as envd:
        environment = ran(envd, "env")
        assert KEY not in environment
        assert "REQUESTS_CA_BUNDLE=" in environment
    assert api.post("/secrets/openai-key", json={"value": "sk-another"}).status_code == 200
    assert added(daemon, sandbox)[0][2] == "Bearer sk-another"
    assert api.delete(path).status_code == 204


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (rules("${e2b.secrets.nothing}"), "no secret 'nothing' is stored"),
        (rules("${e2b.iam.tokens.aws}"), "api.example.com"),
        (rules("x", "10.1.2.3"), "10.1.2.3"),
        (rules("x", "10.0.0.0/8"), "10.0.0.0/8"),
        (rules("a\r\nb: c"), "control characters"),
        ({"a.example": [{"transform": {"body": "x"}}]}, "rules.a.example.0.transform.body"),
        ({"a.example": "x"}, "rules.a.example"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(
    api: httpx.Client, sandbox: dict[str, str], rule: dict[str, Any], says: str
) -> None:
    for answer in (
        api.post("/v2/sandboxes", json={"templateID": "base", "network": {"rules": rule}}),
        api.put(f"/sandboxes/{sandbox['sandboxID']}/network", json={"rules": rule}),
    ):
        assert answer.status_code == 400, answer.text
        assert is_error(answer)
        assert says in answer.json()["message"]


def test_servers_for_names_are_reached_where_names_are_allowed(api: httpx.Client, daemon: Daemon) -> None:
    def rules_of(**network: Any) -> list[tuple[str, str | None]]:
        sandbox = made(api, network=network)
        found = looked_at(api, sandbox)
        assert found["network"] == network
        machines = daemon.host.world.machines.items()
        (policy,) = [
            one.network.egress for key, one in machines if key.sandbox_id == sandbox["sandboxID"] and one.network
        ]
        assert api.delete(f"/sandboxes/{sandbox['sandboxID']}").status_code == 204
        return [(rule.action, rule.cidr) for rule in policy.rules if rule.cidr is not None]

    assert rules_of(allowOut=["example.com"], dnsServers=["1.1.1.1"]) == [("allow", "1.1.1.1/32")]
    assert rules_of(allowOut=["192.0.2.1"], dnsServers=["1.1.1.1"]) == [("allow", "192.0.2.1/32")]
    refused = api.post("/v2/sandboxes", json={"templateID": "base", "network": {"dnsServers": ["dns.example"]}})
    assert refused.status_code == 400


@pytest.mark.parametrize("field", ["egressProxy", "maskRequestHost", "httpsPorts"])
def test_a_setting_of_the_network_that_is_not_served_says_so(api: httpx.Client, field: str) -> None:
    given: dict[str, Any] = {"egressProxy": {"address": "a:1"}, "maskRequestHost": "a", "httpsPorts": [443]}
    answer = api.post("/v2/sandboxes", json={"templateID": "base", "network": {field: given[field]}})
    assert (answer.status_code, is_error(answer)) == (400, True)
    assert f"network.{field} is not served here" in answer.json()["message"]


# ── templates and volumes ────────────────────────────────────────────────────────────────────────────────────────


def test_room_that_a_template_is_to_have_makes_its_disk_larger(api: httpx.Client) -> None:
    built(api, "roomy", minFreeDiskMb=20 * 1024)
    sandbox = made(api, templateID="roomy")
    assert looked_at(api, sandbox)["diskSizeMB"] == 28 * 1024
    assert api.delete(f"/sandboxes/{sandbox['sandboxID']}").status_code == 204


def test_a_template_starts_from_a_snapshot_as_its_user(api: httpx.Client, sandbox: dict[str, str]) -> None:
    snapshot = api.post(f"/sandboxes/{sandbox['sandboxID']}/snapshots", json={}).json()["snapshotID"]
    asked = api.post("/v3/templates", json={"name": "on-top"}).json()
    build = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    body = {"fromTemplate": snapshot, "steps": [{"type": "RUN", "args": ["true"]}]}
    assert api.post(f"/v2{build}", json=body).status_code == 202
    while (status := api.get(f"{build}/status").json())["status"] in ("building", "waiting"):
        time.sleep(0.05)
    assert status["status"] == "ready", status


@pytest.mark.parametrize("kind", ["aws", "gcp"])
def test_a_registry_of_another_kind_is_refused(api: httpx.Client, kind: str) -> None:
    asked = api.post("/v3/templates", json={"name": f"from-{kind}"}).json()
    body = {"fromImage": "x.example.com/i:1", "fromImageRegistry": {"type": kind}}
    answer = api.post(f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}", json=body)
    assert (answer.status_code, is_error(answer)) == (400, True)
    assert kind in answer.json()["message"]


def test_a_volume_may_have_capitals_in_its_name(api: httpx.Client) -> None:
    made_now = api.post("/volumes", json={"name": "MyData"})
    assert (made_now.status_code, made_now.json()["name"]) == (201, "MyData")
    assert api.post("/volumes", json={"name": "no/slash"}).status_code == 400
    assert api.delete(f"/volumes/{made_now.json()['volumeID']}").status_code == 204
