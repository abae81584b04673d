"""Files, watches, signed URLs."""

from __future__ import annotations

from typing import Any

from registry import Yard, call, expect, until


@call("files.write")
def _(y: Yard) -> None:
    written = y.sbx.files.write(y.path("new/dir/a.txt"), "some text")
    assert (written.name, written.path) == ("a.txt", y.path("new/dir/a.txt"))
    y.sbx.files.write(y.path("b.bin"), bytes(range(256)))


@call("files.read")
def _(y: Yard) -> None:
    assert y.sbx.files.read(y.path("new/dir/a.txt")) == "some text"


@call("files.read: bytes")
def _(y: Yard) -> None:
    assert bytes(y.sbx.files.read(y.path("b.bin"), format="bytes")) == bytes(range(256))


@call("files.read: stream")
def _(y: Yard) -> None:
    y.sbx.files.write(y.path("big.bin"), b"0123456789" * 100_000)
    assert b"".join(y.sbx.files.read(y.path("big.bin"), format="stream")) == b"0123456789" * 100_000


@call("files.read: gzip", "2.24")
def _(y: Yard) -> None:
    assert y.sbx.files.read(y.path("new/dir/a.txt"), gzip=True) == "some text"


@call("files.read: missing")
def _(y: Yard) -> None:
    expect(y.e2b.NotFoundException, lambda: y.sbx.files.read(y.path("nothing")))


@call("files.read: directory")
def _(y: Yard) -> None:
    expect(y.e2b.InvalidArgumentException, lambda: y.sbx.files.read(y.dir))


@call("files.write: relative path")
def _(y: Yard) -> None:
    written = y.sbx.files.write(f"../..{y.dir}/relative.txt", "x")
    assert written.path == y.path("relative.txt")


@call("files.write: gzip", "2.63")
def _(y: Yard) -> None:
    y.sbx.files.write(y.path("packed.txt"), "packed " * 1000, gzip=True)
    assert y.sbx.files.read(y.path("packed.txt")) == "packed " * 1000


@call("files.write: stream", "2.63")
def _(y: Yard) -> None:
    y.sbx.files.write(y.path("streamed.txt"), iter([b"one ", b"two"]))
    assert y.sbx.files.read(y.path("streamed.txt")) == "one two"


@call("files.write_files")
def _(y: Yard) -> None:
    files = [{"path": y.path(f"many/{n}.txt"), "data": str(n)} for n in range(3)]
    write = y.sbx.files.write_files if hasattr(y.sbx.files, "write_files") else y.sbx.files.write
    assert [one.name for one in write(files)] == ["0.txt", "1.txt", "2.txt"]
    assert y.sbx.files.read(y.path("many/2.txt")) == "2"


@call("files.list")
def _(y: Yard) -> None:
    found = y.sbx.files.list(y.path("many"))
    assert [one.name for one in found] == ["0.txt", "1.txt", "2.txt"]
    assert found[0].path == y.path("many/0.txt")


@call("files.list: depth")
def _(y: Yard) -> None:
    found = [one.path for one in y.sbx.files.list(y.path("new"), depth=2)]
    assert found == [y.path("new/dir"), y.path("new/dir/a.txt")]


@call("files.list: missing, not a directory")
def _(y: Yard) -> None:
    expect(y.e2b.NotFoundException, lambda: y.sbx.files.list(y.path("nothing")))
    expect(y.e2b.InvalidArgumentException, lambda: y.sbx.files.list(y.path("b.bin")))


@call("files.exists")
def _(y: Yard) -> None:
    assert y.sbx.files.exists(y.path("b.bin")) is True
    assert y.sbx.files.exists(y.path("nothing")) is False


@call("files.get_info")
def _(y: Yard) -> None:
    info = y.sbx.files.get_info(y.path("b.bin"))
    assert (info.name, info.size, info.mode, info.permissions) == ("b.bin", 256, 0o644, "-rw-r--r--")
    assert info.owner
    assert info.group
    assert info.modified_time.year > 2020


@call("files.get_info: symlink")
def _(y: Yard) -> None:
    y.sbx.commands.run(f"ln -s b.bin {y.path('link')}")
    assert y.sbx.files.get_info(y.path("link")).symlink_target == y.path("b.bin")


@call("files.make_dir")
def _(y: Yard) -> None:
    assert y.sbx.files.make_dir(y.path("made/below")) is True
    assert y.sbx.files.make_dir(y.path("made/below")) is False


@call("files.rename")
def _(y: Yard) -> None:
    y.sbx.files.write(y.path("old.txt"), "x")
    assert y.sbx.files.rename(y.path("old.txt"), y.path("made/new.txt")).path == y.path("made/new.txt")
    expect(y.e2b.NotFoundException, lambda: y.sbx.files.rename(y.path("old.txt"), y.path("z")))


@call("files.remove")
def _(y: Yard) -> None:
    y.sbx.files.remove(y.path("made"))
    assert not y.sbx.files.exists(y.path("made"))
    y.sbx.files.remove(y.path("made"))


@call("files.watch_dir, watch.get_new_events, watch.stop")
def _(y: Yard) -> None:
    y.sbx.files.make_dir(y.path("watched"))
    watch = y.sbx.files.watch_dir(y.path("watched"))
    y.sbx.files.write(y.path("watched/seen.txt"), "x")
    events: list[Any] = []
    until(lambda: events.extend(watch.get_new_events()) or len(events) >= 3)
    assert [(one.name, one.type.value) for one in events] == [
        ("seen.txt", "create"),
        ("seen.txt", "chmod"),
        ("seen.txt", "write"),
    ]
    watch.stop()
    expect(Exception, watch.get_new_events)


@call("files.watch_dir: recursive")
def _(y: Yard) -> None:
    y.sbx.files.make_dir(y.path("tree/below"))
    watch = y.sbx.files.watch_dir(y.path("tree"), recursive=True)
    y.sbx.commands.run(f"touch {y.path('tree/below/deep.txt')}; rm {y.path('tree/below/deep.txt')}")
    events: list[Any] = []
    until(lambda: events.extend(watch.get_new_events()) or "remove" in [one.type.value for one in events])
    assert events[0].name == "below/deep.txt"
    watch.stop()


@call("files.watch_dir: missing")
def _(y: Yard) -> None:
    expect(y.e2b.NotFoundException, lambda: y.sbx.files.watch_dir(y.path("nothing")))


@call("sandbox.download_url")
def _(y: Yard) -> None:
    import httpx

    url = y.sbx.download_url(y.path("b.bin"), use_signature_expiration=60)
    assert httpx.get(url).content == bytes(range(256))
    assert httpx.get(url.replace("signature=v1_", "signature=v1_x")).status_code == 401


@call("sandbox.download_url: expired")
def _(y: Yard) -> None:
    import httpx

    answer = httpx.get(y.sbx.download_url(y.path("b.bin"), use_signature_expiration=-10))
    assert (answer.status_code, answer.json()) == (401, {"code": 401, "message": "signature is already expired"})


@call("sandbox.upload_url")
def _(y: Yard) -> None:
    import httpx

    answer = httpx.post(y.sbx.upload_url(y.path("up.txt")), files={"file": ("up.txt", b"sent up")})
    assert answer.status_code == 200, answer.text
    assert y.sbx.files.read(y.path("up.txt")) == "sent up"
