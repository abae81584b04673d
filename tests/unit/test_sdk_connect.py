"""Finding the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkyard import DaemonUnreachable, Forkyard, InvalidRequest
from forkyard.sdk import connect
from forkyard.settings import Settings


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKYARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FORKYARD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("FORKYARD_URL", raising=False)
    monkeypatch.delenv("FORKYARD_API_KEY", raising=False)


def test_what_the_caller_passes_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKYARD_URL", "http://env:1")
    monkeypatch.setenv("FORKYARD_API_KEY", "env")
    assert connect.find("http://given:2/", "given") == connect.Endpoint("http://given:2", api_key="given")
    assert connect.find() == connect.Endpoint("http://env:1", api_key="env")


@pytest.mark.parametrize("url", ["localhost:7070", "ftp://x", "http://", "7070"])
def test_what_is_no_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"http://127\.0\.0\.1:7070"):
        connect.find(url)


def test_without_a_daemon_and_without_leave_to_start_one_the_next_step_is_named() -> None:
    with pytest.raises(DaemonUnreachable, match="forkyard up"):
        connect.find(start=False)


def test_only_root_starts_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(DaemonUnreachable, match="sudo forkyard up"):
        connect.find()


def test_where_the_server_is_not_installed_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(DaemonUnreachable, match=r"forkyard\[server\]"):
        connect.find()


def test_a_daemon_that_dies_while_starting_is_reported_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'qemu is missing' >&2; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("sys.executable", str(program))
    said: list[str] = []
    with pytest.raises(DaemonUnreachable, match="exit code 3") as caught:
        connect.find(progress=said.append)
    assert "qemu is missing" in caught.value.message
    assert "daemon.log" in said[0]


def test_a_stale_socket_is_no_daemon(tmp_path: Path) -> None:
    import socket

    path = Settings().api_socket
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    assert connect.probe(path) is None


def test_loopback_addresses_are_never_sent_to_a_proxy() -> None:
    assert not connect.Endpoint("http://127.0.0.1:7070").behind_proxies
    assert not connect.Endpoint("http://[::1]:7070").behind_proxies
    assert not connect.Endpoint("http://localhost:7070").behind_proxies
    assert connect.Endpoint("https://forkyard.example").behind_proxies


def test_the_terminal_of_an_https_daemon_is_encrypted_too() -> None:
    assert connect.Endpoint("https://a.example").websocket_url("/x") == "wss://a.example/x"
    assert connect.Endpoint("http://a.example:1").websocket_url("/x") == "ws://a.example:1/x"


def test_nothing_is_contacted_before_the_first_call() -> None:
    Forkyard("http://127.0.0.1:1").close()


def test_a_socket_that_does_not_exist_yet_is_looked_for_again(tmp_path: Path) -> None:
    with Forkyard(socket=tmp_path / "api.sock", key_file=tmp_path / "key") as fy:
        for _ in range(2):
            with pytest.raises(DaemonUnreachable, match=r"api\.sock"):
                fy.health()
