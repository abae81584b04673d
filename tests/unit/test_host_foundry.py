"""What a machine leaves is removed, and nothing of another's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from forkyard.host.foundry import Foundry
from forkyard.host.journal import Entry, Phase
from forkyard.models import Shape

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
