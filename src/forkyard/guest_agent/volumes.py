"""Volumes: disks that the host puts into slots of this machine, mounted where the host says.

A slot is a drive at a fixed PCI address, without a byte until a volume is in it.
"""

from __future__ import annotations

import ctypes
import os
import time

from .failures import Failure, from_os_error

_PCI = "/sys/bus/pci/devices"
_FIRST_SLOT = 0x08
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_ATIME = 0x1, 0x2, 0x4, 0x400
#: From the host's word until the kernel has seen that there is something in the slot.
_SEEN_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.001

_libc = ctypes.CDLL(None, use_errno=True)


def mount(slot: int, path: str, *, read_only: bool) -> None:
    device = _device(slot)
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, path) from None
    flags = _NO_SUID | _NO_DEVICES | _NO_ATIME | (_READ_ONLY if read_only else 0)
    if _libc.mount(device.encode(), os.fsencode(path), b"ext4", ctypes.c_ulong(flags), None) != 0:
        number = ctypes.get_errno()
        raise Failure("guest_failure", f"the volume of slot {slot} was not mounted at {path}: {os.strerror(number)}")


def _device(slot: int) -> str:
    """The drive of this slot, once there is something in it."""
    address = f"{_PCI}/0000:00:{_FIRST_SLOT + slot:02x}.0"
    give_up = time.monotonic() + _SEEN_WITHIN_S
    while True:
        for virtio in _names(address):
            for name in _names(f"{address}/{virtio}/block") if virtio.startswith("virtio") else ():
                if _size(f"{address}/{virtio}/block/{name}/size"):
                    return f"/dev/{name}"
        if time.monotonic() > give_up:
            raise Failure("guest_failure", f"there is nothing in slot {slot}")
        time.sleep(_LOOK_EVERY_S)


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _size(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 32))
    finally:
        os.close(fd)
