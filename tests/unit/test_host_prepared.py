"""Volumes that are asked for again are mounted in advance, and never those of a version that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forkyard.errors import GuestFailure, VolumeNotFound
from forkyard.host import prepared as module
from forkyard.host.foundry import Origin
from forkyard.host.prepared import Prepared
from forkyard.host.volumes import Places
from forkyard.hosts.base import Mount
from forkyard.models import Shape
from forkyard.vmm.base import SnapshotFiles

pytestmark = pytest.mark.anyio

TEMPLATE = Origin("base", SnapshotFiles(Path("/ram"), Path("/state"), Path("/disk")), pristine=True)


@dataclass
class Yard:
    """All that is around `Prepared`, on files of a few bytes."""

    root: Path
    made: list[list[str]] = field(default_factory=list)  # the modes of what was mounted, for each machine
    alive: int = 0
    fails: bool = False
    held: asyncio.Event | None = None
    versions: dict[str, Path] = field(default_factory=dict)
    told: int = 0

    def volume(self, name: str, number: int = 1) -> None:
        self.versions[name] = self.root / f"{name}-{number}"

    # ── as volumes ──

    def find(self, volume_id: str, _: int | None = None) -> Any:
        if volume_id not in self.versions:
            raise VolumeNotFound(volume_id)
        return SimpleNamespace(disk=self.versions[volume_id])

    def disks(self) -> list[Path]:
        return list(self.versions.values())

    def places(self, mounts: list[Mount]) -> Places:
        return tuple((mount.path, self.find(mount.volume_id).disk, mount.mode == "ro") for mount in mounts)

    def wanted(self, mounts: list[Mount]) -> list[Mount]:
        return mounts

    def seal(self, _: object) -> None:
        assert self.alive == 0, "nobody writes to it any more"

    # ── as foundry and instants ──

    async def park(self, name: str, shape: Shape, origin: Origin, warm_up: object, volumes: list[Mount]) -> Any:
        if self.held is not None:
            await self.held.wait()
        if self.fails:
            raise GuestFailure("it was not mounted")
        self.made.append([mount.mode for mount in volumes])
        self.alive += 1

        async def kill() -> None:
            self.alive -= 1

        return SimpleNamespace(entry=name, kill=kill)

    async def remove(self, _: object) -> None:
        assert self.alive == 0

    async def keep(self, machine: Any) -> Origin:
        files = [self.root / f"{machine.entry}.{kind}" for kind in ("state", "disk", "layer")]
        for file in files:
            file.touch()
        return Origin("base", SnapshotFiles(Path("/ram"), *files), pristine=True)

    def kept(self) -> int:
        return len(list(self.root.glob("*.layer")))

    def prepared(self) -> Prepared:
        return Prepared(self, self, self, self, self.is_told)  # type: ignore[arg-type]

    def is_told(self, shape: Shape, places: Places) -> None:
        self.told += 1


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    monkeypatch.setattr(module, "AFTER_S", 0.0)
    return Yard(tmp_path)


def ask(prepared: Prepared, *names: str, mode: Any = "cow") -> Origin | None:
    return prepared.wish(Shape(), TEMPLATE, [Mount(name, f"/{name}", mode) for name in names])


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.005)


async def ready(prepared: Prepared, *names: str, mode: Any = "cow") -> Origin:
    found: list[Origin] = []

    def there() -> bool:
        found[:] = [origin for origin in [ask(prepared, *names, mode=mode)] if origin is not None]
        return bool(found)

    await until(there)
    return found[0]


async def test_what_somebody_has_a_copy_of_is_there_for_the_next(yard: Yard) -> None:
    yard.volume("a")
    prepared = yard.prepared()
    assert ask(prepared) is None, "without volumes it is the template"
    assert ask(prepared, "a") is None
    await until(lambda: yard.told == 1)
    origin = ask(prepared, "a")
    assert origin is not None
    assert ask(prepared, "a") is origin, "many are made from one"
    assert yard.made == [["cow"]]
    assert origin.files.disk in prepared.disks(), "it is not collected"
    await prepared.stop()
    assert yard.kept() == 0
    assert not prepared.disks()


async def test_what_one_writes_to_is_prepared_when_it_is_asked_for_again(yard: Yard) -> None:
    yard.volume("a")
    prepared = yard.prepared()
    assert ask(prepared, "a", mode="rw") is None
    await asyncio.sleep(0.02)
    assert yard.made == [], "it is another version when he is done"
    assert ask(prepared, "a", mode="rw") is None
    await until(lambda: yard.told == 1)
    assert ask(prepared, "a", mode="rw") is not None
    await prepared.stop()


async def test_a_writer_sees_what_a_copy_sees_and_a_reader_does_not(yard: Yard) -> None:
    yard.volume("a")
    prepared = yard.prepared()
    copy = await ready(prepared, "a", mode="rw")
    assert ask(prepared, "a", mode="cow") is copy
    assert ask(prepared, "a", mode="ro") is None
    assert await ready(prepared, "a", mode="ro") is not copy
    assert yard.made == [["cow"], ["ro"]], "it is nobody's, so it never writes to the volume itself"
    await prepared.stop()


async def test_another_version_or_another_place_is_something_else(yard: Yard) -> None:
    yard.volume("a"), yard.volume("b")
    prepared = yard.prepared()
    first = await ready(prepared, "a")
    assert ask(prepared, "a", "b") is None
    assert prepared.wish(Shape(), TEMPLATE, [Mount("a", "/elsewhere", "cow")]) is None
    yard.volume("a", 2)
    await prepared.prune()
    assert not first.files.layer.exists(), "of a version that is no more nothing is kept"  # type: ignore[union-attr]
    assert not prepared.disks()
    assert ask(prepared, "a") is None
    await prepared.stop()


async def test_what_is_being_made_of_a_version_that_goes_is_not_finished(yard: Yard) -> None:
    yard.volume("a")
    yard.held = asyncio.Event()
    prepared = yard.prepared()
    ask(prepared, "a"), ask(prepared, "a")
    await asyncio.sleep(0.02)
    del yard.versions["a"]
    await prepared.prune()
    yard.held.set()
    await asyncio.sleep(0.02)
    assert (yard.made, yard.kept()) == ([], 0)
    with pytest.raises(VolumeNotFound):
        ask(prepared, "a")
    await prepared.stop()


async def test_only_those_used_last_are_kept(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    for name in "abc":
        yard.volume(name)
    prepared = yard.prepared()
    for name in ("a", "b"):
        await ready(prepared, name)
    ask(prepared, "a")
    await ready(prepared, "c")
    assert (ask(prepared, "a") is not None, ask(prepared, "b"), yard.kept()) == (True, None, 2)
    await prepared.stop()


async def test_one_that_cannot_be_mounted_or_was_of_no_use_is_tried_again_when_it_is_asked_for_again(
    yard: Yard,
) -> None:
    yard.volume("a")
    prepared = yard.prepared()
    yard.fails = True
    ask(prepared, "a"), ask(prepared, "a")
    await until(lambda: not prepared._making)
    assert ask(prepared, "a") is None
    yard.fails = False
    origin = await ready(prepared, "a")
    prepared.forget(origin)
    assert yard.kept() == 0
    assert await ready(prepared, "a") is not origin
    await prepared.stop()
