"""The daemon: builds every part from the settings, connects them, and serves.

The composition root: nothing else decides which driver, store or host is used. `forkyard up` and `python -m
forkyard.daemon` run it. A stop (SIGTERM, SIGINT, `POST /api/v1/shutdown`) leaves VMs running, unless it asks to destroy
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import structlog
import uvicorn

from forkyard import faults
from forkyard.api.app import create_app
from forkyard.control.placement import Limits
from forkyard.control.plane import ControlPlane
from forkyard.errors import Conflict, ForkyardError, HostFailure
from forkyard.guest.client import connect
from forkyard.host.local import LocalHost, log_progress
from forkyard.images import BaseImage, Progress, ensure_base_image
from forkyard.models import Check, Shape
from forkyard.settings import Settings
from forkyard.store.sql import Store
from forkyard.telemetry.log import configure
from forkyard.vmm.qemu.driver import QemuDriver

log = structlog.get_logger(__name__)

#: Streams that are still open when the daemon stops get this long; their clients re-attach to the next daemon.
GRACE_S = 2


def prepare_directories(settings: Settings) -> None:
    """VMs run as users of their own: they may pass through these directories, not look into them."""
    for directory in (settings.state_dir, settings.cache_dir, settings.ram_dir):
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    settings.run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)


async def qemu_driver(settings: Settings, image: BaseImage) -> QemuDriver:
    return await QemuDriver.open(
        cache_dir=settings.cache_dir,
        scope=settings.scope,
        accel=settings.accel,
        tb_size_mib=settings.tb_size_mib,
        kernel=image.kernel,
    )


async def local_host(settings: Settings, progress: Progress = log_progress) -> LocalHost:
    """This machine as a host. Builds the base image if it is not there: the probe of KVM boots its kernel."""
    image = await ensure_base_image(settings.cache_dir, progress)
    return LocalHost(settings, await qemu_driver(settings, image), connect, image)


async def checks(settings: Settings) -> list[Check]:
    """What `forkyard doctor` says when no daemon runs."""
    daemon = Check(name="daemon", status="warning", summary="no daemon runs", advice="Start one: forkyard up")
    try:
        prepare_directories(settings)
        return [daemon, *await (await local_host(settings)).checks()]
    except ForkyardError as error:
        return [daemon, Check(name="host", status="failed", summary=error.message)]


async def serve(settings: Settings) -> None:
    faults.arm(settings.fault_file)
    prepare_directories(settings)
    with _only_daemon(settings), _listening(settings) as sockets:
        async with _control_plane(settings) as control:
            server = uvicorn.Server(
                uvicorn.Config(
                    create_app(control, allowed_hosts=settings.allowed_hosts.replace(",", " ").split()),
                    log_config=None,
                    lifespan="off",
                    timeout_graceful_shutdown=GRACE_S,
                    ws="websockets",
                )
            )
            stopper = asyncio.create_task(_stop_when_asked(control, server))
            warmer = asyncio.create_task(_prepare_default_shape(control))
            host, port = sockets[0].getsockname()[:2]
            log.info("serving", url=f"http://{host}:{port}", socket=str(settings.api_socket), accel=control.host.accel)
            try:
                await server.serve(sockets=sockets)
            finally:
                for task in (stopper, warmer):
                    task.cancel()
                await asyncio.gather(stopper, warmer, return_exceptions=True)


@contextlib.asynccontextmanager
async def _control_plane(settings: Settings) -> AsyncIterator[ControlPlane]:
    store = await Store.open(settings.state_dir / "forkyard.db")
    try:
        control = ControlPlane(store, await local_host(settings), Limits.of(settings))
        await control.keys.ensure_file(settings.key_file)
        await control.start()
        try:
            yield control
        finally:
            await control.stop(destroy=control.stop_destroys)
    finally:
        await store.close()


async def _stop_when_asked(control: ControlPlane, server: uvicorn.Server) -> None:
    await control.stop_requested.wait()
    server.should_exit = True


async def _prepare_default_shape(control: ControlPlane) -> None:
    """So that the first create of the usual shape does not wait."""
    try:
        await control.host.prepare(Shape())
    except ForkyardError as error:
        log.error("the default template is not ready", error=error.message)


@contextlib.contextmanager
def _only_daemon(settings: Settings) -> Iterator[None]:
    """Two daemons on one state directory would fight over its VMs."""
    fd = os.open(settings.state_dir / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another daemon already runs on {settings.state_dir}; stop it with `forkyard down`, "
                "or set FORKYARD_STATE_DIR"
            ) from None
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _listening(settings: Settings) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in settings.listen_host else socket.AF_INET
        tcp = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp.bind((settings.listen_host, settings.listen_port))
        except OSError as error:
            raise HostFailure(
                f"cannot listen on {settings.listen_host}:{settings.listen_port}: {error.strerror}; "
                "set FORKYARD_LISTEN_PORT to another port"
            ) from error
        unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        settings.api_socket.unlink(missing_ok=True)
        unix.bind(str(settings.api_socket))
        stack.callback(settings.api_socket.unlink, missing_ok=True)
        settings.api_socket.chmod(0o600)
        yield [tcp, unix]


def run(settings: Settings) -> None:
    configure(settings.log_level, json=settings.log_json)
    import uvloop

    uvloop.run(serve(settings))


if __name__ == "__main__":
    try:
        run(Settings())
    except ForkyardError as error:
        sys.exit(f"forkyard: {error.message}")
