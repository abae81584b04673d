"""Previews and domains from the SDK and from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from forkyard import Conflict, DomainUnverified, Forkyard, InvalidRequest, Sandbox

from .sdk_daemon import Daemon


@pytest.fixture
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create(name="web") as sandbox:
        yield sandbox


def test_the_address_of_a_port(daemon: Daemon, sbx: Sandbox) -> None:
    assert sbx.url(3000) == f"http://3000-{sbx.id}.localhost:7070"
    assert daemon.cli("url", "web", "3000").stdout.strip() == sbx.url(3000)
    assert json.loads(daemon.cli("url", "web", "3000", "--json").stdout)["access"] == "public"
    with pytest.raises(InvalidRequest, match="port"):
        sbx.url(70000)
    refused = daemon.cli("url", "web", "3000", "--link")
    assert refused.returncode == 1
    assert "asks for no token" in refused.stderr
    assert daemon.cli("url", "web", "0").returncode == 2


def test_domains(daemon: Daemon, fy: Forkyard, sbx: Sandbox) -> None:
    added = daemon.cli("domains", "add", "App.Example.test", "web", "3000")
    (info,) = fy.domains.list()
    assert added.stdout.strip() == f'_forkyard.app.example.test. TXT "{info.record_value}"'
    assert (info.domain, info.sandbox_id, info.port, info.verified) == ("app.example.test", sbx.id, 3000, False)
    with pytest.raises(Conflict):
        fy.domains.add("app.example.test", sbx, 80)
    assert daemon.cli("domains", "map", "app.example.test", sbx.id, "80").stdout.strip().endswith(f"{sbx.id}:80")
    assert fy.domains.map("app.example.test", sbx.id, 81).port == 81
    assert "not verified" in daemon.cli("domains", "ls").stdout
    assert json.loads(daemon.cli("domains", "ls", "--json").stdout)[0]["port"] == 81
    assert daemon.cli("domains", "rm", "app.example.test").returncode == 0
    assert fy.domains.list() == []
    missing = daemon.cli("domains", "verify", "app.example.test", "--json")
    assert json.loads(missing.stderr)["code"] == "domain_not_found"
    assert issubclass(DomainUnverified, Conflict)
