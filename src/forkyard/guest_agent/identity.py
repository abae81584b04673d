"""Becoming another machine: after a restore the guest has the clock, the random state and the names of the snapshot.

What must be true before the next instruction is done before the answer; files that only say the same follow at once.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time

from .failures import Failure
from .loop import Loop, Timer, log
from .programs import Program

_RNDADDENTROPY = 0x40085203
_RNDRESEEDCRNG = 0x5207
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\Z")
_KEY_TYPES = ("ed25519", "rsa", "ecdsa")
#: New host keys cost a second of CPU; the first commands in a new sandbox come first.
_HOST_KEYS_DELAY_S = 5.0


class Identity:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.env: dict[str, str] = {}
        self._host_keys_timer: Timer | None = None
        self._host_keys_running = False

    def adopt(self, hostname: str, entropy: bytes, time_ns: int, env: dict[str, str]) -> None:
        """All of it, if there is no front or it did not understand."""
        if not _HOSTNAME.match(hostname):
            raise Failure("invalid_request", f"{hostname!r:.80} cannot be a host name")
        try:
            time.clock_settime_ns(time.CLOCK_REALTIME, time_ns)
            _stir(entropy)
            _set_hostname(hostname)
        except OSError as error:
            raise Failure("guest_failure", f"identity: {error}") from None
        self.adopted(hostname, env)

    def adopted(self, hostname: str, env: dict[str, str]) -> None:
        """What is left when clock, random numbers and name are new."""
        self.env = env
        self._loop.soon(lambda: _write_files(hostname))
        self._renew_host_keys_later()

    def _renew_host_keys_later(self) -> None:
        if self._host_keys_timer is not None:
            self._host_keys_timer.cancel()
        self._host_keys_timer = self._loop.later(_HOST_KEYS_DELAY_S, self._renew_host_keys)

    def _renew_host_keys(self) -> None:
        """A key pair that other sandboxes have too identifies nobody."""
        if self._host_keys_running:
            self._renew_host_keys_later()
            return
        present = [kind for kind in _KEY_TYPES if os.path.exists(f"/etc/ssh/ssh_host_{kind}_key")]
        if not present:
            return
        commands = []
        for kind in present:
            key = f"/etc/ssh/ssh_host_{kind}_key"
            commands.append(f"rm -f {key}.new {key}.new.pub; ssh-keygen -q -t {kind} -N '' -C sandbox -f {key}.new")
            commands.append(f"mv -f {key}.new {key} && mv -f {key}.new.pub {key}.pub")
        # sshd starts itself anew on SIGHUP, with the new keys; connections that are open stay.
        commands.append("test ! -s /run/sshd.pid || kill -HUP $(cat /run/sshd.pid)")
        script = "\n".join(["set -e", *commands])
        self._host_keys_running = True
        Program(self._loop, ["chrt", "--idle", "0", "sh", "-c", script], self._host_keys_done)

    def _host_keys_done(self, status: int, stderr: str) -> None:
        self._host_keys_running = False
        if status != 0:
            log(f"ssh host keys: {stderr.strip() or status}")


def _stir(entropy: bytes) -> None:
    device = os.open("/dev/urandom", os.O_RDWR)
    try:
        fcntl.ioctl(device, _RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
        fcntl.ioctl(device, _RNDRESEEDCRNG)
    finally:
        os.close(device)


def _set_hostname(hostname: str) -> None:
    _put("/proc/sys/kernel/hostname", hostname.encode(), os.O_WRONLY)


def _write_files(hostname: str) -> None:
    old = _read("/etc/hostname").strip()
    hosts = [
        line
        for line in _read("/etc/hosts").splitlines()
        if not (line.startswith(b"127.0.1.1") or (old and line.endswith(b" " + old)))
    ]
    name = hostname.encode()
    _replace("/etc/hostname", name + b"\n")
    _replace("/etc/hosts", b"\n".join([*hosts, b"127.0.1.1 " + name]) + b"\n")
    _replace("/etc/machine-id", os.urandom(16).hex().encode() + b"\n")


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(fd, 65536)
    finally:
        os.close(fd)


def _replace(path: str, data: bytes) -> None:
    """In place: to free a block of the disk and take another is most of the work of writing so little."""
    try:
        _put(path, data, os.O_WRONLY | os.O_CREAT, cut=True)
    except OSError as error:
        log(f"{path}: {error}")


def _put(path: str, data: bytes, flags: int, *, cut: bool = False) -> None:
    fd = os.open(path, flags, 0o644)
    try:
        os.write(fd, data)
        if cut and os.fstat(fd).st_size != len(data):
            os.ftruncate(fd, len(data))
    finally:
        os.close(fd)
