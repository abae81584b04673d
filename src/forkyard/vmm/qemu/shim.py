"""The daemon's hand inside a QEMU: requests to the shim that is preloaded into it (`native/ramshim.c`).

Owns: one connection per request, so that nothing need survive a restart of the daemon. All calls are blocking.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import HostFailure, VmCrashed

TIMEOUT_S = 15.0
USERFAULTFD = Path("/dev/userfaultfd")
_MAP, _WATCH = 1, 2


@dataclass(frozen=True)
class Range:
    address: int
    length: int
    offset: int = 0  # in the file that is mapped


def map_file(shim: Path, file: Path, ranges: Sequence[Range]) -> None:
    """Map parts of a file privately over a QEMU's memory."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        failed = _request(shim, _MAP, fd, ranges)
    finally:
        os.close(fd)
    if failed:
        raise HostFailure(f"could not map {file} into QEMU: {os.strerror(failed)}")


def watch(shim: Path, area: Range) -> str | None:
    """Let the kernel note which pages of this area are written from now on; if it cannot, says why."""
    try:
        device = os.open(USERFAULTFD, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return f"{USERFAULTFD} does not open: {error.strerror}"
    try:
        failed = _request(shim, _WATCH, device, [area])
    finally:
        os.close(device)
    return os.strerror(failed) if failed else None


def _request(path: Path, operation: int, fd: int, ranges: Sequence[Range]) -> int:
    body = array.array("Q", [word for r in ranges for word in (r.address, r.length, r.offset)]).tobytes()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(path))
            socket.send_fds(connection, [struct.pack("=II", operation, len(ranges))], [fd])
            connection.sendall(body)
            answer = b""
            while len(answer) < 4 and (received := connection.recv(4 - len(answer))):
                answer += received
        except OSError as error:
            raise VmCrashed(f"QEMU's shim at {path} does not answer ({error}); the VM is gone or hangs") from error
    if len(answer) < 4:
        raise VmCrashed(f"QEMU's shim at {path} hung up")
    return abs(int(struct.unpack("=i", answer)[0]))
