"""A control plane on a host that is only memory, for the tests of it. When a test ends nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkyard.control.plane import ControlPlane
from forkyard.guest.fake import FakeGuest
from forkyard.hosts.memory import MemoryHost
from forkyard.store.sql import Store
from forkyard.vmm.base import FaultPlan

from .sdk_script import Both, Daemon


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "forkyard.db")
    yield store
    await store.close()


@pytest.fixture
def host() -> MemoryHost:
    return MemoryHost(lambda incarnation, spec: FakeGuest())


@pytest.fixture
async def control(store: Store, host: MemoryHost) -> AsyncIterator[ControlPlane]:
    control = ControlPlane(store, host)
    await control.start()
    yield control
    host.faults = FaultPlan()
    for event in host.holds.values():
        event.set()
    await control.stop(destroy=True)
    assert host.world.machines == {}


# ── the SDK, against a daemon that follows a script ──────────────────────────────────────────────────────────────


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are counted, not waited for."""
    monkeypatch.setattr("forkyard.sdk._sync.runtime.sleep", lambda _s: None)

    async def at_once(_s: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr("forkyard.sdk._async.runtime.sleep", at_once)
