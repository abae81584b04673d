"""Volumes: disks that the host puts into slots of this machine, mounted where the host says.

A slot is a drive at a fixed PCI address, without a byte until a volume is in it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import select
import time

from .failures import Failure, from_os_error
from .loop import IN, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PCI = "/sys/bus/pci/devices"
_FIRST_SLOT = 0x08
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_ATIME = 0x1, 0x2, 0x4, 0x400
#: From the host's word until the kernel has seen that there is something in the slot.
_SEEN_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.001
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # ioctls of file systems
_FORGET = 0x1261  # ioctl of drives: what is known of their content
_OCTAL = re.compile(rb"\\([0-7]{3})")

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


def unmount(slot: int) -> None:
    """What `mount` did is undone, to the directory, and of the drive nothing is remembered."""
    device = _device(slot)
    for _, path in _mount_points([slot]):
        if _libc.umount2(path, 0) != 0:
            raise Failure("guest_failure", f"the volume of slot {slot} is in use: {os.strerror(ctypes.get_errno())}")
        try:
            os.rmdir(path)
        except OSError:  # it was there before, and has something in it
            pass
    file = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, _FORGET)
    finally:
        os.close(file)


class Flush:
    """What was written to the volumes of these slots, onto their disks: by a process of its own, for it may take long.

    With `frozen_s`, they are left as if they were unmounted, and whoever writes waits: until `thaw`, and no longer than that.
    That process sees to it: the agent may be among those who wait.
    """

    def __init__(self, loop: Loop, slots: list[int], frozen_s: float, done: Callable[[Failure | None], object]) -> None:
        self._loop = loop
        self._done = done
        self._thawed: Callable[[], object] | None = None
        self._report, report = os.pipe2(os.O_CLOEXEC)
        stay, self._go_on = os.pipe2(os.O_CLOEXEC)
        try:
            self._pid = os.fork()
        except OSError as error:
            for fd in (self._report, report, stay, self._go_on):
                os.close(fd)
            raise from_os_error(error, "cannot start another process") from None
        if self._pid == 0:
            try:
                os.close(self._go_on)
                _flush(slots, frozen_s, report, stay)
            finally:
                os._exit(0)
        os.close(report)
        os.close(stay)
        loop.watch(self._report, IN, self._reported)
        loop.watch(pidfd := os.pidfd_open(self._pid), IN, lambda _: self._ended(pidfd))

    @property
    def over(self) -> bool:
        return self._go_on < 0

    def thaw(self, thawed: Callable[[], object]) -> None:
        """Told when they can be written to again."""
        self._thawed = thawed
        try:
            os.write(self._go_on, b"g")
        except BrokenPipeError:  # it is over already, and we are about to see that
            pass

    def _reported(self, _events: int) -> None:
        said = os.read(self._report, 16)
        self._loop.unwatch(self._report)
        os.close(self._report)
        number = int(said or errno.EIO)
        self._done(
            None if number == 0 else Failure("guest_failure", f"volumes were not flushed: {os.strerror(number)}")
        )

    def _ended(self, pidfd: int) -> None:
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        os.waitpid(self._pid, 0)
        os.close(self._go_on)
        self._go_on = -1
        if self._thawed is not None:
            self._thawed()


def _flush(slots: list[int], frozen_s: float, report: int, stay: int) -> None:
    """Says 0, or the number of an error."""
    failed, frozen = 0, []
    files = _mounts(slots)
    if len(files) < len(slots):  # something is mounted over one, say
        os.sync()
    for file in files:
        try:
            if _libc.syncfs(file) != 0:
                failed = ctypes.get_errno()
            elif frozen_s > 0:
                fcntl.ioctl(file, _FREEZE, 0)
                frozen.append(file)
        except OSError as error:
            failed = error.errno or errno.EIO
    try:
        os.write(report, str(failed).encode())
        if frozen:
            select.select([stay], [], [], frozen_s)
    finally:
        for file in frozen:
            fcntl.ioctl(file, _THAW, 0)


def _mounts(slots: list[int]) -> list[int]:
    """The top directories of what is in these slots, open: wherever it is mounted now, and nothing that is mounted over it."""
    opened = []
    for device, path in _mount_points(slots):
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # it went away meanwhile
            continue
        status = os.fstat(file)
        if device == f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}":
            opened.append(file)
        else:
            os.close(file)
    return opened


def _mount_points(slots: list[int]) -> list[tuple[str, bytes]]:
    """The numbers of each drive that is mounted, and one place where it is."""
    wanted = {numbers for slot in slots for numbers in _numbers(slot)}
    found = []
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            fields = line.split(b" ")
            device = fields[2].decode()
            if device in wanted and fields[3] == b"/":
                wanted.discard(device)
                found.append((device, _OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), fields[4])))
    return found


def _numbers(slot: int) -> list[str]:
    """`major:minor` of the drive of a slot."""
    found = []
    for drive in _drives(slot):
        with open(f"{drive}/dev") as file:
            found.append(file.read().strip())
    return found


def _device(slot: int) -> str:
    """The drive of this slot, once there is something in it."""
    give_up = time.monotonic() + _SEEN_WITHIN_S
    while True:
        for drive in _drives(slot):
            if _size(f"{drive}/size"):
                return f"/dev/{os.path.basename(drive)}"
        if time.monotonic() > give_up:
            raise Failure("guest_failure", f"there is nothing in slot {slot}")
        time.sleep(_LOOK_EVERY_S)


def _drives(slot: int) -> list[str]:
    address = f"{_PCI}/0000:00:{_FIRST_SLOT + slot:02x}.0"
    above = [f"{address}/{name}/block" for name in _names(address) if name.startswith("virtio")]
    return [f"{directory}/{name}" for directory in above for name in _names(directory)]


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
