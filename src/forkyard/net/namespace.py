"""Doing something inside another network namespace, from a process that stays where it is.

Linux keeps the namespace per thread, and a socket belongs for ever to the one it was made in. So a thread of its own goes
in, does its work, and ends there; what it made is used from anywhere, by asyncio too. No thread ever comes back: one that
could not would open the daemon's own connections inside a sandbox.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 0x1000, 0x4000, 1 << 20
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


async def inside(namespace: Path, work: Callable[[], T]) -> T:
    """What `work` returns, done in this namespace by a thread of its own. `work` must not block for long."""

    def enter_and_work() -> T:
        fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(fd, _CLONE_NEWNET), f"cannot enter the network namespace {namespace}")
        finally:
            os.close(fd)
        return work()

    return await _in_thread(enter_and_work)


async def create(namespace: Path, furnish: Callable[[], None]) -> None:
    """A new network namespace that lasts until it is removed; `furnish` is called inside. If that fails, or whoever
    wanted it is cancelled, it is gone."""
    existed = namespace.exists()

    def make() -> None:
        _check(_libc.unshare(_CLONE_NEWNET), "cannot make a network namespace")
        _mount(Path(f"/proc/self/task/{threading.get_native_id()}/ns/net"), namespace)
        try:
            furnish()
        except BaseException:
            remove(namespace)
            raise

    try:
        await _in_thread(make)
    except asyncio.CancelledError:
        if not existed:
            remove(namespace)
        raise


async def alone(furnish: Callable[[], T]) -> tuple[int, T]:
    """A new network namespace that has no name, and what `furnish` made inside. It lasts as long as the descriptor that
    comes with it, which is the caller's to close; programs enter it by `/proc/PID/fd/N`."""
    opened: list[int] = []

    def make() -> T:
        _check(_libc.unshare(_CLONE_NEWNET), "cannot make a network namespace")
        opened.append(os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        return furnish()

    try:
        made = await _in_thread(make)
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    return opened[0], made


def keep(namespace: Path, pid: int) -> None:
    """Make sure that this is where the namespace of a process is to be found. Who started the process may have seen other
    mounts than we do."""
    its = Path(f"/proc/{pid}/ns/net")
    try:
        if namespace.stat().st_ino == its.stat().st_ino:
            return
    except FileNotFoundError:
        pass
    remove(namespace)
    _mount(its, namespace)


def _mount(source: Path, namespace: Path) -> None:
    _prepare(namespace.parent)
    namespace.touch(mode=0o444, exist_ok=False)
    try:
        mounted = _libc.mount(os.fsencode(source), os.fsencode(namespace), None, _MS_BIND, None)
        _check(mounted, f"cannot keep a network namespace at {namespace}")
    except BaseException:
        remove(namespace)
        raise


def _prepare(directory: Path) -> None:
    """As `ip netns` does before its first one, which would otherwise mount the directory over itself and hide ours."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    name = os.fsencode(directory)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _libc.mount(b"", name, b"none", _MS_SHARED | _MS_REC, None) == 0:
            return
        if ctypes.get_errno() != errno.EINVAL:  # that would be: it is no mount
            _check(-1, f"cannot share {directory}")
        _check(_libc.mount(name, name, b"none", _MS_BIND | _MS_REC, None), f"cannot mount {directory}")
        _check(_libc.mount(b"", name, b"none", _MS_SHARED | _MS_REC, None), f"cannot share {directory}")
    finally:
        os.close(fd)


def remove(namespace: Path) -> None:
    """Idempotent. It ends when nobody is inside any more, with all its interfaces."""
    while _libc.umount2(os.fsencode(namespace), _MNT_DETACH) == 0:
        pass
    namespace.unlink(missing_ok=True)


async def _in_thread(work: Callable[[], T]) -> T:
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                done.set_exception(error)
        else:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                done.set_result(result)

    threading.Thread(target=run, name="in a slot", daemon=True).start()
    future = asyncio.wrap_future(done)
    cancelled: asyncio.CancelledError | None = None
    # Also if we are cancelled, and again: what is undone next must not be done behind our back.
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # it was seen
        raise cancelled
    return future.result()


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
