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
import ssl
import sys
from collections.abc import AsyncIterator, Iterator

import structlog
from starlette.types import Scope

from forkyard import faults
from forkyard.api.app import create_app
from forkyard.api.inside import InsideGit
from forkyard.builds.builds import Builds
from forkyard.builds.runs import Runs
from forkyard.builds.schedules import Schedules
from forkyard.compat.e2b.facade import E2b
from forkyard.compat.freestyle.facade import Freestyle
from forkyard.control.placement import Limits
from forkyard.control.plane import ControlPlane
from forkyard.control.previews import Address
from forkyard.control.secrets import Vault
from forkyard.dev.actions import dev_servers
from forkyard.errors import Conflict, ForkyardError, HostFailure
from forkyard.gateway import ssh, tls
from forkyard.gateway.certificates import Brought
from forkyard.gateway.preview import Gateway
from forkyard.gateway.server import Server, configured, raise_file_limit
from forkyard.gateway.shortcut import Client, Shortcut
from forkyard.git.automation import Outward
from forkyard.git.deliveries import Patience
from forkyard.git.hosting import GitHosting
from forkyard.guest.client import connect
from forkyard.host.doorway import NewDoor, Sink
from forkyard.host.images import log_progress
from forkyard.host.local import LocalHost
from forkyard.host.registries import Registries
from forkyard.images import BaseImage, Progress, ensure_base_image
from forkyard.images.hostconfig import read_uv_python
from forkyard.models import Check, Shape
from forkyard.net.authority import Authority
from forkyard.net.base import Listeners, Network, OwnerOf
from forkyard.net.door import Door
from forkyard.net.http import HttpInterceptor
from forkyard.net.outside import Interceptor, Outside
from forkyard.net.presets import Presets, read_presets
from forkyard.net.recordings import Recordings, Room
from forkyard.net.resolver import HostResolver
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


async def local_host(
    settings: Settings, progress: Progress = log_progress, interceptor: Interceptor | None = None
) -> LocalHost:
    """This machine as a host. Builds the base image if it is not there: the probe of KVM boots its kernel. Without an
    `interceptor` nothing leaves its machines."""
    presets = None if interceptor is None else asyncio.create_task(_presets(settings))  # beside the rest
    image = await ensure_base_image(settings.cache_dir, progress)
    driver = await qemu_driver(settings, image)
    if presets is None:
        return LocalHost(settings, driver, connect, image)
    outside = Outside(HostResolver(), await presets, interceptor)
    registries = Registries(outside, settings.trusted_registries)
    return LocalHost(settings, driver, connect, image, doors(outside), registries.way)


async def _presets(settings: Settings) -> Presets:
    downloads = await asyncio.to_thread(read_uv_python)
    return await read_presets(settings.cache_dir / "registries.json", downloads.values())


def doors(outside: Outside) -> NewDoor:
    def new_door(sandbox_id: str, listeners: Listeners, network: Network, owner_of: OwnerOf, sink: Sink) -> Door:
        return Door(sandbox_id, listeners, network, owner_of, sink, outside)

    return new_door


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
    with _only_daemon(settings), _listening(settings) as sockets, _bound("127.0.0.1", 0, "") as inner:
        async with (
            _control_plane(settings, inner.getsockname()[1]) as control,
            _ssh_gateway(settings, control),
            _git_hosting(settings, control, sockets[0]) as hosting,
            _builds(settings, control) as builds,
            _schedules(control, builds) as (runs, schedules),
            dev_servers(control, hosting, builds) as servers,
            _serving_inside(InsideGit(hosting, control.inside), inner),
        ):
            plain, secure = sockets[:2], sockets[2:]
            names = settings.allowed_hosts.replace(",", " ").split()
            names += [settings.preview_domain] if settings.preview_domain else []
            gateway = Gateway(
                create_app(
                    control,
                    allowed_hosts=names,
                    hosting=hosting,
                    builds=builds,
                    dev_servers=servers,
                    runs=runs,
                    schedules=schedules,
                ),
                control,
                api_hosts=names,
            )
            control.previews.address = _address(settings, *(one.getsockname()[1] for one in (plain[0], *secure)))
            control.domains.nameservers = settings.nameservers
            freestyle = Freestyle(gateway, control, hosting, builds, runs, schedules, api_hosts=names)
            front = E2b(freestyle, control, builds, api_hosts=names)
            gateway.told_as = front.told_as

            def shortcut(scope: Scope, client: Client) -> bool:
                return not (front.wants(scope) or freestyle.wants(scope)) and gateway.shortcut(scope, client)

            server = Server(configured(front, grace_s=GRACE_S, shortcut=shortcut))
            tasks = [
                asyncio.create_task(_stop_when_asked(control, server)),
                asyncio.create_task(_prepare_default_shape(control)),
            ]
            host, port = plain[0].getsockname()[:2]
            log.info("serving", url=f"http://{host}:{port}", socket=str(settings.api_socket), accel=control.host.accel)
            try:
                async with _serving_tls(settings, control, front, shortcut, secure):
                    await server.serve(sockets=plain)
            finally:
                gateway.close()
                await front.aclose()
                await freestyle.aclose()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


def _address(settings: Settings, port: int, tls_port: int | None = None) -> Address:
    """How previews are reached from outside, unless the settings know better."""
    scheme = settings.preview_scheme or ("https" if settings.tls_cert_file else "http")
    own = tls_port if scheme == "https" and tls_port is not None else port
    return Address(settings.preview_domain or "localhost", scheme, settings.preview_port or own)


@contextlib.asynccontextmanager
async def _serving_tls(
    settings: Settings, control: ControlPlane, front: E2b, shortcut: Shortcut, sockets: list[socket.socket]
) -> AsyncIterator[None]:
    if not sockets:
        yield
        return
    config = configured(front, grace_s=GRACE_S, shortcut=shortcut)
    config.load()
    await control.domains.refresh()  # a handshake cannot wait for it
    config.ssl = await asyncio.to_thread(_tls_context, settings, control)
    server = Server(config, signals=False)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    host, port = sockets[0].getsockname()[:2]
    log.info("serving", url=f"https://{host}:{port}")
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def _tls_context(settings: Settings, control: ControlPlane) -> ssl.SSLContext:
    file, directory, brought = settings.tls_cert_file, settings.tls_cert_dir, None
    if file is not None or directory is not None:
        brought = Brought(None if file is None else (file, settings.tls_key_file or file), directory)
    assert control.authority is not None
    return tls.context(control.authority, control.previews.address.domain, control.domains.is_verified, brought)


@contextlib.asynccontextmanager
async def _control_plane(settings: Settings, inner_port: int) -> AsyncIterator[ControlPlane]:
    store = await Store.open(settings.state_dir / "forkyard.db")
    try:
        authority = await asyncio.to_thread(Authority.load_or_make, settings.state_dir)
        room = Room(settings.recording_mib * 2**20, settings.recordings_mib * 2**20)
        recordings = Recordings(settings.state_dir / "recordings", room)
        interceptor = HttpInterceptor(authority, recordings, settings.extra_ca_file)
        control = ControlPlane(
            store,
            await local_host(settings, interceptor=interceptor),
            Limits.of(settings),
            vault=await asyncio.to_thread(Vault.load_or_make, settings.secrets_key_file),
            authority=authority,
            recordings=recordings,
        )
        control.inside.port = inner_port
        await control.keys.ensure_file(settings.key_file)
        await control.start()
        try:
            yield control
        finally:
            await control.stop(destroy=control.stop_destroys)
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _ssh_gateway(settings: Settings, control: ControlPlane) -> AsyncIterator[None]:
    if not settings.ssh:
        yield
        return
    async with ssh.serve(control, settings.listen_host, settings.ssh_port, settings.ssh_host_key) as listening:
        log.info("serving ssh", host=listening.host, port=listening.port)
        yield


@contextlib.asynccontextmanager
async def _git_hosting(
    settings: Settings, control: ControlPlane, listening: socket.socket
) -> AsyncIterator[GitHosting]:
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    hosting = GitHosting(
        control.ground.store,
        control.identities,
        settings.state_dir / "git",
        control=control,
        quota_bytes=settings.git_quota_mib * 2**20,
        url=f"http://{shown}:{port}",
        outward=Outward(
            allow_private=settings.git_allow_private,
            webhook_timeout_s=settings.webhook_timeout_s,
            patience=Patience(settings.webhook_tries, settings.webhook_backoff_s),
            extra_ca_file=settings.extra_ca_file,
            github_api=settings.github_api_url.rstrip("/"),
        ),
        outside=Outside(HostResolver(), await _presets(settings)),
        mirrors_bytes=int(settings.git_mirrors_gib * 2**30),
    )
    await hosting.start()
    try:
        yield hosting
    finally:
        await hosting.stop()


@contextlib.asynccontextmanager
async def _builds(settings: Settings, control: ControlPlane) -> AsyncIterator[Builds]:
    budget_gib = settings.layers_budget_gib
    builds = Builds(
        control,
        settings.state_dir / "builds",
        budget_bytes=None if budget_gib is None else int(budget_gib * 2**30),
    )
    await builds.start()
    try:
        yield builds
    finally:
        await builds.stop()


@contextlib.asynccontextmanager
async def _schedules(control: ControlPlane, builds: Builds) -> AsyncIterator[tuple[Runs, Schedules]]:
    runs = Runs(control, builds)
    schedules = Schedules(control, runs)
    await runs.start()
    await schedules.start()
    try:
        yield runs, schedules
    finally:
        await schedules.stop()


@contextlib.asynccontextmanager
async def _serving_inside(app: InsideGit, listening: socket.socket) -> AsyncIterator[None]:
    """For the doors of sandboxes, and nobody else."""
    server = Server(configured(app, grace_s=GRACE_S), signals=False)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def _stop_when_asked(control: ControlPlane, server: Server) -> None:
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
    """TCP, unix, and TLS if there is a port for it."""
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(_bound(settings.listen_host, settings.listen_port, "FORKYARD_LISTEN_PORT"))
        secure = []
        if settings.tls_port is not None:
            secure = [stack.enter_context(_bound(settings.listen_host, settings.tls_port, "FORKYARD_TLS_PORT"))]
        unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        settings.api_socket.unlink(missing_ok=True)
        unix.bind(str(settings.api_socket))
        stack.callback(settings.api_socket.unlink, missing_ok=True)
        settings.api_socket.chmod(0o600)
        yield [tcp, unix, *secure]


def _bound(host: str, port: int, setting: str) -> socket.socket:
    tcp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; else small answers may wait 40 ms
        tcp.bind((host, port))
    except OSError as error:
        tcp.close()
        raise HostFailure(f"cannot listen on {host}:{port}: {error.strerror}; set {setting} to another port") from error
    return tcp


def run(settings: Settings) -> None:
    configure(settings.log_level, json=settings.log_json)
    raise_file_limit()
    import uvloop

    uvloop.run(serve(settings))


if __name__ == "__main__":
    try:
        run(Settings())
    except ForkyardError as error:
        sys.exit(f"forkyard: {error.message}")
