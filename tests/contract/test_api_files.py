"""Files through the API: any bytes, any size, any name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import quote_from_bytes

import httpx
import pytest

from forkyard.errors import GuestDiskFull, GuestUnreachable
from forkyard.models import FileInfo, Page, WatchEvent

from .conftest import JSON, World, as_json

pytestmark = pytest.mark.anyio


@pytest.fixture
async def at(world: World) -> str:
    return f"/sandboxes/{await world.sandbox()}/files"


async def test_a_file_is_written_read_described_and_removed(world: World, at: str) -> None:
    content = bytes(range(256)) * 100
    written = await world.client.put(f"{at}?path=/a.bin&mode=600", content=content)
    assert FileInfo.model_validate(written.json()).size == len(content)
    read = await world.client.get(f"{at}?path=/a.bin")
    assert (read.content, read.headers["content-type"]) == (content, "application/octet-stream")
    assert (await world.client.get(f"{at}?path=/a.bin&offset=10&length=5")).content == content[10:15]
    assert (await world.client.get(f"{at}/stat?path=/a.bin")).json()["path"] == "/a.bin"
    assert (await world.client.get(f"{at}/exists?path=/a.bin")).json() == {"exists": True}
    listed = Page[FileInfo].model_validate((await world.client.get(f"{at}/list?path=/")).json())
    assert "/a.bin" in [info.path for info in listed.items]
    assert (await world.client.delete(f"{at}?path=/a.bin")).status_code == 204
    assert (await world.client.get(f"{at}/exists?path=/a.bin")).json() == {"exists": False}


async def test_directories_moves_and_modes(world: World, at: str) -> None:
    answers = [
        await world.client.post(f"{at}/mkdir", json={"path": "/d"}),
        await world.client.put(f"{at}?path=/d/a", content=b"1"),
        await world.client.post(f"{at}/move", json={"source": "/d/a", "destination": "/d/b"}),
        await world.client.post(f"{at}/chmod", json={"path": "/d/b", "mode": 0o700}),
        await world.client.put(f"{at}?path=/d/b&append=true", content=b"2"),
    ]
    assert [answer.status_code for answer in answers] == [204, 200, 204, 204, 200]
    assert (await world.client.get(f"{at}?path=/d/b")).content == b"12"


@pytest.mark.parametrize("path", ["/missing", "/missing/deeper"])
async def test_a_missing_file_is_an_ordinary_error_before_the_first_byte(world: World, at: str, path: str) -> None:
    for route in ("", "/stat", "/watch"):
        answer = await world.client.get(f"{at}{route}", params={"path": path})
        assert (answer.status_code, answer.json()["code"]) == (404, "file_missing"), route


async def test_a_directory_where_a_file_is_meant_is_a_conflict(world: World, at: str) -> None:
    await world.client.post(f"{at}/mkdir", json={"path": "/d"})
    for answer in (await world.client.get(f"{at}?path=/d"), await world.client.put(f"{at}?path=/d", content=b"x")):
        assert (answer.status_code, answer.json()["code"]) == (409, "file_conflict")


@pytest.mark.parametrize("path", ["", "%00", "/a%00b", "/" + "x" * 4096])
@pytest.mark.parametrize(
    ("method", "route"),
    [("GET", ""), ("PUT", ""), ("DELETE", ""), ("GET", "/stat"), ("GET", "/list"), ("GET", "/watch"), ("GET", "/tar")],
)
async def test_a_path_no_file_can_have_is_refused(world: World, at: str, method: str, route: str, path: str) -> None:
    answer = await world.client.request(method, f"{at}{route}?path={path}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_path")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("mkdir", {"path": ""}),
        ("mkdir", {"path": "/a\0"}),
        ("mkdir", {"path": "/\ud800"}),
        ("move", {"source": "/a", "destination": ""}),
        ("move", {"source": "\0", "destination": "/b"}),
        ("chmod", {"path": "x" * 5000, "mode": 0}),
    ],
)
async def test_a_path_in_json_is_checked_too(world: World, at: str, route: str, body: dict[str, object]) -> None:
    answer = await world.client.post(f"{at}/{route}", content=as_json(body), headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_path")


async def test_a_missing_path_names_the_parameter(world: World, at: str) -> None:
    answer = await world.client.get(at)
    assert answer.status_code == 422
    assert "query.path" in answer.json()["detail"]


@pytest.mark.parametrize("mode", ["8", "99999", "rw", "-1", ""])
async def test_a_mode_that_is_not_octal_is_refused(world: World, at: str, mode: str) -> None:
    assert (await world.client.put(f"{at}?path=/a&mode={mode}", content=b"")).status_code == 422


@pytest.mark.parametrize("name", [b"/caf\xe9", b"/\xff\xfe", b"/a b+c&d=e%41#?", "/Ω漢字".encode(), b"/\xed\xa0\x80"])
async def test_a_name_of_any_bytes_survives_the_round_trip(world: World, at: str, name: bytes) -> None:
    encoded = quote_from_bytes(name, safe="")
    written = await world.client.put(f"{at}?path={encoded}", content=b"x")
    assert written.status_code == 200, written.text
    [listed] = [info for info in (await world.client.get(f"{at}/list?path=/")).json()["items"] if info["size"] == 1]
    assert listed["path"] == written.json()["path"]
    shown = listed["path"]
    # What a client was shown, it can give back: in a query, and in JSON.
    in_query = quote_from_bytes(shown.encode("utf-8", "surrogateescape"), safe="")
    assert (await world.client.get(f"{at}?path={in_query}")).content == b"x"
    moved = await world.client.post(
        f"{at}/move", content=as_json({"source": shown, "destination": "/plain"}), headers=JSON
    )
    assert moved.status_code == 204, moved.text
    assert (await world.client.get(f"{at}/exists?path={encoded}")).json() == {"exists": False}


async def test_a_large_upload_streams(world: World, at: str, served: httpx.AsyncClient) -> None:
    piece = bytes(65536)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield piece

    written = await served.put(f"{at}?path=/large", content=pieces())
    assert written.json()["size"] == 64 * len(piece)
    assert len((await served.get(f"{at}?path=/large")).content) == 64 * len(piece)


async def test_an_upload_cut_off_in_the_middle_changes_nothing(
    world: World, at: str, served: httpx.AsyncClient
) -> None:
    await world.client.put(f"{at}?path=/a", content=b"old")

    async def pieces() -> AsyncIterator[bytes]:
        yield b"half of the new"
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        await served.put(f"{at}?path=/a", content=pieces())
    assert (await served.get(f"{at}?path=/a")).content == b"old"


async def test_an_upload_that_stands_still_is_given_up(
    world: World, at: str, served: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkyard.api.inputs.UPLOAD_IDLE_S", 0.05)
    stuck = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"some"
        await stuck.wait()

    async def release() -> None:
        await asyncio.sleep(1.5)  # long after the server gave up, also on a busy machine
        stuck.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(release())
        answer = await served.put(f"{at}?path=/a", content=pieces())
    assert (answer.status_code, answer.json()["code"]) == (504, "timeout")
    assert (await served.get(f"{at}/exists?path=/a")).json() == {"exists": False}


async def test_a_full_disk_is_told(world: World, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*args: object, **options: object) -> None:
        raise GuestDiskFull("no space left on the sandbox's disk")

    monkeypatch.setattr(world.guests[-1], "write_file", full)
    answer = await world.client.put(f"{at}?path=/a", content=b"x")
    assert (answer.status_code, answer.json()["code"]) == (507, "guest_disk_full")


async def test_a_download_that_breaks_does_not_look_whole(world: World, at: str, served: httpx.AsyncClient) -> None:
    world.guests[-1].script("/broken").feed(b"first half", GuestUnreachable("gone"))
    with pytest.raises(httpx.RemoteProtocolError):
        await served.get(f"{at}?path=/broken")


async def test_a_client_that_leaves_a_download_closes_the_file(
    world: World, at: str, served: httpx.AsyncClient
) -> None:
    script = world.guests[-1].script("/endless").feed(b"x" * 1000)
    async with served.stream("GET", f"{at}?path=/endless") as answer:
        await anext(answer.aiter_bytes())
    await asyncio.wait_for(script.detached.wait(), 5)


async def test_a_watch_is_ready_then_tells_changes(world: World, at: str, served: httpx.AsyncClient) -> None:
    script = world.guests[-1].script("/repo")
    async with served.stream("GET", f"{at}/watch?path=/repo&recursive=true") as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines)) == {"type": "ready"}
        script.feed(WatchEvent(type="moved", path="/repo/a", to="/repo/b"))
        assert WatchEvent.model_validate_json(await anext(lines)).to == "/repo/b"
    await asyncio.wait_for(script.detached.wait(), 5)
