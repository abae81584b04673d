"""The daemon as it is started, with all its settings, on a host that is only memory. For what no part of it shows alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forkyard import DaemonUnreachable, Forkyard
from forkyard import daemon as daemon_module
from forkyard.guest.fake import FakeGuest
from forkyard.hosts.memory import MemoryHost
from forkyard.net.presets import Presets
from forkyard.settings import Settings


@dataclass
class WholeDaemon:
    settings: Settings

    def client(self) -> Forkyard:
        return Forkyard(socket=self.settings.api_socket, key_file=self.settings.key_file)

    @property
    def env(self) -> dict[str, str]:
        return {
            "FORKYARD_STATE_DIR": str(self.settings.state_dir),
            "FORKYARD_RUN_DIR": str(self.settings.run_dir),
        }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextlib.contextmanager
def running(root: Path, **settings: Any) -> Iterator[WholeDaemon]:
    """`root` is short: unix sockets live below it."""
    made = Settings(state_dir=root / "state", run_dir=root / "run", listen_port=0, ssh=False, **settings)

    async def in_memory(*_: object, **__: object) -> MemoryHost:
        return MemoryHost(lambda *_: FakeGuest())

    async def no_registries(*_: object) -> Presets:
        return Presets()

    failed: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(daemon_module.serve(made))
        except BaseException as error:
            failed.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon_module, "local_host", in_memory)
        patch.setattr(daemon_module, "read_presets", no_registries)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        daemon = WholeDaemon(made)
        _until_it_answers(daemon, failed)
        try:
            yield daemon
        finally:
            with daemon.client() as client:
                client.shutdown(destroy=True)
            thread.join(60)
    assert not failed and not thread.is_alive()


def _until_it_answers(daemon: WholeDaemon, failed: list[BaseException]) -> None:
    gives_up_at = time.monotonic() + 60
    while True:
        if failed:
            raise failed[0]
        with contextlib.suppress(DaemonUnreachable, OSError), daemon.client() as client:
            client.health()
            return
        assert time.monotonic() < gives_up_at
        time.sleep(0.05)
