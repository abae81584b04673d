"""Package managers: how one gets into a machine that lacks it, and what it is told to install. Pure.

Each comes from the registry of a client that is in the machine already: npm's, or pip's. What stands in a repository is a
stranger's: whatever is not as it should be counts as not there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from forkyard.models.specs import LOCKFILES, Manager

#: Files whose text is looked at, where they are.
READ = ("package.json", "pnpm-lock.yaml", "yarn.lock", ".yarnrc.yml")
#: Which pnpm and which Yarn write a lockfile of this version, and so leave it as it is.
_PNPM = {"5": "7", "6": "8"}
_YARN = {4: "~3.0", 5: "~3.1", 6: "3", 7: "3", 8: ">=4 <4.14", 9: "~4.14"}
#: Runs on Node.js 18 and later, and is small; newer ones read what it writes.
_NEW_PNPM, _NEW_YARN = "10", "4"

UV = "command -v uv >/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --no-input uv"
#: Of the project, which `Tool("pip").script` makes first.
PIP = ".venv/bin/pip install --no-input"
#: With a copy of the machine's pip, which is compiled already: to compile one takes minutes on an emulated machine.
_VENV = (
    "python3 -m venv --without-pip .venv && "
    "if pip=$(python3 -c 'import os, pip; print(os.path.dirname(pip.__file__))' 2>/dev/null); then "
    """cp -a "$pip" "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/" && """
    """printf '#!/bin/sh\\nexec "%s/.venv/bin/python" -m pip "$@"\\n' "$PWD" > .venv/bin/pip && """
    "chmod +x .venv/bin/pip && ln -sf pip .venv/bin/pip3; "
    "else .venv/bin/python -m ensurepip --default-pip; fi"
)
#: Yarn 1 goes where its lockfile says, which is mostly the registry it has by default. That one, and npm's, are replaced
#: by the registry of this machine for as long as it installs, as npm does it by itself.
_CLASSIC = """\
bare() ( cd / && exec env -i "PATH=$PATH" HOME=/nonexistent PREFIX=/nonexistent "$@" )
default=$(bare yarn config get registry) && registry=$(yarn config get registry) || exit
if [ "$registry" = "$default" ]; then registry=$(npm config get registry); fi
if [ -f yarn.lock ]; then
  kept=$(mktemp) && cat yarn.lock > "$kept" || exit
  trap 'cat "$kept" > yarn.lock; rm -f "$kept"' EXIT
  for from in "$default" "$(bare npm config get registry)"; do
    sed -i "s|^\\\\(  resolved \\"\\\\)${from%/}/|\\\\1${registry%/}/|" yarn.lock
  done
fi
export YARN_REGISTRY="$registry" YARN_IGNORE_PATH=1
"""
#: Newer ones do not read npm's configuration.
_MODERN = """\
export YARN_ENABLE_TELEMETRY=0 YARN_IGNORE_PATH=1
grep -qs npmRegistryServer .yarnrc.yml ~/.yarnrc.yml || export YARN_NPM_REGISTRY_SERVER="$(npm config get registry)"
"""


@dataclass(frozen=True)
class Tool:
    """A package manager, as a repository wants it."""

    manager: Manager
    version: str | None = None
    """As it is asked for: `9.1.0`, or a range of npm's. None: whichever is there."""

    @property
    def modern_yarn(self) -> bool:
        return self.manager == "yarn" and self.version is not None and re.match(r"[01](\.|$)", self.version) is None

    @property
    def fetch(self) -> str | None:
        """Run as root, where it does not matter: everybody has it then. None: every machine with the language has it."""
        if self.manager == "uv":
            return UV
        if self.manager == "bun":
            return _unless("bun", "?*", "bun")
        if self.manager == "pnpm":
            return _unless("pnpm", _pattern(self.version), f"pnpm@{self.version or _NEW_PNPM}")
        if self.modern_yarn:
            return _unless("yarn", _pattern(self.version), f"@yarnpkg/cli-dist@{self.version}")
        if self.manager == "yarn":
            return _unless("yarn", _pattern(self.version or "1"), f"yarn@{self.version or '1'}")
        return None

    def install(self, lockfile: str | None) -> str:
        """What people would type."""
        frozen = " --frozen-lockfile" if lockfile is not None else ""
        if self.manager == "npm":
            return f"npm {'ci' if lockfile is not None else 'install'} --no-audit --no-fund"
        if self.manager == "uv":
            return f"uv sync{' --frozen' if lockfile is not None else ''}"
        if self.manager == "pip":
            return f"{PIP} -r {shlex.quote(lockfile or 'requirements.txt')}"
        if self.modern_yarn:
            return f"yarn install{' --immutable' if lockfile is not None else ''}"
        return f"{self.manager} install{' --non-interactive' if self.manager == 'yarn' else ''}{frozen}"

    def script(self, install: str) -> str:
        """`install`, with what must be so around it."""
        if self.manager == "pip":
            return f"{_VENV} && {install}"
        if self.manager == "yarn":
            return f"{_MODERN if self.modern_yarn else _CLASSIC}{install}"
        return install


def wanted(manager: Manager, texts: Mapping[str, str]) -> Tool:
    """What `packageManager` says, else what the lockfile was written by. `texts`: of those in `READ` that are there."""
    said = declared(parsed(texts.get("package.json", "")))
    if said is not None and said.manager == manager:
        return said
    if manager == "pnpm":
        written = re.search(r"^lockfileVersion: *['\"]?(\d+)", texts.get("pnpm-lock.yaml", ""), re.M)
        return Tool(manager, _PNPM.get(written[1]) if written is not None else None)
    if manager == "yarn":
        own = re.search(r"^yarnPath:.*\byarn-(\d+\.\d+\.\d+)\.c?js", texts.get(".yarnrc.yml", ""), re.M)
        if own is not None:
            return Tool(manager, own[1])
        written = re.search(r"^__metadata:\n  version: *(\d{1,4})\b", texts.get("yarn.lock", ""), re.M)
        if written is not None:
            return Tool(manager, _YARN.get(int(written[1]), _NEW_YARN))
        if ".yarnrc.yml" in texts and "yarn.lock" not in texts:
            return Tool(manager, _NEW_YARN)
    return Tool(manager)


def declared(package: Mapping[str, Any]) -> Tool | None:
    """By `packageManager`."""
    said = package.get("packageManager")
    found = re.match(r"(npm|pnpm|yarn|bun)@([0-9][0-9A-Za-z.-]*)", said) if isinstance(said, str) else None
    return None if found is None else Tool(found[1], found[2])  # type: ignore[arg-type]


def by_lockfile(names: Collection[str]) -> Manager | None:
    """Of the lockfiles there are, whose."""
    order: tuple[Manager, ...] = ("bun", "pnpm", "yarn", "npm")
    there = {manager for lockfile, manager in LOCKFILES.items() if lockfile in names}
    return next((manager for manager in order if manager in there), None)


def parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unless(program: str, pattern: str, package: str) -> str:
    """Not in the repository's directory: there it may be another, which it says there."""
    fetch = f"npm install --global --force --no-audit --no-fund --loglevel=error {shlex.quote(package)}"
    return f'case "$(cd / && {program} --version 2>/dev/null)" in {pattern}) ;; *) {fetch} ;; esac'


def _pattern(version: str | None) -> str:
    """Of what `--version` prints, if it will do. For a range nothing does: npm knows whether it is there."""
    if version is None:
        return "?*"
    return f"{version}|{version}.*" if re.fullmatch(r"[0-9A-Za-z.-]+", version) else "-"
