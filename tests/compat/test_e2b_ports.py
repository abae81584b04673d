"""Ports of sandboxes that were made through E2B's API: who wakes them, and what is said when nobody answers. On a host that
is only memory, the loopback of this machine is that of every sandbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from forkyard import Forkyard

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .e2b_wire import envd_of, is_error, made, ran

CLOSED = 1


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def visited(daemon: Daemon, sandbox: dict[str, str] | str, port: int, **headers: str) -> httpx.Response:
    sandbox_id = sandbox if isinstance(sandbox, str) else sandbox["sandboxID"]
    return httpx.get(daemon.url, headers={"Host": f"{port}-{sandbox_id}.localhost", **headers}, timeout=30)


def looked_at(api: httpx.Client, sandbox: dict[str, str]) -> dict[str, Any]:
    answer = api.get(f"/sandboxes/{sandbox['sandboxID']}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def lasts_s(info: dict[str, Any]) -> float:
    return datetime.fromisoformat(info["endAt"]).timestamp() - time.time()


def paused(api: httpx.Client, sandbox: dict[str, str], **body: Any) -> dict[str, str]:
    answer = api.post(f"/sandboxes/{sandbox['sandboxID']}/pause", json=body)
    assert answer.status_code == 204, answer.text
    return sandbox


def until_paused(api: httpx.Client, sandbox: dict[str, str]) -> dict[str, Any]:
    end = time.monotonic() + 15
    while (info := looked_at(api, sandbox))["state"] != "paused":
        assert time.monotonic() < end, "it was not paused"
        time.sleep(0.1)
    return info


def killed(api: httpx.Client, sandbox: dict[str, str]) -> None:
    assert api.delete(f"/sandboxes/{sandbox['sandboxID']}").status_code == 204


# ── who wakes it ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_port_does_not_wake_what_is_not_to_wake_by_itself(daemon: Daemon, api: httpx.Client, port: int) -> None:
    sandbox = paused(api, made(api))
    for _ in range(2):
        answer = visited(daemon, sandbox, port)
        assert answer.status_code == 502
        assert answer.json() == {"code": 502, "message": "The sandbox was not found", "sandboxId": sandbox["sandboxID"]}
    assert looked_at(api, sandbox)["state"] == "paused"
    killed(api, sandbox)


def test_a_port_wakes_what_is_to_wake_by_itself_and_it_lasts(daemon: Daemon, api: httpx.Client, port: int) -> None:
    sandbox = made(api, timeout=1, autoPause=True, autoResume={"enabled": True})
    until_paused(api, sandbox)
    assert visited(daemon, sandbox, port).text == "hello"
    time.sleep(2)  # upkeep looks every second
    info = looked_at(api, sandbox)
    assert info["state"] == "running"
    assert 200 < lasts_s(info) <= 300
    killed(api, sandbox)


def test_a_pause_has_no_end_and_what_is_woken_has_one_again(daemon: Daemon, api: httpx.Client) -> None:
    sandbox = paused(api, made(api, timeout=2))
    time.sleep(4)
    assert looked_at(api, sandbox)["state"] == "paused"
    with Forkyard(daemon.url, daemon.key) as fy:  # by another way than E2B's
        assert fy.sandboxes.get(sandbox["sandboxID"]).info.expires_at is None
        assert fy.sandboxes.get(sandbox["sandboxID"]).exec("echo awake").stdout == "awake\n"
    end = time.monotonic() + 15
    while api.get(f"/sandboxes/{sandbox['sandboxID']}").status_code == 200:
        assert time.monotonic() < end, "it lives for ever"
        time.sleep(0.2)


def test_without_memory_only_a_connect_starts_it_again(daemon: Daemon, api: httpx.Client, port: int) -> None:
    sandbox = made(api, timeout=60, autoPause=True, autoResume={"enabled": True})
    path = f"/v2/sandboxes/{sandbox['sandboxID']}/connect"
    assert "pauseMode" not in looked_at(api, sandbox)
    paused(api, sandbox, memory=False)
    assert looked_at(api, sandbox)["pauseMode"] == "filesystem"
    with envd_of(daemon, sandbox) as envd:
        assert visited(daemon, sandbox, port).status_code == 502
        assert envd.post("/process.Process/List", json={}).status_code == 502
        assert api.post(path, json={"timeout": 60}).status_code == 201
        assert ran(envd, "echo up") == "up\n"
        assert 50 < lasts_s(looked_at(api, sandbox)) <= 60
        # What it was paused with before does not matter to the next pause.
        paused(api, sandbox)
        assert looked_at(api, sandbox)["pauseMode"] == "full"
        assert ran(envd, "echo woken") == "woken\n"
    killed(api, sandbox)


def test_a_timeout_may_keep_the_disk_alone(api: httpx.Client) -> None:
    sandbox = made(api, timeout=1, autoPause=True, autoPauseMemory=False)
    info = until_paused(api, sandbox)
    assert (info["pauseMode"], info["lifecycle"]["onTimeout"]) == ("filesystem", "pause")
    assert api.post(f"/v2/sandboxes/{sandbox['sandboxID']}/connect", json={"timeout": 50}).status_code == 201
    assert looked_at(api, sandbox)["state"] == "running"
    killed(api, sandbox)


# ── what is said when nobody answers ─────────────────────────────────────────────────────────────────────────────


def test_a_port_that_nobody_listens_on_is_not_open(daemon: Daemon, api: httpx.Client) -> None:
    sandbox = made(api)
    answer = visited(daemon, sandbox, CLOSED)
    assert answer.status_code == 502
    assert is_error(answer)
    assert "port is not open" in answer.json()["message"]
    assert (answer.json()["sandboxId"], answer.json()["port"]) == (sandbox["sandboxID"], CLOSED)
    page = visited(daemon, sandbox, CLOSED, Accept="text/html")
    assert "<title>" in page.text
    killed(api, sandbox)


def test_a_port_that_is_not_open_to_all_takes_the_token_of_its_sandbox(
    daemon: Daemon, api: httpx.Client, port: int
) -> None:
    sandbox = made(api, network={"allowPublicTraffic": False})
    for headers in ({}, {"e2b-traffic-access-token": "x"}):
        answer = visited(daemon, sandbox, port, **headers)
        assert answer.status_code == 403
        assert is_error(answer)
    assert visited(daemon, sandbox, port, **{"e2b-traffic-access-token": sandbox["trafficAccessToken"]}).text == "hello"
    killed(api, sandbox)


def test_a_port_of_what_was_killed_is_of_no_sandbox(daemon: Daemon, api: httpx.Client, port: int) -> None:
    sandbox = made(api)
    assert visited(daemon, sandbox, port).text == "hello"
    killed(api, sandbox)
    answer = visited(daemon, sandbox, port)
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")


def test_ports_of_others_are_told_of_as_ours_are(daemon: Daemon) -> None:
    assert visited(daemon, "i" + "0" * 19, CLOSED).json()["code"] == "sandbox_not_found"
    with Forkyard(daemon.url, daemon.key) as fy, fy.sandboxes.create() as own:
        assert visited(daemon, own.id, CLOSED).json()["code"] == "port_closed"
