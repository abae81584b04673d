"""The agent's composition: port, loop, execs, operations.

Owns: the command line, and the word to the host that it is ready.
"""

from __future__ import annotations

import gc
import os

from .cgroups import Cgroups
from .channel import Channel
from .execs import Execs
from .identity import Identity
from .loop import Loop
from .network import Network
from .operations import Operations
from .session import Session
from .sockets import Sockets, warm_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PORT = "/dev/virtio-ports/forkyard.agent"
CGROUPS = "/sys/fs/cgroup/forkyard"
CONSOLE = "/dev/ttyS0"


def main(arguments: list[str]) -> int:
    """`--channel PATH | unix:PATH | fd:NUMBER`, `--cgroups DIRECTORY`, `--console PATH`: for running outside a VM.
    `--machine own`: this is a machine of our own, whose network is ours to set up."""
    options = {"--channel": PORT, "--cgroups": CGROUPS, "--console": CONSOLE, "--machine": ""}
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        if name not in options:
            raise SystemExit(f"unknown option {name}; there are {', '.join(options)}")
        options[name] = value
    loop = Loop()
    cgroups = Cgroups(options["--cgroups"])
    execs = Execs(loop, cgroups)
    sockets = Sockets(cgroups, execs)
    handlers = Operations(loop, execs, Identity(loop), sockets).handlers()
    channel = Channel(
        loop,
        _opener(options["--channel"]),
        lambda channel, hello: Session(channel, hello, handlers),
        behind_front=options["--channel"].startswith("fd:"),
        on_open=lambda: _announce(options["--console"]),
    )
    if options["--machine"] == "own":
        Network(loop).set_up()
        loop.soon(lambda: warm_up(sockets))
    # Less to copy when a process is forked, and no pauses: what is made here lives as long as the agent.
    gc.collect()
    gc.freeze()
    channel.open()
    loop.run()
    return 0


def _opener(channel: str) -> Callable[[], int]:
    if channel.startswith("unix:"):
        return lambda: _connect(channel.removeprefix("unix:"))
    if channel.startswith("fd:"):
        return _Inherited(int(channel.removeprefix("fd:")))
    return lambda: os.open(channel, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class _Inherited:
    """The connection to the front. Without it there is nothing to do."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self) -> int:
        if self._fd < 0:
            raise SystemExit(1)
        fd, self._fd = self._fd, -1
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        return fd


def _connect(path: str) -> int:
    import socket

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        connection.setblocking(False)
        return connection.detach()
    finally:
        connection.close()


def _announce(console: str) -> None:
    try:
        fd = os.open(console, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(fd, b"forkyard: milestone agent\n")
    except OSError:
        pass
    os.close(fd)
