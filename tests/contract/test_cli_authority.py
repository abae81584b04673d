"""`forkyard ca` and `forkyard recordings`, against a whole daemon."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forkyard.cli import ca
from forkyard.cli.root import cli
from forkyard.net.recordings import Asked, Recordings

from .whole_daemon import WholeDaemon, running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeDaemon]:
    with running(tmp_path_factory.mktemp("c")) as daemon:
        yield daemon


def forkyard(daemon: WholeDaemon, *words: str, **env: str) -> Result:
    unset = {"FORKYARD_URL": None, "FORKYARD_API_KEY": None}
    return CliRunner().invoke(cli, list(words), env={**unset, **daemon.env, **env})


def is_certificate(pem: str) -> bool:
    return bool(ssl.create_default_context(cadata=pem).get_ca_certs())


# ── ca ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_certificate_is_shown_and_exported(daemon: WholeDaemon, tmp_path: Path) -> None:
    shown = forkyard(daemon, "ca", "show")
    assert shown.exit_code == 0 and is_certificate(shown.output)
    assert json.loads(forkyard(daemon, "ca", "show", "--json").output)["certificate"] == shown.output
    file = tmp_path / "ca.pem"
    assert forkyard(daemon, "ca", "export", str(file)).output == f"{file}\n"
    assert file.read_text() == shown.output
    assert "PRIVATE" not in shown.output


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system of its own: where certificates go, and a program that is told of it."""
    monkeypatch.setattr(ca, "_INSTALLED", tmp_path / "certificates" / "forkyard.crt")
    program = tmp_path / "bin" / "update-ca-certificates"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told; [ ! -e {tmp_path}/broken ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_the_certificate_is_installed_and_removed(daemon: WholeDaemon, system: Path) -> None:
    installed = system / "certificates" / "forkyard.crt"
    assert forkyard(daemon, "ca", "install").output == "installed\n"
    assert is_certificate(installed.read_text())
    assert (system / "told").read_text() == "--fresh\n"
    assert json.loads(forkyard(daemon, "ca", "install", "--remove", "--json").output) == {"installed": False}
    assert not installed.exists()
    assert (system / "told").read_text() == "--fresh\n" * 2


def test_a_system_that_cannot_be_told_is_an_error_with_advice(daemon: WholeDaemon, system: Path) -> None:
    (system / "broken").touch()
    done = forkyard(daemon, "ca", "install")
    assert done.exit_code == 1
    assert "Export the certificate" in done.output


# ── recordings ───────────────────────────────────────────────────────────────────────────────────────────────────


async def record(daemon: WholeDaemon, name: str, url: str, body: bytes) -> None:
    taking = Recordings(daemon.settings.state_dir / "recordings").begin(name)
    await taking.write(body)
    assert await taking.finish(Asked("GET", url, ""), 200, "OK", ())
    taking.close()


def test_recordings_are_listed_shown_and_removed(daemon: WholeDaemon) -> None:
    asyncio.run(record(daemon, "monday", "https://api.test/one", b"12345"))
    asyncio.run(record(daemon, "monday", "https://api.test/two", b"123"))
    listed = forkyard(daemon, "recordings", "ls")
    assert listed.exit_code == 0 and "monday" in listed.output
    (info,) = json.loads(forkyard(daemon, "recordings", "ls", "--json").output)
    assert (info["name"], info["exchanges"], info["size_bytes"]) == ("monday", 2, 8)
    assert "https://api.test/two" in forkyard(daemon, "recordings", "show", "monday").output
    shown = json.loads(forkyard(daemon, "recordings", "show", "monday", "--json").output)
    assert [(one["method"], one["url"], one["status"]) for one in shown] == [
        ("GET", "https://api.test/one", 200),
        ("GET", "https://api.test/two", 200),
    ]
    assert forkyard(daemon, "recordings", "rm", "monday").output == "monday\n"
    assert json.loads(forkyard(daemon, "recordings", "ls", "--json").output) == []


@pytest.mark.parametrize("verb", ["show", "rm"])
def test_a_recording_that_is_not_there_is_named(daemon: WholeDaemon, verb: str) -> None:
    done = forkyard(daemon, "recordings", verb, "tuesday")
    assert done.exit_code == 1
    assert "'tuesday'" in done.output and "forkyard recordings ls" in done.output
