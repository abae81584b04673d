"""Images of others: what they come as, that what is wrong with one is told, and that nothing leaves their root."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from forkyard.errors import InvalidImage, NoCapacity
from forkyard.host.cache import Cache
from forkyard.host.images import HostImages
from forkyard.images import oci
from forkyard.images.base import BaseImage, locked
from forkyard.images.foreign import ForeignImages
from forkyard.models.bases import registry_of

Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, data: bytes = b"", **fields: Any) -> Member:
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, data


def tar_of(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config_of(layers: Iterable[bytes], **top: Any) -> bytes:
    rootfs = {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}
    return json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs, **top}).encode()


def saved(layers: list[bytes], **top: Any) -> bytes:
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
    entries = [file(name, layer) for name, layer in zip(names, layers, strict=True)]
    return tar_of(file("c.json", config_of(layers, **top)), *entries, file("manifest.json", manifest))


def layout(layers: list[bytes], *, compress: bool = True, platform: dict[str, str] | None = None, **top: Any) -> bytes:
    blobs = [gzip.compress(layer) if compress else layer for layer in layers]
    config = config_of(layers, **top)
    manifest = json.dumps(
        {"config": {"digest": digest(config)}, "layers": [{"digest": digest(blob)} for blob in blobs]}
    ).encode()
    entry = {"digest": digest(manifest), **({"platform": platform} if platform else {})}
    return layout_of([entry], *blobs, config, manifest)


def layout_of(entries: list[dict[str, Any]], *blobs: bytes) -> bytes:
    index = json.dumps({"manifests": entries}).encode()
    named = [file(f"blobs/sha256/{digest(data)[7:]}", data) for data in blobs]
    return tar_of(file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'), file("index.json", index), *named)


def read(archive: bytes, tmp_path: Path, most_bytes: int = 2**30) -> oci.Contents:
    path = tmp_path / "archive.tar"
    path.write_bytes(archive)
    return oci.read_archive(path, tmp_path / "scratch", most_bytes)


def unpacked(tmp_path: Path, *layers: bytes, most_bytes: int = 2**30, workdir: str = "/") -> dict[str, Any]:
    root = tmp_path / "root"
    root.mkdir()
    blobs = []
    for number, layer in enumerate(layers):
        (tmp_path / f"layer-{number}").write_bytes(layer)
        blobs.append({"blob": str(tmp_path / f"layer-{number}"), "diff_id": None})
    (tmp_path / "runtime").write_bytes(tar_of(file("opt/forkyard/runtime/x")))
    task = {
        "most_bytes": most_bytes,
        "layers": blobs,
        "runtime": str(tmp_path / "runtime"),
        "files": {"/opt/forkyard/image.json": "{}"},
        "defaults": {"/etc/hosts": "default"},
        "links": {"/sbin/init": "/opt/forkyard/agent/init"},
        "workdir": workdir,
    }
    (tmp_path / "task").write_text(json.dumps(task))
    done = subprocess.run(
        [sys.executable, "-m", "forkyard.images.unpack", str(root), str(tmp_path / "task")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ── what they come as ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("make", [saved, layout])
def test_an_archive_is_read_with_what_it_says_of_itself(make: Any, tmp_path: Path) -> None:
    layer = tar_of(file("a", b"1"))
    config = {
        "Env": ["A=1", "B=x=y"],
        "User": "1000",
        "WorkingDir": "/app",
        "Cmd": ["run"],
        "ExposedPorts": {"80/tcp": {}},
        "Labels": None,
    }
    contents = read(make([layer], config=config), tmp_path)
    assert [one.diff_id for one in contents.layers] == [digest(layer)]
    assert (contents.config.env, contents.config.user, contents.config.workdir) == (
        {"A": "1", "B": "x=y"},
        "1000",
        "/app",
    )
    assert (contents.config.cmd, contents.config.expose) == (["run"], ["80/tcp"])


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (saved([tar_of(file("a", b"x" * 5000))])[:4000], "cut off"),
        (layout([tar_of(file("a", os.urandom(50000)))])[:30000], "cut off"),
        (b"no archive at all", "cut off or no tar"),
        (tar_of(file("readme")), "neither"),
        (saved([], architecture="arm64"), "is for linux/arm64"),
        (saved([], os="windows"), "is for windows/amd64"),
        (layout([], platform={"os": "linux", "architecture": "s390x"}), "is for linux/s390x"),
        (saved([], rootfs={"diff_ids": ["sha256:x"]}), "does not name the layers"),
        (tar_of(file("manifest.json", b'[{"Config": "../../etc/passwd", "Layers": []}]')), "not in the archive"),
        (tar_of(file("manifest.json", b"[]")), "one image"),
        (tar_of(file("manifest.json", b"{no json")), "cannot be read"),
        (tar_of(file("manifest.json", b"[" * 200_000)), "cannot be read"),
        (tar_of(file("oci-layout"), file("index.json", b"\xff")), "cannot be read"),
        (tar_of(file("oci-layout"), file("index.json", b"{}")), "no manifest"),
        (tar_of(file("oci-layout"), file("index.json", b'{"manifests": [{"digest": "sha256:../x"}]}')), "no sha256"),
    ],
)
def test_what_is_no_image_for_this_machine_is_refused(archive: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidImage, match=why):
        read(archive, tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"Env": ["=x"]}, "without a name"),
        ({"Env": ["A=x\0y"]}, "NUL"),
        ({"Cmd": ["x\0"]}, "NUL"),
        ({"User": "\0"}, "NUL"),
        ({"Env": ["A=\ud800"]}, "no text"),
        ({"Env": ["A=" + "x" * 300_000]}, "'A' has more than 131072 bytes"),
        ({"Env": [f"A{number}=" + "x" * 100_000 for number in range(11)]}, "more than 1048576 bytes"),
    ],
)
def test_what_no_command_could_be_given_is_refused(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidImage, match=why):
        read(saved([], config=config), tmp_path)


def manifest_of(layer: bytes) -> tuple[bytes, bytes, bytes]:
    config = config_of([layer])
    made = {"config": {"digest": digest(config)}, "layers": [{"digest": digest(layer)}]}
    return json.dumps(made).encode(), config, layer


def test_an_archive_of_several_images_is_refused_and_one_of_many_names_or_platforms_is_not(tmp_path: Path) -> None:
    first, second = (manifest_of(tar_of(file(name))) for name in "ab")
    one, other = {"digest": digest(first[0])}, {"digest": digest(second[0])}
    amd64, arm64 = ({"os": "linux", "architecture": name} for name in ("amd64", "arm64"))
    attested = {"os": "unknown", "architecture": "unknown"}

    def layers(*entries: dict[str, Any]) -> list[str]:
        return [layer.diff_id for layer in read(layout_of([*entries], *first, *second), tmp_path / "x").layers]

    (tmp_path / "x").mkdir()
    for several in (
        (one, other),
        ({**one, "platform": amd64}, {**other, "platform": amd64}),
        ({**one, "platform": amd64}, other),
    ):
        shutil.rmtree(tmp_path / "x" / "scratch", ignore_errors=True)
        with pytest.raises(InvalidImage, match="must hold one image"):
            layers(*several)
    for single in (
        ({**one, "annotations": {"name": "a"}}, {**one, "annotations": {"name": "b"}}),
        ({**other, "platform": arm64}, {**one, "platform": amd64}),
        ({**one, "platform": amd64}, {**other, "platform": {**amd64, "variant": "v3"}}),
        ({**one, "platform": amd64}, {**other, "platform": attested}),
    ):
        shutil.rmtree(tmp_path / "x" / "scratch", ignore_errors=True)
        assert layers(*single) == [digest(first[2])]


def test_a_blob_that_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    layer = tar_of(file("a", b"as it was"))
    with pytest.raises(InvalidImage, match="not what its name says"):
        read(layout([layer], compress=False).replace(b"as it was", b"not so  !"), tmp_path)


def test_a_layer_that_is_named_many_times_is_written_once(tmp_path: Path) -> None:
    layer = bytes(2**20)
    manifest = json.dumps([{"Config": "c.json", "Layers": ["l", *["again"] * 99]}]).encode()
    archive = tar_of(
        file("c.json", config_of([layer] * 100)),
        file("l", layer),
        file("again", type=tarfile.SYMTYPE, linkname="l"),
        file("manifest.json", manifest),
    )
    contents = read(gzip.compress(archive), tmp_path, most_bytes=4 * 2**20)
    assert len(contents.layers) == 100
    assert sum(path.stat().st_size for path in (tmp_path / "scratch").iterdir()) < 3 * 2**20


@pytest.mark.parametrize("linked", [False, True])
def test_an_archive_that_comes_to_more_than_there_is_room_for_is_refused(linked: bool, tmp_path: Path) -> None:
    layer = bytes(2**20)
    names = [f"l{number}" for number in range(50)]
    manifest = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
    kind = {"type": tarfile.SYMTYPE, "linkname": "l0"} if linked else {}
    layers = [
        file(name, *([] if linked and name != "l0" else [layer]), **(kind if name != "l0" else {})) for name in names
    ]
    archive = tar_of(file("c.json", config_of([layer] * 50)), *layers, file("manifest.json", manifest))
    with pytest.raises(InvalidImage, match=r"larger than this host takes|at most 8388608 bytes"):
        read(gzip.compress(archive), tmp_path, most_bytes=8 * 2**20)
    scratch = tmp_path / "scratch"
    assert sum(path.stat().st_size for path in scratch.glob("*")) < 9 * 2**20


def test_an_archive_of_links_that_lead_round_is_refused(tmp_path: Path) -> None:
    manifest = json.dumps([{"Config": "a", "Layers": []}]).encode()
    archive = tar_of(file("a", type=tarfile.SYMTYPE, linkname="a"), file("manifest.json", manifest))
    with pytest.raises(InvalidImage, match="cut off or no tar"):
        read(archive, tmp_path)


def test_registries_are_named_as_docker_names_them() -> None:
    names = {"debian": "docker.io", "a/b:1": "docker.io", "r.test/a": "r.test", "localhost/a": "localhost"}
    assert {name: registry_of(name) for name in names} == names
    assert registry_of("10.0.0.1:5000/a:1") == "10.0.0.1:5000"


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_layers_lie_over_each_other(tmp_path: Path) -> None:
    first = tar_of(
        file("dir", type=tarfile.DIRTYPE, mode=0o750),
        file("dir/gone", b"x"),
        file("dir/kept", b"old", mode=0o4755, uid=12, gid=34),
        file("opaque", type=tarfile.DIRTYPE, mode=0o755),
        file("opaque/lower", b"x"),
        file("was-dir/inside", b"x"),
        file("hard", b"", type=tarfile.LNKTYPE, linkname="dir/kept"),
        file("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        file("pipe", type=tarfile.FIFOTYPE),
        file("capable", b"x", pax_headers={"SCHILY.xattr.user.colour": "green"}),
    )
    second = tar_of(
        file("dir/.wh.gone"),
        file("opaque/upper", b"y"),
        file("opaque/.wh..wh..opq"),
        file("was-dir", b"a file now"),
        file("dir/new", b"n"),
        file("etc/hosts", b"its own"),
    )
    assert unpacked(tmp_path, first, gzip.compress(second)) == {"systemd": False}
    root = tmp_path / "root"
    assert sorted(path.name for path in (root / "dir").iterdir()) == ["kept", "new"]
    status = (root / "dir" / "kept").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_nlink) == (0o4755, 12, 34, 2)
    assert [path.name for path in (root / "opaque").iterdir()] == ["upper"]
    assert (root / "was-dir").read_text() == "a file now"
    assert (root / "null").stat().st_rdev == os.makedev(1, 3)
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)
    assert (root / "etc" / "hosts").read_text() == "its own"
    assert (root / "sbin" / "init").readlink() == Path("/opt/forkyard/agent/init")
    try:
        assert os.getxattr(root / "capable", "user.colour") == b"green"
    except OSError:
        assert "tmpfs" in subprocess.run(["stat", "-fc", "%T", tmp_path], capture_output=True, text=True).stdout


def test_systemd_is_found_and_kept_beside_our_init(tmp_path: Path) -> None:
    layer = tar_of(
        file("usr/lib/systemd/systemd", b"x", mode=0o755),
        file("lib", type=tarfile.SYMTYPE, linkname="usr/lib"),
        file("sbin", type=tarfile.SYMTYPE, linkname="usr/sbin"),
        file("usr/sbin/init", type=tarfile.SYMTYPE, linkname="/lib/systemd/systemd"),
    )
    assert unpacked(tmp_path, layer) == {"systemd": True}
    assert (tmp_path / "root/opt/forkyard/system").read_text() == "/usr/lib/systemd/systemd\n"
    assert (tmp_path / "root/usr/sbin/init").readlink() == Path("/opt/forkyard/agent/init")


@pytest.mark.parametrize(
    "members",
    [
        [file("../evil", b"x")],
        [file("a/../../evil", b"x")],
        [file("/evil", b"x")],
        [file("x", type=tarfile.LNKTYPE, linkname="../evil")],
        [file("x", type=tarfile.LNKTYPE, linkname="missing")],
        [file("a", b"x"), file("a/.wh.b"), file("a/b/.wh.c")],
    ],
)
def test_what_leads_out_is_refused(members: list[Member], tmp_path: Path) -> None:
    answer = unpacked(tmp_path, tar_of(*members))
    assert "refused" in answer or "failed" in answer
    assert not (tmp_path / "evil").exists()


def test_links_that_lead_out_lead_nowhere_but_into_the_image(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    layer = tar_of(
        file("up", type=tarfile.SYMTYPE, linkname="../../../../../../.."),
        file(f"up{tmp_path}/outside/evil", b"x"),
        file("abs", type=tarfile.SYMTYPE, linkname=str(outside)),
        file("abs/evil", b"x"),
        file("opt", type=tarfile.SYMTYPE, linkname=str(outside)),
        file("etc", type=tarfile.SYMTYPE, linkname="/../../.."),
        file("sbin", type=tarfile.SYMTYPE, linkname=str(outside)),
    )
    answer = unpacked(tmp_path, layer)
    assert not list(outside.iterdir()), answer
    assert not (tmp_path / "hosts").exists()


def test_a_layer_that_is_cut_off_or_too_large_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(tar_of(file("a", os.urandom(100_000))))
    for number, (blob, most_bytes, why) in enumerate(
        [(whole[:50_000], 2**30, "cut off"), (whole, 50_000, "larger"), (b"\x1f\x8bno gzip", 2**30, "unpacked")]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        assert why in unpacked(place, blob, most_bytes=most_bytes)["refused"]


def packed(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-cq"], input=data, capture_output=True, check=True).stdout


def test_layers_packed_by_zstd_are_unpacked_and_refused_if_they_are_cut_off(tmp_path: Path) -> None:
    layer = packed(tar_of(file("a", b"x" * 100_000), file("b", os.urandom(3_000_000))))
    assert unpacked(tmp_path, layer) == {"systemd": False}
    assert (tmp_path / "root" / "a").read_bytes() == b"x" * 100_000
    # Nothing is lost but what follows the last file, or the check at the very end.
    behind = packed(tar_of(file("a")) + os.urandom(200_000))
    for number, cut in enumerate((layer[:-1000], behind[:-100], behind[:-1])):
        place = tmp_path / str(number)
        place.mkdir()
        assert "cut off" in unpacked(place, cut)["refused"]


@pytest.mark.parametrize(
    "members",
    [
        [file("a", uid=2**40)],
        [file("x" * 300)],
        [file("/".join(["x" * 200] * 30))],
        [file("a", type=tarfile.SYMTYPE, linkname="a\0b", pax_headers={"linkpath": "a\0b"})],
        [file("a"), file("a/b")],
        [file("a", type=tarfile.SYMTYPE, linkname="a"), file("a/b")],
        [file("srv/.wh.")],
        [file("srv/.wh..")],
        [file("srv/.wh...")],
    ],
    ids=["owner", "name", "path", "nul", "below a file", "below itself", "nothing", "itself", "above"],
)
def test_entries_that_fit_nowhere_are_the_fault_of_the_image(members: list[Member], tmp_path: Path) -> None:
    answer = unpacked(tmp_path, tar_of(file("srv/kept"), *members))
    assert "refused" in answer, answer
    assert (tmp_path / "root" / "srv" / "kept").exists()


def test_a_removed_file_of_any_size_is_not_looked_for(tmp_path: Path) -> None:
    member, _ = file(".wh.a")
    member.size = 2**60
    layer = member.tobuf(tarfile.GNU_FORMAT)
    assert "at most" in unpacked(tmp_path, layer + bytes(1024))["refused"]


def test_a_link_to_a_directory_that_is_not_there_yet_leads_to_it(tmp_path: Path) -> None:
    links = tar_of(
        file("sbin", type=tarfile.SYMTYPE, linkname="usr/sbin"),
        file("lib", type=tarfile.SYMTYPE, linkname="usr/lib"),
        file("out", type=tarfile.SYMTYPE, linkname="../../../../srv/in"),
    )
    below = tar_of(file("sbin/x", b"1"), file("lib/deep/y", b"2"), file("out/z", b"3"))
    assert unpacked(tmp_path, links, below) == {"systemd": False}
    root = tmp_path / "root"
    assert (root / "sbin").is_symlink()
    found = [(root / path).read_text() for path in ("usr/sbin/x", "usr/lib/deep/y", "srv/in/z")]
    assert found == ["1", "2", "3"]
    assert (root / "usr/sbin/init").is_symlink()


def test_a_working_directory_is_made_inside_the_image(tmp_path: Path) -> None:
    linked = tar_of(file("app", type=tarfile.SYMTYPE, linkname="../../../../srv/app"), file("taken", b"x"))
    for number, (workdir, made) in enumerate([("/app/deep", "srv/app/deep"), ("/../../a", "a"), ("/taken/b", None)]):
        place = tmp_path / str(number)
        place.mkdir()
        answer = unpacked(place, linked, workdir=workdir)
        assert "working directory '/taken/b'" in answer["refused"] if made is None else answer == {"systemd": False}
        assert made is None or (place / "root" / made).is_dir()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "layer",
    [
        tar_of(file("a", bytes(2**21), type=tarfile.XHDTYPE)),
        tar_of(*(file(str(number), b"20 path=aaaaaaaaaaaa\n"[:20], type=tarfile.XGLTYPE) for number in range(3000))),
        tar_of(file("a", type=tarfile.GNUTYPE_SPARSE)),
        tar_of(file("a", b"9" * 5000 + b" path=b\n", type=tarfile.XHDTYPE)),
    ],
    ids=["one", "many", "sparse", "number"],
)
def test_headers_of_layers_are_bounded(layer: bytes, tmp_path: Path) -> None:
    assert "no tar archive" in unpacked(tmp_path, layer)["refused"]


def test_the_layers_of_an_image_have_their_room_together(tmp_path: Path) -> None:
    layers = [tar_of(file(name, os.urandom(100_000))) for name in "ab"]
    assert "larger" in unpacked(tmp_path, *layers, most_bytes=200_000)["refused"]


# ── imports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ForeignImages:
    base = tmp_path / "cache" / "images" / "base"
    base.mkdir(parents=True)
    for name in ("disk.raw", "vmlinuz", "initramfs.cpio"):
        (base / name).write_bytes(b"base")

    async def runtime(_: BaseImage) -> Path:
        (tmp_path / "runtime.tar").write_bytes(tar_of(file("opt/forkyard/runtime/x")))
        return tmp_path / "runtime.tar"

    monkeypatch.setattr("forkyard.images.foreign.ensure_runtime", runtime)
    image = BaseImage("base", base, base / "disk.raw", base / "vmlinuz", base / "initramfs.cpio", "6.1", 1)
    return ForeignImages(tmp_path / "cache", image)


def test_a_registry_that_sends_without_end_does_not_fill_the_disk(
    images: ForeignImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    async def pull(*_: object, **__: object) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    monkeypatch.setattr("forkyard.images.registry.pull", pull)
    monkeypatch.setattr("forkyard.images.foreign._LOOK_S", 0.01)
    monkeypatch.setattr("forkyard.images.foreign.RESERVE_BYTES", 2**60)
    with pytest.raises(NoCapacity, match="no room on the disk"):
        asyncio.run(images.import_("registry.example/large", print))
    assert ended


def test_equal_images_are_one_whatever_they_are_called(images: ForeignImages, tmp_path: Path) -> None:
    layer = tar_of(file("hello", b"x"))
    (tmp_path / "a.tar").write_bytes(saved([layer]))
    (tmp_path / "b.tar").write_bytes(layout([layer], created="2026-01-01T00:00:00Z"))
    (tmp_path / "c.tar").write_bytes(saved([tar_of(file("other", b"y"))]))

    dead = tmp_path / "cache" / "images" / ".import-99999999-0"  # no process has this number
    dead.mkdir()

    async def go() -> None:
        first = await images.import_("one", lambda *_: None, archive=tmp_path / "a.tar")
        second = await images.import_("two", lambda *_: None, archive=tmp_path / "b.tar")
        assert first.id == second.id
        assert second.names == ["one", "two"]
        image = images.image(first.id)
        assert image is not None
        assert image.disk.stat().st_size == second.size_bytes
        assert image.kernel.read_bytes() == b"base"
        third = await images.import_("one", lambda *_: None, archive=tmp_path / "c.tar")
        found = await images.find("one")
        assert found is not None
        assert found.id == third.id != first.id, "a name stands for what was imported last"
        assert {one.id for one in await images.all()} == {first.id, third.id}
        with pytest.raises(InvalidImage):
            (tmp_path / "d.tar").write_bytes(saved([tar_of(file("../x"))]))
            await images.import_("bad", lambda *_: None, archive=tmp_path / "d.tar")
        left = [path.name for path in (tmp_path / "cache" / "images").iterdir() if path.is_dir()]
        assert sorted(left) == sorted(["base", first.id[4:], third.id[4:]]), "nothing half is left"

    asyncio.run(go())


def test_what_a_killed_daemon_was_importing_is_gone_with_the_next_start(images: ForeignImages, tmp_path: Path) -> None:
    there = tmp_path / "cache" / "images"
    gone = [".import-99999999-0", f".import-{os.getpid()}-0", ".0123.building"]
    living = [f".import-{os.getppid()}-0", ".4567.building"]
    for name in (*gone, *living):
        (there / name / "root").mkdir(parents=True)

    async def go() -> None:
        async with locked(there / "4567", lambda *_: None):  # somebody else builds that one
            await HostImages(images, Cache(tmp_path / "cache", tmp_path, "x", 1)).start()

    asyncio.run(go())
    assert not [name for name in gone if (there / name).exists()]
    assert all((there / name / "root").exists() for name in living)
