"""Package managers on real machines that have none of them, for a user who is not root, with nothing open but registries.

Lockfiles that name a registry are written here, by the clients themselves: they name the one that this host uses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, Spec

from .previews import get

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("nothing_kept")]

PACKAGE = {"name": "app", "version": "1.0.0", "private": True, "dependencies": {"is-number": "7.0.0"}}
INTEGRITY = "sha512-41Cifkg6e8TylSpdtTpeLVMqvSBEVzTttHvERD741+pnZ8ANv0004MRL43QKPDlK9cGvNp6NZWZUBlbGXYxxng=="
PNPM_LOCK = f"""lockfileVersion: '9.0'
settings:
  autoInstallPeers: true
  excludeLinksFromLockfile: false
importers:
  .:
    dependencies:
      is-number:
        specifier: 7.0.0
        version: 7.0.0
packages:
  is-number@7.0.0:
    resolution: {{integrity: {INTEGRITY}}}
    engines: {{node: '>=0.12.0'}}
snapshots:
  is-number@7.0.0: {{}}
"""
BUN_LOCK = {
    "lockfileVersion": 1,
    "workspaces": {"": {"name": "app", "dependencies": {"is-number": "7.0.0"}}},
    "packages": {"is-number": ["is-number@7.0.0", "", {}, INTEGRITY]},
}
PROJECT = '[project]\nname = "app"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["six==1.17.0"]\n'
SERVER = "require('http').createServer((_, answer) => answer.end('by pnpm')).listen(process.env.PORT)"
PYTHON_SERVER = """
import os, http.server, six
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"by uv, with six {six.__version__}".encode())
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Answer).serve_forever()
"""


@pytest.fixture
def nothing_kept(fy: Forkyard) -> Iterator[None]:
    """Layers stay for the next who wants them; here they would look like a leak."""
    yield
    for build in fy.builds.list():
        build.delete()
    fy.builds.prune()


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def project(directory: Path, files: dict[str, object]) -> Path:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.fixture
def uv_lock(tmp_path: Path) -> Path:
    pip = (sys.executable, "-m", "pip")
    run(*pip, "install", "-q", "--target", str(tmp_path / "tools"), "uv", cwd=tmp_path)
    asked = subprocess.run([*pip, "config", "get", "global.index-url"], capture_output=True, text=True)
    index = {"UV_DEFAULT_INDEX": asked.stdout.strip()} if asked.returncode == 0 else {}
    here = project(tmp_path / "uv", {"pyproject.toml": PROJECT})
    run(tmp_path / "tools" / "bin" / "uv", "lock", cwd=here, **index)
    return here / "uv.lock"


@pytest.fixture
def yarn_locks(tmp_path: Path) -> tuple[Path, Path]:
    """Of Yarn 1, with the addresses that it writes by default; and of a newer one."""
    registry = run("npm", "config", "get", "registry", cwd=tmp_path)
    locks = []
    for number, package in (("1", "yarn@1"), ("4", "@yarnpkg/cli-dist@4")):
        tools, here = tmp_path / f"tools{number}", project(tmp_path / f"yarn{number}", {"package.json": PACKAGE})
        run("npm", "install", "--silent", "--prefix", tools, package, cwd=tmp_path)
        (here / "yarn.lock").touch()
        yarn = tools / "node_modules" / ".bin" / "yarn"
        env = {
            "YARN_NPM_REGISTRY_SERVER": registry,
            "YARN_ENABLE_TELEMETRY": "0",
            "YARN_ENABLE_IMMUTABLE_INSTALLS": "0",
        }
        run(yarn, "install", cwd=here, HOME=str(tmp_path), YARN_REGISTRY=registry, **env)
        if number == "1":
            bare = {"HOME": "/nonexistent", "PREFIX": "/nonexistent", "PATH": os.environ["PATH"]}
            default = subprocess.run(
                [yarn, "config", "get", "registry"], cwd="/", env=bare, capture_output=True, text=True, check=True
            ).stdout.strip()
            lock = (here / "yarn.lock").read_text().replace(registry.rstrip("/"), default.rstrip("/"))
            (here / "yarn.lock").write_text(lock)
        locks.append(here / "yarn.lock")
    return locks[0], locks[1]


def test_lockfiles_of_all_managers_are_installed_for_a_user_who_is_not_root(
    fy: Forkyard, tmp_path: Path, uv_lock: Path, yarn_locks: tuple[Path, Path]
) -> None:
    pnpm = project(tmp_path / "pnpm", {"package.json": PACKAGE, "pnpm-lock.yaml": PNPM_LOCK})
    bun = project(tmp_path / "bun", {"package.json": PACKAGE, "bun.lock": BUN_LOCK})
    spec = Spec().user("user").workdir("/home/user")
    for name, lockfile in (
        ("uv", uv_lock),
        ("pnpm", pnpm / "pnpm-lock.yaml"),
        ("bun", bun / "bun.lock"),
        ("yarn1", yarn_locks[0]),
        ("yarn4", yarn_locks[1]),
    ):
        spec = spec.install(lockfile, path=name)
    sandbox = fy.sandboxes.create(spec=spec)
    seen = sandbox.exec("uv/.venv/bin/python -c 'import six; print(six.__version__)'; stat -c %U uv/.venv", check=True)
    assert seen.stdout.split() == ["1.17.0", "user"]
    for name in ("pnpm", "bun", "yarn1"):
        seen = sandbox.exec(f"cd {name} && node -p 'require(\"is-number\")(7)' && stat -c %U node_modules", check=True)
        assert seen.stdout.split() == ["true", "user"], name
    seen = sandbox.exec(
        "cd yarn4 && yarn node -p 'require(\"is-number\")(7)'; yarn --version; which uv pnpm", check=True
    )
    assert seen.stdout.startswith("true\n4.") and "/pnpm" in seen.stdout
    # And what comes later knows the registries as well.
    sandbox.exec("mkdir new && cd new && echo '{}' > package.json && bun add is-number && pnpm --version", check=True)
    assert sandbox.files.read("/home/user/yarn1/yarn.lock") == yarn_locks[0].read_text()


def test_dev_servers_get_the_managers_they_are_run_with(fy: Forkyard, uv_lock: Path) -> None:
    package = {"name": "app", "scripts": {"dev": "node server.js"}, "packageManager": "pnpm@10.12.1"}
    fy.git.create("by-pnpm", files={"package.json": json.dumps(package), "server.js": SERVER})
    fy.git.create("by-uv", files={"pyproject.toml": PROJECT, "uv.lock": uv_lock.read_text(), "main.py": PYTHON_SERVER})
    machine = {"network": {"egress": {"preset": "coding"}}}
    with fy.dev_servers.create("by-pnpm", user="user", sandbox=machine) as server:
        assert (server.info.install, server.info.command) == (None, "pnpm run dev")
        assert get(server.url).text == "by pnpm"
    with fy.dev_servers.create("by-uv", user="user", sandbox=machine) as server:
        assert (server.info.install, server.info.command) == ("uv sync --frozen", "uv run python main.py")
        assert get(server.url).text == "by uv, with six 1.17.0"
    for repo in fy.git.list():
        repo.delete()
