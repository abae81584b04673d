"""What a guest takes over from its host: package sources, proxies, certificates, registries of pip, npm and uv.

Owns: reading the host's own configuration, so that no mirror is ever named in this code, and deciding what of it may
enter an image. Only http(s) addresses without credentials do, and none that means the host itself: every user of a
sandbox can read them, and `localhost` is another machine in there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from forkyard.errors import ImageBuildFailed
from forkyard.images.process import run

CA_DIR = Path("/usr/local/share/ca-certificates")
DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

_QUERY_TIMEOUT_S = 60
_KEPT_SOURCE_OPTIONS = ("signed-by", "trusted", "check-valid-until")
#: Where uv finds other Pythons: its variables, and what they are called in its file.
UV_PYTHON = {
    "UV_PYTHON_INSTALL_MIRROR": "python-install-mirror",
    "UV_PYTHON_DOWNLOADS_JSON_URL": "python-downloads-json-url",
}
_INDEX_FIELDS = ("ORIGIN", "LABEL", "CODENAME", "COMPONENT", "REPO_URI", "SOURCESENTRY")


@dataclass(frozen=True)
class AptSource:
    uri: str
    suite: str
    components: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def line(self, *, public: bool = False) -> str:
        """As in sources.list(5); `public` leaves credentials out."""
        options = " ".join(f"{name}={value}" for name, value in self.options)
        uri = without_credentials(self.uri) if public else self.uri
        return f"deb [{options}] {uri} {self.suite} {' '.join(self.components)}"

    @property
    def keyrings(self) -> list[str]:
        return [path for name, value in self.options if name == "signed-by" for path in value.split(",")]


@dataclass(frozen=True)
class HostConfig:
    apt_sources: tuple[AptSource, ...]
    apt_options: Mapping[str, str] = field(default_factory=dict)
    ca_certificates: Mapping[str, bytes] = field(default_factory=dict)
    pip: Mapping[str, str] = field(default_factory=dict)
    npm: Mapping[str, str] = field(default_factory=dict)
    uv_python: Mapping[str, str] = field(default_factory=dict)

    @property
    def portable_apt_options(self) -> dict[str, str]:
        return {
            name: value
            for name, value in self.apt_options.items()
            if "::proxy" in name.lower() and (value == "DIRECT" or is_portable(value))
        }


async def read_host_config(codename: str) -> HostConfig:
    """The host's configuration, for a guest of the Debian release `codename`."""
    targets, acquire, pip, npm, certificates = await asyncio.gather(
        run("apt-get", "indextargets", "--format", _index_format(), "Created-By: Packages", timeout_s=_QUERY_TIMEOUT_S),
        run("apt-config", "dump", "Acquire", timeout_s=_QUERY_TIMEOUT_S),
        _pip_config(),
        run("npm", "config", "list", "--json", timeout_s=_QUERY_TIMEOUT_S),
        asyncio.to_thread(read_ca_certificates),
    )
    return HostConfig(
        apt_sources=tuple(debian_sources(targets, codename, await asyncio.to_thread(_source_files, targets))),
        apt_options=acquire_options(acquire),
        ca_certificates=certificates,
        pip=pip_settings(pip),
        npm=npm_settings(npm),
        uv_python=await asyncio.to_thread(read_uv_python),
    )


def read_ca_certificates(directory: Path = CA_DIR) -> dict[str, bytes]:
    """The administrator's own certificate authorities, by file name relative to `directory`."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*.crt"))}


def is_portable(url: str) -> bool:
    """Whether an address means the same in a guest and gives nothing away."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    local = host in ("", "localhost", "::1") or host.startswith("127.")
    return parts.scheme in ("http", "https") and not local and "@" not in parts.netloc and not parts.query


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _index_format() -> str:
    return "|".join(f"$({name})" for name in _INDEX_FIELDS)


def debian_sources(targets: str, codename: str, source_files: Mapping[str, str]) -> list[AptSource]:
    """The host's sources of Debian itself, for the guest's release.

    `targets` is what `apt-get indextargets` says; other vendors' archives are told by their origin. `source_files` are
    the texts of the files the sources are in, by path.
    """
    components: dict[tuple[str, str], list[str]] = {}
    options: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {}
    for line in targets.splitlines():
        origin, label, host_codename, component, uri, entry = line.split("|")
        scheme = urlsplit(uri).scheme
        if origin != "Debian" or label not in ("Debian", "Debian-Security") or scheme not in ("http", "https"):
            continue
        _, dash, pocket = host_codename.partition("-")
        key = (uri, f"{codename}{dash}{pocket}")
        if component not in components.setdefault(key, []):
            components[key].append(component)
        file, _, position = entry.rpartition(":")
        options.setdefault(key, source_options(source_files.get(file, ""), int(position), file.endswith(".sources")))
    if not any(suite == codename for _, suite in components):
        raise ImageBuildFailed(
            "apt on this host knows no http(s) archive of Debian, so there is nothing to build the base image from. "
            "Run `apt-get update`; if that does not help, add Debian's main archive to /etc/apt/sources.list.d."
        )
    return [AptSource(uri, suite, tuple(found), options[uri, suite]) for (uri, suite), found in components.items()]


def source_options(text: str, position: int, deb822: bool) -> tuple[tuple[str, str], ...]:
    """How apt is to trust one source: `position` is its stanza in a .sources file, its line in a .list file."""
    found: dict[str, str] = {}
    if deb822:
        lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        stanzas = [stanza for stanza in re.split(r"\n\s*\n", lines) if stanza.strip()]
        fields = stanzas[position - 1].splitlines() if position <= len(stanzas) else []
        pairs: Iterable[tuple[str, str]] = ((name, ",".join(value.split())) for name, _, value in _split(fields, ":"))
    else:
        lines_ = text.splitlines()
        bracket = re.search(r"\[(.*?)\]", lines_[position - 1]) if position <= len(lines_) else None
        pairs = ((name, value) for name, _, value in _split(bracket[1].split() if bracket else [], "="))
    for name, value in pairs:
        if name.lower() in _KEPT_SOURCE_OPTIONS and value:
            found[name.lower()] = value
    # A key pasted into the source, or none: Debian's own keyring, which every Debian has.
    if not found.get("signed-by", "").startswith("/"):
        found["signed-by"] = DEBIAN_KEYRING
    return tuple(found.items())


def _split(lines: Iterable[str], separator: str) -> list[tuple[str, str, str]]:
    return [line.partition(separator) for line in lines]


def _source_files(targets: str) -> dict[str, str]:
    files = {line.rpartition("|")[2].rpartition(":")[0] for line in targets.splitlines()}
    return {file: Path(file).read_text() for file in files if file and Path(file).is_file()}


def acquire_options(dump: str) -> dict[str, str]:
    """How apt reaches archives (proxies, certificates, time-outs), from `apt-config dump Acquire`."""
    found = re.findall(r'^(Acquire::https?::\S+) "(.+)";$', dump, re.MULTILINE)
    return {name: value for name, value in found if "auto-detect" not in name.lower()}


async def _pip_config() -> str:
    for python in (sys.executable, "python3"):
        try:
            return await run(python, "-m", "pip", "config", "list", timeout_s=_QUERY_TIMEOUT_S)
        except ImageBuildFailed:
            continue
    return ""


def pip_settings(config_list: str) -> dict[str, str]:
    """Package indexes from `pip config list`; the environment wins over files, as in pip."""
    found: dict[str, str] = {}
    for section, name, value in re.findall(r"^(\S*?)\.([a-z-]+)='(.*)'$", config_list, re.MULTILINE):
        if name in ("index-url", "extra-index-url"):
            urls = [url for url in value.replace("\\n", " ").split() if is_portable(url)]
            if urls and (section == ":env:" or name not in found):
                found[name] = " ".join(urls)
    return found


def read_uv_python() -> dict[str, str]:
    """Where this host's own uv finds Pythons: from its variables, and files. Read anew each time: it costs nothing, and
    somebody who sets one will not want to make a new image for it."""
    home = os.environ.get("XDG_CONFIG_HOME") or f"{os.environ.get('HOME', '/root')}/.config"
    places = [os.environ.get("UV_CONFIG_FILE"), f"{home}/uv/uv.toml", "/etc/uv/uv.toml"]
    texts = [Path(place).read_text(errors="replace") for place in places if place and Path(place).is_file()]
    return uv_python_settings(os.environ, texts)


def uv_python_settings(variables: Mapping[str, str], files: Sequence[str]) -> dict[str, str]:
    """By variable. `files`: the first that says something counts, the environment before all."""
    found = {}
    parsed = [_toml(text) for text in files]
    for variable, name in UV_PYTHON.items():
        said = [variables.get(variable), *(file.get(name) for file in parsed)]
        first = next((value for value in said if value), "")
        if isinstance(first, str) and is_portable(first):
            found[variable] = first
    return found


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def npm_settings(config_json: str) -> dict[str, str]:
    """Registries (also those of scopes) and proxies from `npm config list --json`."""
    config = json.loads(config_json)
    return {
        name: value
        for name, value in config.items()
        if (name in ("registry", "proxy", "https-proxy") or name.endswith(":registry"))
        and isinstance(value, str)
        and is_portable(value)
    }
