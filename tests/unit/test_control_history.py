"""What sandboxes used lately, on a host that says what it is told to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import pytest

from forkyard.control.history import MOST
from forkyard.control.plane import ControlPlane
from forkyard.errors import SandboxNotFound
from forkyard.hosts.base import Incarnation, Load
from forkyard.hosts.memory import MemoryHost, Power
from forkyard.lifecycle import State
from forkyard.models import SandboxCreate, UsageSample

pytestmark = pytest.mark.anyio
BEGIN = 1_800_000_000.0
MIB = 2**20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Meter:
    """Time, and what machines use of it: `cores` of each, while it runs."""

    def __init__(self, host: MemoryHost) -> None:
        self.host = host
        self.passed_s = 0.0
        self.cores = 0.5
        self.memory_bytes = 100 * MIB

    async def loads(self) -> Mapping[Incarnation, Load]:
        running = (one for one, machine in self.host.world.machines.items() if machine.power is Power.RUNNING)
        return {one: Load(self.cores * self.passed_s, self.memory_bytes, 700 * MIB) for one in running}


@pytest.fixture
def meter(control: ControlPlane, host: MemoryHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    meter = Meter(host)
    assert control._history is not None
    control._history.cancel()  # only tests look
    monkeypatch.setattr(host, "loads", meter.loads)
    control.history.clock = lambda: meter.passed_s
    control.history.wall = lambda: BEGIN + meter.passed_s
    yield meter


async def made(control: ControlPlane) -> str:
    return (await control.sandboxes.create(SandboxCreate(vcpus=2, memory_mib=512, disk_gib=8))).id


async def looked(control: ControlPlane, meter: Meter, times: int, every_s: float = 10.0) -> None:
    for _ in range(times):
        meter.passed_s += every_s
        await control.history.look()


def seconds(samples: list[UsageSample]) -> list[float]:
    return [sample.at.timestamp() - BEGIN for sample in samples]


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(BEGIN + seconds, UTC)


async def test_samples_are_kept_while_it_runs(control: ControlPlane, meter: Meter) -> None:
    sandbox_id = await made(control)
    await looked(control, meter, 3)
    found = await control.history.of(sandbox_id)
    assert seconds(found) == [20, 30], "the first look is only what the second is compared with"
    assert {(one.cpu_percent, one.memory_mib, one.disk_mib) for one in found} == {(25.0, 100.0, 700.0)}


async def test_the_last_one_is_of_now(control: ControlPlane, meter: Meter) -> None:
    sandbox_id = await made(control)
    await looked(control, meter, 2)
    meter.passed_s += 5
    assert seconds(await control.history.of(sandbox_id)) == [20, 25]
    assert seconds(await control.history.of(sandbox_id)) == [20, 25], "asking leaves no trace"
    assert seconds(await control.history.of(sandbox_id, end=at(24))) == [20]


async def test_one_that_is_new_is_looked_at_twice(control: ControlPlane, meter: Meter) -> None:
    found = await control.history.of(await made(control))
    assert [(one.memory_mib, one.disk_mib) for one in found] == [(100.0, 700.0)]


async def test_a_part_of_it_can_be_asked_for(control: ControlPlane, meter: Meter) -> None:
    sandbox_id = await made(control)
    await looked(control, meter, 6)
    assert seconds(await control.history.of(sandbox_id, at(30), at(50))) == [30, 40, 50]
    assert seconds(await control.history.of(sandbox_id, at(50))) == [50, 60]
    assert await control.history.of(sandbox_id, at(1000), at(2000)) == []
    assert await control.history.of(sandbox_id, at(50), at(30)) == []


async def test_one_that_sleeps_is_neither_measured_nor_woken(control: ControlPlane, meter: Meter) -> None:
    sandbox_id = await made(control)
    await looked(control, meter, 2)
    await control.sleep.pause(sandbox_id)
    await looked(control, meter, 2)
    assert seconds(await control.history.of(sandbox_id)) == [20]
    assert (await control.sandboxes.get(sandbox_id)).state is State.PAUSED
    await control.sleep.resume(sandbox_id)
    await looked(control, meter, 2)
    assert seconds(await control.history.of(sandbox_id)) == [20, 60]


async def test_no_more_than_an_hour_is_kept(control: ControlPlane, meter: Meter) -> None:
    sandbox_id = await made(control)
    await looked(control, meter, 1, 0)
    await looked(control, meter, 30, 600)
    found = seconds(await control.history.of(sandbox_id))
    assert (found[0], found[-1]) == (30 * 600 - 3600, 30 * 600)
    await looked(control, meter, MOST + 5, 0.01)
    assert len(await control.history.of(sandbox_id)) == MOST
    await control.sandboxes.delete(sandbox_id)
    await looked(control, meter, 1, 3601)
    assert await control.history.of(sandbox_id) == []
    assert not control.history._samples
    assert not control.history._seen


async def test_nothing_is_more_than_all_of_it(control: ControlPlane, meter: Meter) -> None:
    sandbox_id = await made(control)
    meter.cores, meter.memory_bytes = 40.0, 4096 * MIB
    await looked(control, meter, 2)
    (sample,) = await control.history.of(sandbox_id)
    assert (sample.cpu_percent, sample.memory_mib) == (100.0, 512.0)


async def test_one_that_never_was_is_not_found(control: ControlPlane, meter: Meter) -> None:
    with pytest.raises(SandboxNotFound):
        await control.history.of("i" + "0" * 19)
