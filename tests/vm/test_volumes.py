"""Volumes in real machines: who writes, who has a copy, and that nothing is lost on the way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox, Spec, Volume
from forkyard.errors import (
    BuildFailed,
    FileConflict,
    FileMissing,
    GuestDiskFull,
    GuestFailure,
    InvalidPath,
    VolumeChanged,
    VolumeInUse,
)
from forkyard.storage.disks import chain

from .conftest import Daemon


@pytest.fixture
def volume(fy: Forkyard) -> Iterator[str]:
    name = fy.volumes.create("data", size_mib=256).name
    yield name
    for sandbox in fy.sandboxes.list(all=True):
        if sandbox.info.state != "deleted":
            sandbox.delete()
    for snapshot in fy.snapshots.list():
        snapshot.delete()
    fy.volumes.delete(name)


def out(sandbox: Sandbox, command: str) -> str:
    return sandbox.exec(command, check=True).stdout.strip()


def until(true: Callable[[], object], within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_one_sandbox_writes_the_next_one_finds(fy: Forkyard, volume: str) -> None:
    with fy.sandboxes.create(volumes={"/data": volume}) as one:
        assert out(one, "findmnt -no FSTYPE /data; ls /data") == "ext4"
        one.exec("echo kept > /data/a; mkdir /data/d; head -c 5000000 /dev/zero > /data/d/big", check=True)
        with pytest.raises(VolumeInUse, match=one.id):
            fy.sandboxes.create(volumes={"/data": volume})
        with pytest.raises(VolumeInUse, match=one.id):
            fy.volumes.delete(volume)
    with fy.sandboxes.create(volumes={"/mnt/other": Volume(volume, mode="ro")}) as two:
        assert out(two, "cat /mnt/other/a; stat -c %s /mnt/other/d/big") == "kept\n5000000"
        assert two.exec("touch /mnt/other/x").exit_code != 0


def test_copies_are_private_forks_have_their_own_and_a_commit_makes_a_version(fy: Forkyard, volume: str) -> None:
    fy.volumes.write(volume, "/a", "first\n")
    cow = {"/data": Volume(volume, mode="cow")}
    one, two = fy.sandboxes.create(volumes=cow), fy.sandboxes.create(volumes=cow)
    one.exec("echo one >> /data/a", check=True)
    (child,) = one.fork()
    one.exec("echo parent >> /data/a", check=True)
    child.exec("echo child >> /data/a", check=True)
    assert out(one, "cat /data/a") == "first\none\nparent"
    assert out(child, "cat /data/a") == "first\none\nchild"
    assert out(two, "cat /data/a") == "first"
    before = fy.volumes.get(volume).version
    made = fy.volumes.commit(volume, child.id)
    assert made.version == before + 1
    assert made.source == child.id
    with pytest.raises(VolumeChanged, match=f"version {made.version}"):
        fy.volumes.commit(volume, two.id)
    child.exec("echo again >> /data/a", check=True)
    assert fy.volumes.commit(volume, child.id).version == made.version + 1, "its copy is of the newest version now"
    assert fy.volumes.read_bytes(volume, "/a") == b"first\none\nchild\nagain\n"
    assert fy.volumes.read_bytes(volume, "/a", version=made.version) == b"first\none\nchild\n"


def test_what_a_commit_and_a_delete_leave_needs_no_repair_and_writers_go_on(fy: Forkyard, volume: str) -> None:
    def repaired(sandbox: Sandbox) -> str:
        drive = out(sandbox, "findmnt -no SOURCE /data | xargs basename")
        return out(sandbox, f"dmesg | grep '({drive})' | grep -c recover || true")

    with fy.sandboxes.create(volumes={"/data": volume}) as writer:
        writer.spawn("i=0; while i=$((i+1)); do echo $i >> /data/log; cp /data/log /data/copy; done", user="root")
        until(lambda: writer.files.exists("/data/copy"))
        version = fy.volumes.commit(volume, writer.id).version
        counted = int(out(writer, "tail -n 1 /data/log"))
        until(lambda: int(out(writer, "tail -n 1 /data/log")) > counted)
    with fy.sandboxes.create(volumes={"/data": Volume(volume, mode="ro", version=version)}) as committed:
        assert repaired(committed) == "0"
        assert 0 < int(out(committed, "tail -n 1 /data/log")) <= counted
    with fy.sandboxes.create(volumes={"/data": volume}) as left:
        assert repaired(left) == "0"
        assert int(out(left, "tail -n 1 /data/log")) > counted
        out(left, "echo below > /data/a; mount -t tmpfs none /data; echo above > /data/a")
    assert fy.volumes.read_bytes(volume, "/a") == b"below\n"


def test_what_is_mounted_again_and_again_is_mounted_already(fy: Forkyard, daemon: Daemon, volume: str) -> None:
    fy.volumes.write(volume, "/a", "first\n")
    cow = {"/data": Volume(volume, mode="cow")}
    for _ in range(2):
        fy.sandboxes.create(volumes=cow).delete()
    until(lambda: [*daemon.settings.ram_dir.glob("kept-*.layer")] and not [*(daemon.root / "vms").iterdir()])
    one, two = fy.sandboxes.create(volumes=cow), fy.sandboxes.create(volumes=cow)
    for path in (daemon.root / "vms").glob("*/journal.json"):
        assert chain(Path(json.loads(path.read_text())["disk"]))[1].parent == daemon.root / "disks", (
            "made from what was kept"
        )
    one.exec("echo one >> /data/a", check=True)
    two.exec("echo two >> /data/a; echo $$ > /root/own", check=True)
    assert (out(one, "cat /data/a"), out(two, "cat /data/a")) == ("first\none", "first\ntwo")
    assert [out(sbx, "hostname; ls /root") for sbx in (one, two)] == [one.id, f"{two.id}\nown"]
    assert out(one, "cat /etc/machine-id") != out(two, "cat /etc/machine-id")
    two.pause(durable=True)
    assert out(two, "cat /data/a") == "first\ntwo"
    writer = fy.sandboxes.create(volumes={"/data": volume})
    writer.exec("echo writer >> /data/a", check=True)
    writer.delete()
    assert not [*daemon.settings.ram_dir.glob("kept-*.layer")], "there is a newer version"
    assert fy.volumes.read_bytes(volume, "/a") == b"first\nwriter\n"
    with pytest.raises(VolumeChanged):
        fy.volumes.commit(volume, one.id)
    fy.volumes.commit(volume, one.id, force=True)
    assert fy.volumes.read_bytes(volume, "/a") == b"first\none\n"


def test_a_volume_goes_with_its_sandbox_through_sleep_snapshot_rollback_and_boot(fy: Forkyard, volume: str) -> None:
    sbx = fy.sandboxes.create(volumes={"/data": volume}, env={"FORKYARD_WORKDIR": "/data", "FORKYARD_USER": "user"})
    sbx.exec("echo 1 > /data/n; (sleep 1000 > /data/open) & echo $! > /data/pid", check=True)
    sbx.pause(durable=True)
    assert out(sbx, "cat /data/n; kill -0 $(cat /data/pid) && echo alive") == "1\nalive", "cold, and awake again"
    snapshot = sbx.snapshot()
    sbx.exec("echo 2 > /data/n", check=True)
    copy = fy.sandboxes.create(snapshot=snapshot)
    assert copy.info.volumes[0].mode == "cow"
    copy.exec("echo copy > /data/n", check=True)
    assert out(sbx, "cat /data/n") == "2"
    sbx.rollback(snapshot)
    assert out(sbx, "cat /data/n") == "1", "the volume is part of what is rolled back"
    sbx.exec("echo 3 > /data/n", check=True)
    sbx.stop()
    sbx.start()
    assert out(sbx, "cat /data/n; findmnt -no TARGET /data; pwd; id -un") == "3\n/data\n/data\nuser"
    sbx.delete()
    assert fy.volumes.read_bytes(volume, "/n") == b"3\n"


def test_files_of_a_volume_without_a_sandbox(fy: Forkyard, volume: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "a.txt").write_text("a")
    (tree / "below" / "b.bin").write_bytes(bytes(range(256)) * 100)
    fy.volumes.upload(volume, tree, "/in")
    assert sorted(info.path for info in fy.volumes.files(volume, "/", depth=3)) == [
        "/in",
        "/in/a.txt",
        "/in/below",
        "/in/below/b.bin",
    ]
    fy.volumes.download(volume, "/in", tmp_path / "back")
    assert (tmp_path / "back" / "below" / "b.bin").read_bytes() == (tree / "below" / "b.bin").read_bytes()
    assert fy.volumes.files(volume, "/../in/below") == fy.volumes.files(volume, "/in/below"), (
        "nothing is above its root"
    )


def test_an_upload_that_fails_leaves_the_volume_as_it_was(fy: Forkyard, volume: str, tmp_path: Path) -> None:
    fy.volumes.write(volume, "/keep.txt", "kept")
    before = fy.volumes.get(volume)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "keep.txt").write_text("replaced")
    with (tree / "big").open("wb") as big:
        for _ in range(300):
            big.write(os.urandom(2**20))
    with pytest.raises(GuestDiskFull):
        fy.volumes.upload(volume, tree)
    assert [info.path for info in fy.volumes.files(volume)] == ["/keep.txt"]
    assert fy.volumes.read_bytes(volume, "/keep.txt") == b"kept"
    after = fy.volumes.get(volume)
    assert (after.version, after.writer, after.stored_bytes) == (before.version, None, before.stored_bytes)


def test_no_link_leads_out_of_a_volume_and_messages_speak_of_its_paths(
    fy: Forkyard, volume: str, tmp_path: Path
) -> None:
    with fy.sandboxes.create(volumes={"/data": volume}) as sandbox:
        sandbox.exec("cd /data; mkdir -p 'in here'; echo x > a; ln -s ../a 'in here/good'; ln -s /etc bad", check=True)
    before = fy.volumes.get(volume).version
    for fails in (
        lambda: fy.volumes.write(volume, "/bad/passwd", "lost"),
        lambda: fy.volumes.read_bytes(volume, "/bad/passwd"),
        lambda: fy.volumes.files(volume, "/bad"),
        lambda: fy.volumes.upload(volume, tmp_path, "/bad"),
        lambda: fy.volumes.remove(volume, "/bad/passwd"),
    ):
        with pytest.raises(InvalidPath, match=r"^/bad(/passwd)?: leads out of the volume, for /bad is a link to /etc$"):
            fails()
    with pytest.raises(FileMissing, match=r"^/nothing: there is no such file or directory in the volume$"):
        fy.volumes.download(volume, "/nothing", tmp_path / "x")
    with pytest.raises(FileConflict, match=r"^/in here: is a directory$"):
        fy.volumes.read_bytes(volume, "/in here")
    assert fy.volumes.get(volume).version == before
    assert fy.volumes.write(volume, "/in here/good", "y").path == "/a"
    assert fy.volumes.read_bytes(volume, "/a") == b"y"
    fy.volumes.remove(volume, "/bad")
    assert sorted(info.path for info in fy.volumes.files(volume)) == ["/a", "/in here"]


def test_a_file_system_that_a_guest_has_ruined_hurts_nobody_but_its_volume(fy: Forkyard, volume: str) -> None:
    fy.volumes.write(volume, "/a", "good")
    good = fy.volumes.snapshot(volume).version
    with fy.sandboxes.create(volumes={"/data": volume}) as evil:
        evil.exec("umount /data; head -c 2000000 /dev/urandom > /dev/vdb; sync", check=True)
    with pytest.raises(GuestFailure, match="was not mounted at /data"):
        fy.sandboxes.create(volumes={"/data": volume})
    assert fy.volumes.get(volume).writer is None, "a create that failed holds nothing"
    assert fy.volumes.read_bytes(volume, "/a", version=good) == b"good"


def test_a_cache_is_filled_by_a_commit_and_then_nothing_is_downloaded(fy: Forkyard) -> None:
    quiet = "--prefer-offline --no-audit --no-fund --no-update-notifier"
    install = f"mkdir -p /tmp/app && cd /tmp/app && npm install {quiet} is-odd@3.0.1"
    try:
        with fy.sandboxes.create(cache=["npm"]) as trusted:
            trusted.exec(install, check=True)
            assert trusted.usage().bytes_in > 0
            fy.volumes.commit("cache-npm", trusted.id)
        one, two = (fy.sandboxes.create(cache=["npm"]) for _ in range(2))
        one.exec(f"touch $npm_config_cache/mine; {install}", check=True)
        assert (one.usage().bytes_in, one.egress.list()) == (0, []), "all of it was there"
        assert two.exec("test -e $npm_config_cache/mine").exit_code == 1, "what one writes the other does not see"
        one.delete(), two.delete()
    finally:
        fy.volumes.delete("cache-npm")


#: An index with one package, whose answers may be kept: not every mirror says so of its own.
INDEX = """
import http.server, os, zipfile

os.makedirs("/srv/index/probe")
with zipfile.ZipFile("/srv/index/probe/probe-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("probe.py", "")
    wheel.writestr("probe-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: probe\\nVersion: 1.0\\n")
    wheel.writestr("probe-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("probe-1.0.dist-info/RECORD", "")

class Handler(http.server.SimpleHTTPRequestHandler):
    def end_headers(self):
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()

os.chdir("/srv/index")
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.mark.parametrize("first", ["root", "user"])
def test_a_cache_that_one_user_has_filled_serves_the_other_too(fy: Forkyard, first: str) -> None:
    second = "user" if first == "root" else "root"
    pip = "pip download --no-deps -d $(mktemp -d) -i http://127.0.0.1:8000 --trusted-host 127.0.0.1 probe"
    npm = "mkdir -p $HOME/app && cd $HOME/app && npm install --no-audit --no-fund --no-update-notifier --prefer-offline"

    def has_pip_cached(sandbox: Sandbox, user: str) -> bool:
        if not sandbox.files.exists("/srv/index.py"):
            sandbox.files.write("/srv/index.py", INDEX)
            sandbox.spawn("python3 /srv/index.py")
            sandbox.exec("until (: < /dev/tcp/127.0.0.1/8000) 2> /dev/null; do sleep 0.1; done", check=True)
        said = sandbox.exec(f"umask 077; {pip} 2>&1", user=user, check=True).stdout
        assert "cache has been disabled" not in said
        return "Using cached http://127.0.0.1" in said

    try:
        with fy.sandboxes.create(cache=["pip", "npm"]) as trusted:
            assert not has_pip_cached(trusted, first)
            assert has_pip_cached(trusted, first)
            trusted.exec(f"umask 077; {npm} is-odd@3.0.1", user=first, check=True)
            trusted.exec(f"umask 077; {npm} is-even@1.0.0", user=second, check=True)  # nothing is committed yet
            for kind in ("pip", "npm"):
                fy.volumes.commit(f"cache-{kind}", trusted.id)
        with fy.sandboxes.create(cache=["pip", "npm"], network="none") as other:
            assert has_pip_cached(other, second)
            other.exec(f"{npm} is-odd@3.0.1 is-even@1.0.0", user=second, check=True)
            other.exec(f"{npm} is-even@1.0.0", user=first, check=True)
    finally:
        for kind in ("pip", "npm"):
            fy.volumes.delete(f"cache-{kind}")


def test_a_layer_with_a_secret_in_its_files_or_its_memory_is_refused(fy: Forkyard) -> None:
    value = "s3cr3t-that-must-not-be-in-a-layer"
    fy.secrets.set("LAYER_SECRET", value)
    halves = f"a={value[:17]}; b={value[17:]}"
    in_memory = f"{halves}; X=$a$b nohup sleep 1000 > /dev/null 2>&1 &"
    try:
        for step in (f"{halves}; echo $a$b > /root/.netrc; sync", in_memory):
            with pytest.raises(BuildFailed, match="the value of the secret LAYER_SECRET"):
                fy.builds.create(Spec().run(step)).wait()
        assert fy.builds.create(Spec().run("true")).wait().snapshot_id is not None
    finally:
        fy.secrets.delete("LAYER_SECRET")
        for build in fy.builds.list():
            build.delete()
        fy.builds.prune()
        for snapshot in fy.snapshots.list():
            snapshot.delete()
