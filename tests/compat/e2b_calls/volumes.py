"""Volumes in sandboxes, and their files without one."""

from __future__ import annotations

import time

from registry import Yard, call, expect

_PNG = bytes(range(256)) * 1024


@call("Sandbox.create: volume_mounts", "2.63")
def _(y: Yard) -> None:
    y.volume = y.e2b.Volume.create(f"v{time.time_ns()}")
    with y.e2b.Sandbox.create(timeout=300, volume_mounts={"/data": y.volume}) as made:
        made.commands.run(
            "mkdir /data/below && echo kept > /data/below/a.txt && ln -s a.txt /data/below/link", user="root"
        )


@call("volume.list, get_info, exists", "2.63")
def _(y: Yard) -> None:
    names = [one.name for one in y.volume.list("/")]
    assert "below" in names, names
    found = {one.path: one.type.value for one in y.volume.list("/", depth=2)}
    assert (found["/below"], found["/below/a.txt"], found["/below/link"]) == ("directory", "file", "symlink")
    info = y.volume.get_info("/below/a.txt")
    assert (info.name, info.path, info.size, info.uid) == ("a.txt", "/below/a.txt", 5, 0)
    assert y.volume.exists("/below") is True
    assert y.volume.exists("/nothing") is False
    expect(y.e2b.NotFoundException, lambda: y.volume.list("/nothing"))


@call("volume.write_file, read_file", "2.63")
def _(y: Yard) -> None:
    written = y.volume.write_file("/new/deep/b.bin", _PNG, uid=1000, gid=1000, mode=0o640)
    assert (written.path, written.size, written.mode, written.uid) == ("/new/deep/b.bin", len(_PNG), 0o640, 1000)
    assert y.volume.read_file("/new/deep/b.bin", format="bytes") == _PNG
    assert b"".join(y.volume.read_file("/new/deep/b.bin", format="stream")) == _PNG
    assert y.volume.read_file("/below/a.txt") == "kept\n"
    expect(y.e2b.NotFoundException, lambda: y.volume.read_file("/nothing"))


@call("volume.make_dir, update_metadata, remove", "2.63")
def _(y: Yard) -> None:
    assert y.volume.make_dir("/made", mode=0o700).mode == 0o700
    expect(y.e2b.NotFoundException, lambda: y.volume.make_dir("/no/parents"))
    assert y.volume.make_dir("/with/parents", force=True).type.value == "directory"
    changed = y.volume.update_metadata("/made", uid=1000, gid=1000, mode=0o755)
    assert (changed.uid, changed.gid, changed.mode) == (1000, 1000, 0o755)
    y.volume.remove("/made")
    assert y.volume.exists("/made") is False
    expect(y.e2b.NotFoundException, lambda: y.volume.remove("/made"))


@call("AsyncVolume: write_file, read_file, list", "2.63")
def _(y: Yard) -> None:
    async def main() -> None:
        volume = await y.e2b.AsyncVolume.connect(y.volume.volume_id)
        await volume.write_file("/async.txt", "x")
        assert await volume.read_file("/async.txt") == "x"
        assert "async.txt" in [one.name for one in await volume.list("/")]

    y.loop.run_until_complete(main())


@call("Volume.destroy: with files", "2.63")
def _(y: Yard) -> None:
    with y.e2b.Sandbox.create(timeout=300, volume_mounts={"/data": y.volume}) as made:
        assert made.files.read("/data/async.txt") == "x"
    assert y.e2b.Volume.destroy(y.volume.volume_id) is True
