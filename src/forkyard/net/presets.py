"""Which names a preset opens.

Owns: the git hosts of the preset `coding`, and asking the package managers of this host where their packages come from.
No registry is named here: a mirror that the host uses is what its sandboxes use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import structlog

log = structlog.get_logger(__name__)

#: Where repositories are cloned from, and where their archives and large files are.
GIT_HOSTS = frozenset(
    {
        *("github.com", "*.github.com", "*.githubusercontent.com", "ghcr.io"),
        *("gitlab.com", "*.gitlab.com"),
        *("bitbucket.org", "*.bitbucket.org"),
        *("codeberg.org", "*.codeberg.org"),
    }
)
_QUERY_TIMEOUT_S = 30
_FETCH_TIMEOUT_S = 2
_CONFIG_BYTES = 65536
_LIST_BYTES = 16 * 2**20
_HOST = re.compile(r"[a-z0-9_.-]+")  # a name, of one label too, or an address
_URL = re.compile(r"https?://[^\s'\"`<>|]+")


#: A change of a package manager's configuration counts after this long at the latest, if the daemon is started again.
KEPT_S = 600.0


@dataclass(frozen=True)
class Presets:
    """`registries` are names that this host itself gets packages from; they may be on a private network."""

    registries: frozenset[str] = frozenset()
    git_hosts: frozenset[str] = GIT_HOSTS
    research_bytes_per_s: int = 16 << 20
    research_connections_per_minute: int = 600


async def read_presets(kept: Path | None = None, downloads: Iterable[str] = ()) -> Presets:
    """Asks the package managers of this host. One that is not installed, or does not answer, adds nothing. They take
    seconds: a daemon that is started again soon takes what they said, `kept` in this file. `downloads`: other addresses
    that this host downloads from, or lists of them in JSON."""
    listed = asyncio.gather(*(asyncio.to_thread(download_hosts, url) for url in downloads))
    registries = _recent(kept) if kept else None
    if registries is None:
        registries = frozenset[str]().union(*await asyncio.gather(_apt(), _pip(), _npm(), _cargo()))
        if kept is not None:
            fresh = kept.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(sorted(registries)))
            fresh.rename(kept)
    return Presets(registries=registries.union(*await listed))


def _recent(kept: Path) -> frozenset[str] | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        if 0 <= time.time() - kept.stat().st_mtime < KEPT_S:
            return frozenset(str(name) for name in json.loads(kept.read_text()))
    return None


def download_hosts(url: str) -> frozenset[str]:
    """Of an address, and of those in the list that is there."""
    found = hosts_of([url])
    if found and urlsplit(url).path.endswith(".json"):
        try:
            with urllib.request.urlopen(url, timeout=_FETCH_TIMEOUT_S) as answer:
                text = answer.read(_LIST_BYTES).decode(errors="replace")
            found |= hosts_of(re.findall(r'"url"\s*:\s*"([^"\\]+)"', text))
        except (OSError, ValueError) as error:
            log.info("a list of downloads cannot be read; only its own host is open", error=str(error))
    return found


def hosts_of(urls: Iterable[str]) -> frozenset[str]:
    """Host names of web addresses, those that mean this machine left out."""
    hosts = set()
    for url in urls:
        with contextlib.suppress(ValueError):
            host = (urlsplit(url).hostname or "").rstrip(".").lower()
            if _HOST.fullmatch(host) and host != "localhost" and not host.endswith(".localhost"):
                hosts.add(host)
    return frozenset(hosts)


def apt_hosts(indextargets: str) -> frozenset[str]:
    return hosts_of(indextargets.split())


def pip_hosts(config_list: str, default: frozenset[str] = frozenset()) -> frozenset[str]:
    """From `pip config list`. `default`: pip's own index and where its files are. That counts where no other is configured,
    where it is itself, and where guests do not take the other over: its address has a password in it."""
    found = re.findall(r"^\S*?\.(index-url|extra-index-url|find-links)='(.*)'$", config_list, re.MULTILINE)
    urls = [(option, url) for option, value in found for url in _URL.findall(value.replace("\\n", " "))]
    hosts = hosts_of(url for _, url in urls)
    replaced = any(option == "index-url" and "@" not in url for option, url in urls)
    return hosts if replaced and not hosts & default else hosts | default


def npm_hosts(config_json: str) -> frozenset[str]:
    """From `npm config list --json`, which has the registries of scopes too."""
    config = json.loads(config_json)
    return hosts_of(
        value
        for name, value in config.items()
        if (name == "registry" or name.endswith(":registry")) and isinstance(value, str)
    )


async def _apt() -> frozenset[str]:
    return await _ask(("apt-get", "indextargets", "--format", "$(SITE)"), apt_hosts)


async def _pip() -> frozenset[str]:
    for python in (sys.executable, "python3"):
        default = "from pip._internal.models.index import PyPI; print(PyPI.simple_url, PyPI.file_storage_domain)"
        own = await _ask((python, "-c", default), _default_index)
        if found := await _ask((python, "-m", "pip", "config", "list"), partial(pip_hosts, default=own)):
            return found
    return frozenset()


def _default_index(printed: str) -> frozenset[str]:
    simple_url, _, files = printed.strip().partition(" ")
    return hosts_of((simple_url, f"https://{files}"))


async def _npm() -> frozenset[str]:
    return await _ask(("npm", "config", "list", "--json"), npm_hosts)


async def _cargo() -> frozenset[str]:
    """Cargo has no way to say which registry it would use. So it is sent to fetch something with the way out barred, and
    names in its complaint what it wanted."""
    with tempfile.TemporaryDirectory(prefix="forkyard-cargo-") as directory:
        manifest = '[package]\nname = "x"\nversion = "0.0.0"\nedition = "2021"\n[lib]\npath = "x.rs"\n'
        await asyncio.to_thread(_write, Path(directory), manifest + '[dependencies]\nlibc = "*"\n')
        barred = {
            "CARGO_HTTP_PROXY": "http://127.0.0.1:1",
            "CARGO_NET_RETRY": "0",
            "CARGO_NET_GIT_FETCH_WITH_CLI": "false",
        }
        command = ("cargo", "generate-lockfile", "--manifest-path", f"{directory}/Cargo.toml")
        urls = await _ask(command, lambda complaint: frozenset(_URL.findall(complaint)), env=barred, may_fail=True)
    found = hosts_of(urls)
    for url in urls:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                found |= await asyncio.to_thread(_download_host, url)
    return found


def _download_host(url: str) -> frozenset[str]:
    """Where a cargo registry has its archives: its index says so."""
    if not url.endswith("/config.json"):
        return frozenset()
    try:
        with urllib.request.urlopen(url, timeout=_FETCH_TIMEOUT_S) as answer:
            return hosts_of([str(json.loads(answer.read(_CONFIG_BYTES))["dl"])])
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.info("a cargo registry did not say where its archives are", error=str(error))
        return frozenset()


def _write(directory: Path, manifest: str) -> None:
    (directory / "Cargo.toml").write_text(manifest)
    (directory / "x.rs").touch()


async def _ask(
    command: tuple[str, ...],
    read: Callable[[str], frozenset[str]],
    *,
    env: dict[str, str] | None = None,
    may_fail: bool = False,
) -> frozenset[str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if may_fail else asyncio.subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
        )
    except OSError:
        return frozenset()
    try:
        async with asyncio.timeout(_QUERY_TIMEOUT_S):
            output, _ = await process.communicate()
        return read(output.decode(errors="replace")) if may_fail or process.returncode == 0 else frozenset()
    except (TimeoutError, ValueError) as error:
        log.warning("a package manager did not say where its packages come from", tool=command[0], error=str(error))
        return frozenset()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
