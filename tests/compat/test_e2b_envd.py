"""What a sandbox says to E2B's clients where no published one looks closely: users, paths, sizes, words of errors."""

from __future__ import annotations

import base64
import json
import pwd
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .e2b_wire import envd_of, made, of_user, ran, stream

GHOST = "invalid username: 'ghost'"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def envd(daemon: Daemon, api: httpx.Client) -> Iterator[httpx.Client]:
    with envd_of(daemon, made(api)) as client:
        yield client


def asked(envd: httpx.Client, method: str, message: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    answer = envd.post(f"/filesystem.Filesystem/{method}", json=message, headers=headers)
    return answer.status_code, answer.json()


# ── users ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["Stat", "ListDir", "MakeDir", "Remove", "CreateWatcher"])
def test_nobody_does_anything_in_the_name_of_a_user_who_is_not_there(
    envd: httpx.Client, tmp_path: Path, method: str
) -> None:
    status, body = asked(envd, method, {"path": str(tmp_path / "there")}, **of_user("ghost"))
    assert (status, body["code"], body["message"]) == (401, "unauthenticated", GHOST)
    assert not (tmp_path / "there").exists()


def test_nor_moves_reads_writes_watches_or_starts(envd: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    names = {"source": str(tmp_path / "a"), "destination": str(tmp_path / "b")}
    assert asked(envd, "Move", names, **of_user("ghost"))[1]["message"] == GHOST
    for method in ("GET", "POST"):
        query = {"path": str(tmp_path / "a"), "username": "ghost"}
        answer = envd.request(method, "/files", params=query, headers={"Content-Type": "application/octet-stream"})
        assert (answer.status_code, answer.json()["message"]) == (401, GHOST)
    for wanted, message in (
        ("filesystem.Filesystem/WatchDir", {"path": str(tmp_path)}),
        ("process.Process/Start", {"process": {"cmd": "/bin/true"}}),
    ):
        (end,) = stream(envd, wanted, message, **of_user("ghost"))
        assert end["error"] == {"code": "unauthenticated", "message": GHOST}
    assert (tmp_path / "a").read_text() == "a"


def test_a_relative_path_leads_to_where_the_user_lives(envd: httpx.Client) -> None:
    for name in ("daemon", "root"):
        status, body = asked(envd, "Stat", {"path": "."}, **of_user(name))
        assert (status, body["entry"]["path"]) == (200, pwd.getpwnam(name).pw_dir)
    assert ran(envd, "id -un", **of_user("daemon")) == "daemon\n"


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_output_comes_in_pieces_of_the_size_that_clients_know(envd: httpx.Client) -> None:
    def longest(**more: Any) -> int:
        wanted = {"process": {"cmd": "/bin/sh", "args": ["-c", "head -c 300000 /dev/zero"]}, **more}
        data = [one["event"]["data"] for one in stream(envd, "process.Process/Start", wanted) if "data" in str(one)]
        return max(len(base64.b64decode(next(iter(one.values())))) for one in data)

    assert 16_384 < longest() <= 32_768
    assert longest(pty={"size": {"rows": 24, "cols": 80}}) <= 16_384


def test_a_list_of_processes_says_what_they_were_started_with(envd: httpx.Client) -> None:
    wanted = {"process": {"cmd": "/bin/sleep", "args": ["30"], "envs": {"FOO": "bar"}, "cwd": "/tmp"}, "tag": "sleeper"}
    stream(envd, "process.Process/Start", wanted, **{"Connect-Timeout-Ms": "1000"})
    body = json.dumps({**wanted, "tag": "again"}).encode()
    with envd.stream(
        "POST",
        "/process.Process/Start",
        content=struct.pack(">BI", 0, len(body)) + body,
        headers={"Content-Type": "application/connect+json"},
    ) as answer:
        next(answer.iter_raw())
        processes = envd.post("/process.Process/List", json={}).json()["processes"]
        (found,) = [one for one in processes if one.get("tag") == "again"]
        assert found["config"]["envs"] == {"FOO": "bar"}
        assert found["config"]["cwd"] == "/tmp"
        kill = {"process": {"pid": found["pid"]}, "signal": "SIGNAL_SIGKILL"}
        assert envd.post("/process.Process/SendSignal", json=kill).status_code == 200


def test_what_is_null_is_as_good_as_nothing(envd: httpx.Client, tmp_path: Path) -> None:
    nulls = {"args": None, "envs": None, "cwd": None}
    wanted = {"process": {"cmd": "/bin/true", **nulls}, "pty": None, "tag": None, "stdin": None}
    assert stream(envd, "process.Process/Start", wanted)[-1] == {}
    (tmp_path / "a" / "b").mkdir(parents=True)
    for depth, found in (("2", 2), (None, 1), (0, 1), (1000, 2)):
        status, body = asked(envd, "ListDir", {"path": str(tmp_path), "depth": depth})
        assert (status, len(body["entries"])) == (200, found), body
    assert asked(envd, "ListDir", {"path": str(tmp_path), "depth": -1})[0] == 400


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def put(envd: httpx.Client, path: object, content: bytes = b"x") -> httpx.Response:
    kind = {"Content-Type": "application/octet-stream"}
    return envd.post("/files", params={"path": str(path)}, content=content, headers=kind)


def test_an_error_names_the_path_that_it_is_about(envd: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for method in ("Stat", "ListDir", "CreateWatcher", "MakeDir"):
        for path in (tmp_path / "none", tmp_path / "file" / "below"):
            if (method, path.name) == ("MakeDir", "none"):
                continue
            status, body = asked(envd, method, {"path": str(path)})
            assert status in (400, 404)
            assert str(path) in body["message"]
    names = {"source": str(tmp_path / "none"), "destination": str(tmp_path / "other")}
    assert str(tmp_path / "none") in asked(envd, "Move", names)[1]["message"]
    below = put(envd, tmp_path / "file" / "below")
    assert below.status_code == 400
    assert str(tmp_path / "file" / "below") in below.json()["message"]
    assert "is a directory" not in below.json()["message"]
    assert "is a directory" in put(envd, tmp_path).json()["message"]


def events(envd: httpx.Client, watcher: str, number: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    end = time.monotonic() + 10
    while len(found) < number and time.monotonic() < end:
        told = envd.post("/filesystem.Filesystem/GetWatcherEvents", json={"watcherId": watcher}).json()
        found += [(one["name"], one["type"].removeprefix("EVENT_TYPE_")) for one in told.get("events", [])]
        time.sleep(0.05)
    return found


def test_a_file_that_is_written_over_was_there_before(envd: httpx.Client, tmp_path: Path) -> None:
    put(envd, tmp_path / "old")
    watcher = asked(envd, "CreateWatcher", {"path": str(tmp_path)})[1]["watcherId"]
    put(envd, tmp_path / "old")
    assert events(envd, watcher, 2) == [("old", "CHMOD"), ("old", "WRITE")]
    put(envd, tmp_path / "new")
    assert events(envd, watcher, 3) == [("new", "CREATE"), ("new", "CHMOD"), ("new", "WRITE")]
    (tmp_path / "old").unlink()
    put(envd, tmp_path / "old")
    assert events(envd, watcher, 4)[1:] == [("old", "CREATE"), ("old", "CHMOD"), ("old", "WRITE")]
    assert asked(envd, "RemoveWatcher", {"watcherId": watcher})[0] == 200


def test_files_are_put_together_and_gone(envd: httpx.Client, tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).write_text(name)
    wanted = {"source_paths": [str(tmp_path / "1"), str(tmp_path / "2")], "destination": str(tmp_path / "both")}
    answer = envd.post("/files/compose", json=wanted)
    assert (answer.status_code, answer.json()["path"]) == (200, str(tmp_path / "both"))
    assert (tmp_path / "both").read_text() == "12"
    assert [one.name for one in tmp_path.iterdir()] == ["both"]
    assert envd.post("/files/compose", json=wanted).status_code == 404
    assert envd.post("/files/compose", json={**wanted, "username": "ghost"}).json()["message"] == GHOST
    both = {"source_paths": [str(tmp_path / "both")], "destination": str(tmp_path / "both")}
    assert envd.post("/files/compose", json=both).status_code == 400
    assert (tmp_path / "both").read_text() == "12"


def test_a_head_says_how_long_a_file_is(envd: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "five").write_text("12345")
    answer = envd.head("/files", params={"path": str(tmp_path / "five")})
    assert (answer.status_code, answer.headers["content-length"]) == (200, "5")
    assert envd.head("/files", params={"path": str(tmp_path / "none")}).status_code == 404


def test_a_page_of_anywhere_may_use_what_it_was_given(envd: httpx.Client, tmp_path: Path) -> None:
    origin = {"Origin": "https://example.com"}
    asks = {**origin, "Access-Control-Request-Method": "POST", "X-Access-Token": ""}
    before = envd.options("/files", params={"path": str(tmp_path / "x")}, headers=asks)
    assert before.status_code == 204
    for answer in (before, envd.get("/files", params={"path": str(tmp_path / "none")}, headers=origin)):
        assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in envd.get("/envs").headers


# ── code ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_code_may_be_long(daemon: Daemon, api: httpx.Client) -> None:
    with envd_of(daemon, made(api), 49999) as code:
        answer = code.post("/execute", json={"code": ": " + "a" * 2_000_000, "language": "bash"})
        assert answer.status_code == 200, answer.text
        assert code.post("/execute", content=b" " * 2**24 + b"{}").status_code == 413
