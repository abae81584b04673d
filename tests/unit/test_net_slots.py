"""Slots, without machines: what is in them, who has which, and what is left. Makes real network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from forkyard.errors import HostFailure
from forkyard.net import namespace
from forkyard.net import slots as net_slots
from forkyard.net.base import DOOR_ADDRESS
from forkyard.net.slots import DIRECTORY, DOOR_PORT, Slots, open_listeners, open_socket

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def slots(spare: int = 0, most: int = 8, scope: str | None = None) -> AsyncIterator[Slots]:
    scope = scope or f"test{secrets.token_hex(4)}"
    made = Slots(scope, spare=spare, most=most)
    try:
        await made.start(in_use={})
        yield made
    finally:
        await made.stop()
        for path in left(made):
            namespace.remove(path)


def left(made: Slots) -> list[Path]:
    return sorted(DIRECTORY.glob(f"{made.path(0).name.removesuffix('0')}*"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def process_in(slot: Path) -> Iterator[int]:
    process = subprocess.Popen(["nsenter", f"--net={slot}", "sleep", "60"])
    try:
        while Path(f"/proc/{process.pid}/ns/net").stat().st_ino != slot.stat().st_ino:
            time.sleep(0.01)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def said(*command: str) -> Callable[[], str]:
    return lambda: subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def test_a_slot_has_a_tap_and_no_way_out() -> None:
    async with slots() as some:
        number = some.claim(())
        assert number is not None
        slot = await some.prepare(number)
        links = await namespace.inside(slot, said("ip", "-brief", "link"))
        assert [line.split()[0] for line in links.splitlines()] == ["lo", "tap0"]
        routes = await namespace.inside(slot, said("ip", "route"))
        assert "default" not in routes
        assert await namespace.inside(slot, said("ip", "-6", "addr")) == ""
        assert (await namespace.inside(slot, said("sysctl", "-n", "net.ipv4.ip_forward"))).strip() == "0"


async def test_work_inside_a_slot_leaves_the_daemon_where_it_was() -> None:
    async with slots() as some:
        slot = await some.prepare(some.claim(()) or 0)
        here = Path("/proc/self/ns/net").readlink()
        there = await namespace.inside(slot, lambda: Path("/proc/thread-self/ns/net").readlink())
        assert there != here
        assert Path("/proc/thread-self/ns/net").readlink() == here
        assert await asyncio.to_thread(Path("/proc/thread-self/ns/net").readlink) == here


async def test_two_slots_have_the_same_addresses_and_do_not_meet() -> None:
    async with slots() as some:
        one, other = [await some.prepare(some.claim(()) or 0) for _ in range(2)]
        listeners = await open_listeners(one)
        others = await open_listeners(other)  # the same address and ports, free again
        for listener in (listeners.tcp, others.tcp):
            assert listener.getsockname() == (DOOR_ADDRESS, DOOR_PORT)
        with await open_socket(other) as visitor, pytest.raises(OSError):
            visitor.settimeout(1)
            await asyncio.to_thread(visitor.connect, (DOOR_ADDRESS, 9))
        for sockets in (listeners, others):
            for each in (sockets.tcp, sockets.dns_udp, sockets.dns_tcp):
                each.close()


async def test_a_slot_that_is_ready_is_there_at_once_and_another_follows() -> None:
    async with slots(spare=2) as some:
        await until(lambda: len(left(some)) == 2)
        started = time.perf_counter()
        number = some.claim(())
        assert number is not None
        slot = await some.prepare(number)
        listeners = await open_listeners(slot)
        took_ms = (time.perf_counter() - started) * 1000
        for each in (listeners.tcp, listeners.dns_udp, listeners.dns_tcp):
            each.close()
        assert took_ms < 10
        await until(lambda: len(left(some)) == 3)
        await some.release(number)
        assert not slot.exists()


async def test_a_number_is_given_to_one_only() -> None:
    async with slots(spare=1, most=4) as some:
        numbers = [some.claim(taken=[3]) for _ in range(4)]
        assert sorted(n for n in numbers if n is not None) == [0, 1, 2]
        assert numbers[-1] is None
        await asyncio.gather(*(some.prepare(n) for n in numbers if n is not None))
        await some.release(1)
        assert some.claim(taken=[3]) == 1


async def test_a_slot_is_new_for_every_machine() -> None:
    async with slots() as some:
        slot = await some.prepare(some.claim(()) or 0)
        with await open_socket(slot) as kept:  # somebody who does not let go of the old one
            before = await namespace.inside(slot, lambda: Path("/proc/thread-self/ns/net").stat().st_ino)
            await some.release(0)
            assert some.claim(()) == 0
            again = await some.prepare(0)
            assert again == slot
            assert await namespace.inside(again, lambda: Path("/proc/thread-self/ns/net").stat().st_ino) != before
            assert kept.fileno() >= 0


async def test_a_daemon_that_was_killed_leaves_nothing_but_the_slots_of_its_machines() -> None:
    async with slots(spare=2, scope=f"test{secrets.token_hex(4)}") as killed:
        used = [killed.claim(()) for _ in range(2)]
        for number in used:
            await killed.prepare(number or 0)
        await until(lambda: len(left(killed)) == 4)
        scope = killed.path(0).name.removeprefix("forkyard-").removesuffix("-0")
        with process_in(killed.path(1)) as pid:
            following = Slots(scope, spare=0, most=8)
            await following.start(in_use={1: pid})
            assert left(following) == [following.path(1)]
            assert following.claim(()) == 0
            assert following.claim(()) == 2
            await following.stop()
            assert left(following) == [following.path(1)]


async def test_a_slot_whose_place_was_lost_is_found_through_its_machine() -> None:
    async with slots() as some:
        slot = await some.prepare(some.claim(()) or 0)
        before = slot.stat().st_ino
        with process_in(slot) as pid:
            namespace.remove(slot)
            await some.start(in_use={0: pid})
            assert slot.stat().st_ino == before
            assert "tap0" in await namespace.inside(slot, said("ip", "link"))


async def test_what_another_program_uses_is_left_alone() -> None:
    async with slots() as some:
        beside = Slots(some.path(0).name.removeprefix("forkyard-").removesuffix("-0"), spare=0, most=8)
        theirs = await beside.prepare(beside.claim(()) or 0)
        assert some.claim(()) == 1
        with pytest.raises(HostFailure):
            await some.prepare(0)
        assert theirs.exists()


async def test_a_slot_whose_making_is_cancelled_leaves_nothing() -> None:
    async with slots() as some:
        for pause_s in (0, 0.001, 0.003, 0.006):
            number = some.claim(()) or 0
            making = asyncio.create_task(some.prepare(number))
            await asyncio.sleep(pause_s)
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await making
            await some.release(number)
            assert left(some) == []


async def test_stopping_in_the_middle_of_a_refill_leaves_nothing() -> None:
    for pause_s in (0.25, 0.255, 0.26, 0.27, 0.3):  # a refill begins after a quarter of a second, and takes some ms
        async with slots(spare=3) as some:
            await asyncio.sleep(pause_s)
            await some.stop()
            assert left(some) == []


async def test_making_is_over_when_a_cancelled_maker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is cancelled meanwhile."""
    begun, may_end = threading.Event(), threading.Event()

    def slowly() -> None:
        begun.set()
        may_end.wait(10)

    monkeypatch.setattr(net_slots, "_furnish", slowly)
    async with slots() as some:
        number = some.claim(()) or 0
        making = asyncio.create_task(some.prepare(number))
        await asyncio.to_thread(begun.wait, 10)
        for _ in range(3):
            making.cancel()
            await asyncio.sleep(0.01)
            assert not making.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert left(some) == []


async def test_a_door_can_be_opened_again_after_its_daemon_was_killed() -> None:
    async with slots() as some:
        slot = await some.prepare(some.claim(()) or 0)
        for _ in range(2):
            listeners = await open_listeners(slot)
            assert listeners.dns_udp.type is socket.SOCK_DGRAM
            for each in (listeners.tcp, listeners.dns_udp, listeners.dns_tcp):
                each.close()


def test_a_slot_is_not_hidden_when_others_begin_to_make_namespaces() -> None:
    """The first `ip netns add` of a host mounts the directory over itself, if nobody has. In mounts of its own."""
    ours, theirs = (f"fytest-{secrets.token_hex(4)}-{name}" for name in ("ours", "theirs"))
    program = f"""
import asyncio, subprocess
from forkyard.net import namespace
from forkyard.net.slots import DIRECTORY
while subprocess.run(["umount", "-l", DIRECTORY], capture_output=True).returncode == 0:
    pass  # as on a host that was just booted
ours = DIRECTORY / "{ours}"
asyncio.run(namespace.create(ours, lambda: None))
try:
    subprocess.run(["ip", "netns", "add", "{theirs}"], check=True)
    subprocess.run(["ip", "netns", "del", "{theirs}"], check=True)
finally:
    namespace.remove(ours)
assert not ours.exists()
"""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    for name in (ours, theirs):
        (DIRECTORY / name).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
