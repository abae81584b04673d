"""Finding the daemon, and starting the one of this machine if it does not run.

Owns: where the API is and which key to present. Blocking code (the async client calls it in a thread). Order: what the
caller passed; `FORKYARD_URL` and `FORKYARD_API_KEY`; the unix socket and the key file of this machine. Only in the last
case is a daemon ever started, only by root, and only where the server is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import ipaddress
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from forkyard.errors import DaemonUnreachable, InvalidRequest
from forkyard.models import Health
from forkyard.sdk._sync.runtime import unix_transport
from forkyard.settings import ClientSettings, Settings

Progress = Callable[[str], None]
_log = logging.getLogger("forkyard")

#: The first start builds the base image and the default template.
START_S = 1800.0


@dataclass(frozen=True)
class Endpoint:
    base_url: str
    socket: Path | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """For messages."""
        return str(self.socket) if self.socket else self.base_url

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def behind_proxies(self) -> bool:
        """Proxies of the environment are for the outside; a loopback address must never be sent to one."""
        host = urlsplit(self.base_url).hostname or ""
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost"

    def websocket_url(self, path_and_query: str) -> str:
        return "ws" + self.base_url.removeprefix("http") + path_and_query


def find(
    url: str | None = None, api_key: str | None = None, *, start: bool = True, progress: Progress | None = None
) -> Endpoint:
    """Where the daemon is. `DaemonUnreachable` if it should be on this machine, is not, and cannot be started."""
    client = ClientSettings()
    url = url or client.url
    api_key = api_key or client.api_key
    if url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{url!r} is not the URL of a daemon. It looks like http://127.0.0.1:7070.", url=url)
        return Endpoint(url.rstrip("/"), api_key=api_key)
    settings = Settings()
    socket = settings.api_socket
    health = probe(socket)
    if health is None or health.status != "ok":
        if health is None and not start:
            raise DaemonUnreachable(
                f"No Forkyard daemon runs on this machine ({socket}). Start one: forkyard up. Or set FORKYARD_URL."
            )
        _start_and_wait(settings, progress or _say)
    return Endpoint("http://forkyard", socket=socket, api_key=api_key or _read_key(settings.key_file))


def at_socket(socket: Path, api_key: str | None, key_file: Path | None) -> Endpoint:
    if not socket.exists():
        raise DaemonUnreachable(f"There is no daemon at {socket}. Start it, or give the socket of another.")
    return Endpoint("http://forkyard", socket=socket, api_key=api_key or (_read_key(key_file) if key_file else None))


def probe(socket: Path, timeout_s: float = 5.0) -> Health | None:
    """What the daemon on this socket says of itself; None if there is none."""
    if not socket.exists():
        return None
    try:
        with httpx.Client(transport=unix_transport(socket), timeout=timeout_s) as client:
            answer = client.get("http://forkyard/api/v1/health")
        return Health.model_validate_json(answer.content) if answer.is_success else None
    except (httpx.HTTPError, ValueError):
        return None


def _read_key(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DaemonUnreachable(
            f"The daemon's key in {path} cannot be read ({exc.strerror}). Set FORKYARD_API_KEY, or run as root."
        ) from exc


def _start_and_wait(settings: Settings, progress: Progress) -> None:
    socket = settings.api_socket
    if importlib.util.find_spec("forkyard.daemon") is None or importlib.util.find_spec("uvicorn") is None:
        raise DaemonUnreachable(
            f"No Forkyard daemon runs on this machine ({socket}), and the server is not installed here. "
            "Set FORKYARD_URL, or install it: pip install 'forkyard[server]'."
        )
    if os.geteuid() != 0:
        raise DaemonUnreachable(
            f"No Forkyard daemon runs on this machine ({socket}). "
            "Start one as root: sudo forkyard up. Or set FORKYARD_URL."
        )
    log = settings.state_dir / "daemon.log"
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    with _only_one(settings.state_dir / "start.lock"):
        daemon: subprocess.Popen[bytes] | None = None
        if probe(socket) is None:
            progress(f"No daemon runs yet; starting one (log: {log}).")
            with log.open("ab") as out:
                daemon = subprocess.Popen(
                    [sys.executable, "-m", "forkyard.daemon"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd="/",
                )
        _wait_until_ready(socket, daemon, log, progress)


def _wait_until_ready(
    socket: Path, daemon: subprocess.Popen[bytes] | None, log: Path, progress: Progress, start_s: float = START_S
) -> None:
    began = told = time.monotonic()
    while (now := time.monotonic()) - began < start_s:
        health = probe(socket)
        if health is not None and health.status == "ok":
            if daemon is not None:
                # It outlives us, or ends before us and must not stay a zombie.
                threading.Thread(target=daemon.wait, daemon=True, name="forkyard-daemon-reaper").start()
            return
        if daemon is not None and daemon.poll() is not None:
            raise DaemonUnreachable(
                f"The daemon ended while it was starting (exit code {daemon.returncode}). "
                f"The end of {log}:\n{_tail(log)}"
            )
        if now - told >= 2:
            told = now
            progress(f"starting, {now - began:.0f} s: {_tail(log, lines=1)}")
        time.sleep(0.05 if now - began < 2 else 0.5)
    raise DaemonUnreachable(f"The daemon was not ready after {start_s:.0f} s. See {log}.")


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Of several clients that find no daemon, one starts it and the others wait."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tail(log: Path, lines: int = 12, window_bytes: int = 16384) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - window_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])


def _say(message: str) -> None:
    if sys.stderr.isatty():
        print(f"forkyard: {message}", file=sys.stderr, flush=True)
    else:
        _log.info(message)
