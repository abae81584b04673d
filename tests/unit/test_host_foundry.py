"""What a machine leaves is removed, and nothing of another's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from forkyard.guest.base import Identity
from forkyard.host.doorway import Doorway
from forkyard.host.foundry import Foundry, Origin
from forkyard.host.journal import Entry, Phase
from forkyard.host.machine import Machine
from forkyard.hosts.base import Incarnation
from forkyard.models import Shape
from forkyard.net.base import Network

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("phase", "slots_removed"), [(Phase.RUNNING, [7]), (Phase.PAUSED, [7]), (Phase.COLD, []), (Phase.STOPPED, [])]
)
async def test_a_machine_without_a_process_has_no_slot_to_give_back(phase: Phase, slots_removed: list[int]) -> None:
    removed: list[int] = []
    slots: Any = SimpleNamespace(release=AsyncMock(side_effect=removed.append))
    settings: Any = SimpleNamespace(vm_uid_base=1000)
    foundry = Foundry(settings, AsyncMock(), Mock(), Mock(), Mock(), Mock(), slots, Mock(), Mock())
    await foundry.remove(Entry("vm", 1007, Shape(), "boot", "base", Path("/nowhere"), phase=phase))
    assert removed == slots_removed


# ── connections of the machine it was restored from ──────────────────────────────────────────────────────────────


ENTRY = Entry("vm", 1007, Shape(), "boot", "base", Path("/nowhere"))


def guest(*, refuses: bool = False) -> Any:
    made = AsyncMock(closed=asyncio.Event())
    made.connections.side_effect = OSError("it does not answer") if refuses else None
    made.connections.return_value = {}
    return made


def machine(its_guest: Any, quiet: AsyncMock) -> Machine:
    vm = AsyncMock()
    vm.wait.side_effect = asyncio.Event().wait
    doorway: Any = SimpleNamespace(quiet=quiet, close=AsyncMock(), guest=None)
    return Machine(ENTRY, vm, its_guest, AsyncMock(), Mock(), doorway)


@pytest.mark.parametrize("connected", [True, False])
async def test_a_copy_of_a_machine_without_connections_is_asked_for_none(connected: bool) -> None:
    its_guest, asked = guest(), asyncio.Event()
    its_guest.connections.side_effect = asked.set
    connect: Any = AsyncMock(return_value=its_guest)
    settings: Any = SimpleNamespace(vm_uid_base=1000, create_timeout_s=5)
    driver, vm = AsyncMock(), AsyncMock()
    vm.wait.side_effect = asyncio.Event().wait
    driver.shell.return_value = vm
    journal, slots, volumes = Mock(), AsyncMock(), Mock()
    slots.claim, slots.path = Mock(return_value=7), Mock()
    journal.uids.return_value = []
    journal.write.side_effect = volumes.begin.side_effect = lambda entry, *_: entry
    volumes.mount = AsyncMock()
    foundry = Foundry(
        settings, driver, connect, journal, Mock(), volumes, slots, lambda _: AsyncMock(spec=Doorway), Mock()
    )
    origin = Origin("base", Mock(), connected=connected)
    made = await foundry.restore(Incarnation("one", 1), Shape(), origin, {}, Network())
    try:
        if connected:
            async with asyncio.timeout(5):
                await asked.wait()
        else:
            for _ in range(20):
                await asyncio.sleep(0)
            assert not asked.is_set()
        identity = connect.call_args.kwargs["identity"]
        assert isinstance(identity, Identity)
        assert identity.sandbox_id == "one"
    finally:
        await made.kill()


@pytest.mark.parametrize(("quiet", "expected"), [([True], False), ([False], True), (OSError("no slot"), True)])
async def test_a_machine_is_connected_unless_its_slot_says_otherwise(quiet: Any, expected: bool) -> None:
    one = machine(guest(), AsyncMock(side_effect=quiet))
    assert await one.connected() is expected
    await one.kill()


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_copy_counts_as_connected_until_its_old_connections_are_dropped(refuses: bool) -> None:
    its_guest = guest(refuses=refuses)
    one = machine(its_guest, AsyncMock(return_value=True))
    one.drop_old_connections()
    assert await one.connected(), "nobody has looked yet"
    async with asyncio.timeout(5):
        while not its_guest.connections.called:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert await one.connected() is refuses
    await one.kill()
