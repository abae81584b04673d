"""Policies, secrets and the egress log by SDK and command line, against the real API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forkyard import (
    EgressPolicy,
    EgressRecord,
    EgressRule,
    Forkyard,
    InvalidRequest,
    NetworkPolicy,
    NotFound,
    Sandbox,
    Secret,
)

from .sdk_daemon import Daemon


@pytest.fixture
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create(name="netted") as sandbox:
        yield sandbox


def happened(daemon: Daemon, sandbox: Sandbox, **fields: Any) -> None:
    """The host saw this."""
    plain = {"at": datetime.now(UTC), "sandbox_id": sandbox.id, "kind": "tcp", "verdict": "allowed"}
    daemon._loop.call_soon_threadsafe(daemon.host.egress_records.put_nowait, EgressRecord(**{**plain, **fields}))


def until(sandbox: Sandbox, count: int) -> list[EgressRecord]:
    """The first so many records."""
    found: list[EgressRecord] = []
    for record in sandbox.egress.follow(after=0):
        found.append(record)
        if len(found) == count:
            break
    return found


# ── SDK ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "network", ["none", EgressPolicy(preset="none"), NetworkPolicy(egress=EgressPolicy(preset="none"))]
)
def test_a_policy_is_given_as_a_name_or_in_full(fy: Forkyard, network: Any) -> None:
    with fy.sandboxes.create(network=network) as sandbox:
        assert sandbox.info.network.egress.preset == "none"
        assert sandbox.egress.set("open").network.egress.preset == "open"
        assert sandbox.update(network=network).network.egress.preset == "none"


def test_a_typo_is_told_before_anything_is_sent(fy: Forkyard) -> None:
    with pytest.raises(InvalidRequest, match=r"egress\.preset='codign'"):
        fy.sandboxes.create(network="codign")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"secrets\.TOKEN") as error:
        fy.sandboxes.create(secrets={"TOKEN": "the-value"})  # type: ignore[dict-item]
    assert "the-value" not in str(error.value)


def test_a_rule_that_could_never_match_is_told_before_anything_is_sent(fy: Forkyard, sbx: Sandbox) -> None:
    for network in (EgressPolicy(rules=[EgressRule(domain="10.1.2.3")]), {"egress": {"rules": [{"cidr": "::1"}]}}):
        with pytest.raises(InvalidRequest, match=r"network\.egress\.rules\.0\."):
            fy.sandboxes.create(network=network)
    with pytest.raises(InvalidRequest, match="by `cidr`"):
        sbx.egress.allow("10.1.2.3")


def test_rules_by_sdk(sbx: Sandbox) -> None:
    sbx.egress.allow("*.Example.com", ports=[443])
    info = sbx.egress.deny(cidr="192.0.2.7")
    assert info.network.egress.rules == [
        EgressRule(action="deny", cidr="192.0.2.7/32"),
        EgressRule(domain="*.example.com", ports=[443]),
    ]
    with pytest.raises(InvalidRequest):
        sbx.egress.allow("a.test", cidr="192.0.2.0/24")


def test_records_are_listed_followed_summed_and_exported(daemon: Daemon, sbx: Sandbox, tmp_path: Path) -> None:
    happened(daemon, sbx, name="a.test", port=443, exec_id="e1")
    happened(daemon, sbx, name="b.test", port=443, verdict="denied", reason="no")
    assert [record.name for record in until(sbx, 2)] == ["a.test", "b.test"]
    assert [record.name for record in sbx.egress.list(exec_id="e1")] == ["a.test"]
    assert [record.name for record in sbx.egress.list(limit=1)] == ["a.test"]
    assert [record.name for record in sbx.egress.list(tail=1)] == ["b.test"]
    assert sbx.egress.export(tmp_path / "out.jsonl") == 2
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[1]["reason"] == "no"
    assert sbx.egress.totals().connections == 0


def test_secrets_by_sdk(fy: Forkyard) -> None:
    fy.secrets.set("STORED", "value-of-stored")
    assert [info.name for info in fy.secrets.list()] == ["STORED"]
    secrets = {"STORED": Secret(hosts=["a.test"]), "GIVEN": Secret(hosts=["b.test"], value="value-of-given")}
    with fy.sandboxes.create(secrets=secrets) as sandbox:
        assert sandbox.info.secret_names == ["GIVEN", "STORED"]
        (child,) = sandbox.fork()
        assert child.info.secret_names == ["GIVEN", "STORED"]
        child.delete()
    fy.secrets.delete("STORED")
    with pytest.raises(NotFound):
        fy.secrets.get("STORED")
    with pytest.raises(InvalidRequest, match=r"secrets\.STORED"):
        fy.sandboxes.create(secrets={"STORED": {"hosts": ["a.test"]}})


# ── command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_create_with_a_policy_and_secrets(daemon: Daemon, fy: Forkyard) -> None:
    policy = [
        "--preset",
        "none",
        "--allow",
        "a.test",
        "--deny",
        "b.test",
        "--allow-cidr",
        "10.0.0.0/8",
        "--budget",
        "2G",
    ]
    set_ = daemon.cli("secrets", "set", "TOKEN", input="the-value\n")
    assert (set_.returncode, set_.stdout) == (0, "TOKEN\n")
    made = daemon.cli("create", *policy, "--rate", "64K", "--secret", "TOKEN=a.test,c.test", "--json")
    assert made.returncode == 0, made.stderr
    info = json.loads(made.stdout)
    egress = info["network"]["egress"]
    assert [(rule["action"], rule["domain"] or rule["cidr"]) for rule in egress["rules"]] == [
        ("deny", "b.test"),
        ("allow", "a.test"),
        ("allow", "10.0.0.0/8"),
    ]
    assert (egress["preset"], egress["byte_budget"], egress["bytes_per_s"]) == ("none", 2 * 2**30, 65536)
    assert info["secret_names"] == ["TOKEN"]
    assert "the-value" not in daemon.cli("secrets", "ls").stdout + daemon.cli("secrets", "ls", "--json").stdout
    fy.sandboxes.delete(info["id"])
    assert daemon.cli("secrets", "rm", "TOKEN").stdout == "TOKEN\n"
    missing = daemon.cli("create", "--secret", "TOKEN=a.test")
    assert (missing.returncode, "secrets.TOKEN" in missing.stderr) == (1, True)


def test_egress_shows_allows_denies_and_sets(daemon: Daemon, sbx: Sandbox) -> None:
    happened(daemon, sbx, name="a.test", address="192.0.2.1", port=443, bytes_in=2048, process="curl (7)", exec_id="e1")
    happened(daemon, sbx, kind="dns", name="b.test", port=53, verdict="denied", reason="allow it with …")
    until(sbx, 2)
    shown = daemon.cli("egress", "netted")
    assert shown.returncode == 0, shown.stderr
    first, second = shown.stdout.splitlines()[1:]
    assert first.split()[1:5] == ["allowed", "tcp", "a.test", "(192.0.2.1):443"]
    assert "2.0 KiB" in first
    assert "curl (7)" in first
    assert "allow it with …" in second
    assert "b.test" not in daemon.cli("egress", sbx.id, "--exec", "e1").stdout
    assert "a.test" not in daemon.cli("egress", "--denied", sbx.id).stdout
    assert [json.loads(line)["name"] for line in daemon.cli("egress", sbx.id, "--jsonl").stdout.splitlines()] == [
        "a.test",
        "b.test",
    ]
    assert len(json.loads(daemon.cli("egress", sbx.id, "--json").stdout)) == 2
    assert daemon.cli("egress", sbx.id, "--totals").returncode == 0
    assert daemon.cli("egress", "allow", sbx.id, "a.test").stdout == f"{sbx.id}\n"
    assert daemon.cli("egress", "deny", sbx.id, "--cidr", "192.0.2.0/24", "--port", "80").returncode == 0
    assert [rule.action for rule in sbx.refresh().network.egress.rules] == ["deny", "allow"]
    assert daemon.cli("egress", "set", sbx.id, "--preset", "research", "--reset").returncode == 0
    assert sbx.refresh().network.egress == EgressPolicy(preset="research")
    assert daemon.cli("egress", "allow", sbx.id).returncode == 2
    assert "allow" in daemon.cli("egress", "--help").stdout


def test_egress_set_changes_what_is_given_and_nothing_else(daemon: Daemon, fy: Forkyard) -> None:
    policy = EgressPolicy(preset="none", rules=[EgressRule(domain="a.test")], byte_budget=100, record="one")
    network = NetworkPolicy.model_validate({"egress": policy, "ingress": {"ports": {3000: "token"}}})
    with fy.sandboxes.create(network=network) as sandbox:
        assert daemon.cli("egress", "set", sandbox.id).returncode == 2
        assert daemon.cli("egress", "set", sandbox.id, "--connections", "5000").returncode == 0
        assert daemon.cli("egress", "set", sandbox.id, "--record", "two").returncode == 0
        expected = policy.model_copy(update={"connections_per_minute": 5000, "record": "two"})
        assert sandbox.refresh().network == network.model_copy(update={"egress": expected})
        assert daemon.cli("egress", "set", sandbox.id, "--deny", "b.test").returncode == 0
        assert sandbox.refresh().network.egress.rules == [EgressRule(action="deny", domain="b.test")]
        assert daemon.cli("egress", "set", sandbox.id, "--reset").returncode == 0
        assert sandbox.refresh().network == network.model_copy(update={"egress": EgressPolicy()})


def test_who_may_open_previews_is_said_at_create_and_changed_by_set(daemon: Daemon, fy: Forkyard) -> None:
    made = daemon.cli(
        "create", "--access", "off", "--port-access", "3000=token", "--port-access", "80=public", "--json"
    )
    assert made.returncode == 0, made.stderr
    sandbox = fy.sandboxes.get(json.loads(made.stdout)["id"])
    assert sandbox.info.network.ingress.model_dump() == {"access": "off", "ports": {3000: "token", 80: "public"}}
    assert daemon.cli("url", sandbox.id, "3000", "--token").stdout.startswith("fyp_")
    told = daemon.cli("url", sandbox.id, "80", "--token").stderr
    assert f"`forkyard set {sandbox.id} --port-access 80=token`" in " ".join(told.split())
    sandbox.egress.allow("a.test")
    assert daemon.cli("set", sandbox.id, "--port-access", "80=token").returncode == 0
    network = sandbox.refresh().network
    assert network.ingress.model_dump() == {"access": "off", "ports": {3000: "token", 80: "token"}}
    assert network.egress.rules == [EgressRule(domain="a.test")]
    assert daemon.cli("set", sandbox.id, "--access", "public", "--name", "seen").returncode == 0
    assert (sandbox.refresh().network.access(8000), sandbox.info.name) == ("public", "seen")
    for wrong in ("3000", "0=token", "70000=off", "3000=closed"):
        refused = daemon.cli("set", sandbox.id, "--port-access", wrong)
        assert (refused.returncode, "PORT=token" in refused.stderr) == (2, True)
    sandbox.delete()


def test_of_a_snapshot_what_is_not_given_of_its_network_stays(daemon: Daemon, fy: Forkyard) -> None:
    network = NetworkPolicy.model_validate({"egress": {"preset": "none"}, "ingress": {"access": "token"}})
    with fy.sandboxes.create(network=network) as origin:
        origin.snapshot(name="guarded")
        for typed, egress, ingress in ((("--access", "off"), "none", "off"), (("--preset", "open"), "open", "token")):
            made = daemon.cli("create", "--snapshot", "guarded", *typed, "--json")
            assert made.returncode == 0, made.stderr
            found = json.loads(made.stdout)
            fy.sandboxes.delete(found["id"])
            assert (found["network"]["egress"]["preset"], found["network"]["ingress"]["access"]) == (egress, ingress)


def test_a_command_that_was_refused_something_says_how_to_allow_it(daemon: Daemon, sbx: Sandbox) -> None:
    """The record comes while the command runs, as it does in life."""
    done: list[Any] = []
    runner = threading.Thread(
        target=lambda: done.append(daemon.cli("exec", sbx.id, "--", "sleep 2; exit 6")), daemon=True
    )
    runner.start()
    while not (execs := [info for info in sbx.execs() if info.running]):
        pass
    happened(daemon, sbx, name="b.test", port=443, verdict="denied", exec_id=execs[0].id)
    runner.join(60)
    assert done[0].returncode == 6, done[0].stderr
    assert f"blocked b.test:443; allow it: forkyard egress allow {sbx.id} b.test" in done[0].stderr
