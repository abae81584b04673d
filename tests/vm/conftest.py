"""Real VMs for tests: one daemon for the session, one leak check after every test.

The daemon runs as a user would run it, in a process of its own with its own state directory; images and templates come
from the machine's cache. After each test nothing of its sandboxes may be left: no record, process, cgroup, network namespace
or file.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.settings import Settings

pytestmark = pytest.mark.timeout(300)

#: Begun first, so that no worker is left alone with one of them at the end.
LONGEST = (
    "test_package_managers",
    "test_spec_steps",
    "test_images",
    "test_docs",
    "test_docs_images",
    "test_dev_server",
    "test_attacks",
    "test_faults",
    "test_python_versions",
    "test_volumes",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@dataclass
class Daemon:
    """A daemon process with a state directory of its own."""

    root: Path
    process: subprocess.Popen[bytes] | None = None
    extra_env: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "FORKYARD_STATE_DIR": str(self.root),
            "FORKYARD_RUN_DIR": str(self.root / "run"),
            "FORKYARD_CACHE_DIR": str(Settings().cache_dir),
            "FORKYARD_LISTEN_PORT": "0",
            "FORKYARD_LOG_LEVEL": "debug",
            # What the pool keeps ready would look like a leak; its own tests turn it on.
            "FORKYARD_POOL_SIZE": "0",
            "FORKYARD_POOL_SHELLS": "0",
            "FORKYARD_POOL_SLOTS": "0",
            **self.extra_env,
        }

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "forkyard.daemon"]

    @property
    def settings(self) -> Settings:
        return Settings(
            state_dir=self.root, run_dir=self.root / "run", FORKYARD_CACHE_DIR=Settings().cache_dir, listen_port=0
        )

    @property
    def log(self) -> str:
        return (self.root / "test-daemon.log").read_text(errors="replace")

    @property
    def url(self) -> str:
        """Where it listens, as it said when it started last."""
        return re.findall(r"serving .*(http://127\.0\.0\.1:[0-9]+)", self.log)[-1]

    def start(self) -> None:
        with (self.root / "test-daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        with self.client() as fy:
            while True:
                try:
                    fy.health()
                    return
                except Exception:
                    if self.process.poll() is not None or time.monotonic() > deadline:
                        raise AssertionError(f"the daemon did not start:\n{self.log[-4000:]}") from None
                    time.sleep(0.05)

    def client(self) -> Forkyard:
        return Forkyard(socket=self.settings.api_socket, key_file=self.settings.key_file)

    def kill(self) -> None:
        """As if it crashed."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def cli(self, *args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
        options: dict[str, object] = {"capture_output": True, "text": True, "timeout": 120, **kwargs}
        return subprocess.run([sys.executable, "-m", "forkyard.cli", *args], env=self.env, **options)  # type: ignore[call-overload,no-any-return]


def make_daemon() -> Daemon:
    # Short: unix sockets live below it, and their paths are limited to 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="fyt-", dir="/tmp"))
    root.chmod(0o711)
    return Daemon(root)


def remove_daemon(daemon: Daemon) -> None:
    """End everything, then check that the daemon's own clean-up left nothing anywhere."""
    if daemon.process is None or daemon.process.poll() is not None:
        daemon.start()
    done = daemon.cli("down", "--all")
    assert done.returncode == 0, done.stderr
    assert daemon.process is not None
    daemon.process.wait(60)
    left = belongings(daemon, templates=True)
    shutil.rmtree(daemon.root, ignore_errors=True)
    assert not left, f"left behind after `forkyard down --all`: {left}"


def belongings(daemon: Daemon, *, templates: bool = False) -> set[str]:
    """Everything on this host that belongs to VMs of this daemon."""
    root = str(daemon.root)
    found = {f"{kind} {path}" for kind in ("vms", "disks", "snapshots") for path in (daemon.root / kind).glob("*")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "qemu-system" in command and f"{root}/" in command:
            found.add(f"process {process.name}")
    scope = daemon.settings.scope
    for base in Path("/sys/fs/cgroup").glob("*"):
        found |= {
            f"cgroup {path}"
            for path in [base, *base.glob("*")]
            if path.name == f"forkyard-{scope}"
            for path in path.glob("*/")
        }
        found |= {f"cgroup {path}" for path in base.glob(f"forkyard-{scope}.*")}
    found |= {f"slot {path}" for path in Path("/run/netns").glob(f"forkyard-{scope}-*")}
    if daemon.settings.ram_dir.exists():
        files = {path.name for path in daemon.settings.ram_dir.iterdir()}
        found |= {f"ram {name}" for name in files if templates or not name.endswith(".ram")}
    return found


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    daemon = make_daemon()
    daemon.start()
    yield daemon
    remove_daemon(daemon)


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """For tests that kill or stop their daemon."""
    daemon = make_daemon()
    daemon.start()
    yield daemon
    remove_daemon(daemon)


@pytest.fixture
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    before = belongings(daemon)
    with daemon.client() as client:
        yield client
        for sandbox in client.sandboxes.list(all=True):
            if sandbox.info.state != "deleted":
                sandbox.delete()
    left = belongings(daemon) - before
    assert not left, f"the test left behind: {left}"


@pytest.fixture
def create(fy: Forkyard) -> Callable[..., Sandbox]:
    return fy.sandboxes.create


@pytest.fixture
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create() as sandbox:
        yield sandbox
