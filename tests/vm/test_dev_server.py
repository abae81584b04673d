"""A dev server in a real guest: it outlives its daemon, installs what a push asks for, and is woken by pushes and visitors.

Forks of one, and the first push, are in `examples/dev_server.py`, which `test_docs.py` runs.
"""

from __future__ import annotations

import json
import time

import pytest

from forkyard import Repo, RunningDevServer

from .conftest import Daemon
from .previews import get

pytestmark = pytest.mark.timeout(600)

SERVER = "require('http').createServer((_, answer) => answer.end(TEXT)).listen(process.env.PORT)"
PACKAGE = {"name": "app", "scripts": {"dev": "node server.js"}}
WITH_DEPENDENCY = {
    "package.json": json.dumps({**PACKAGE, "dependencies": {"greeting": "file:greeting"}}),
    "package-lock.json": json.dumps(
        {
            "name": "app",
            "lockfileVersion": 3,
            "requires": True,
            "packages": {
                "": {"name": "app", "dependencies": {"greeting": "file:greeting"}},
                "greeting": {"version": "1.0.0"},
                "node_modules/greeting": {"resolved": "greeting", "link": True},
            },
        }
    ),
    "greeting/package.json": json.dumps({"name": "greeting", "version": "1.0.0"}),
    "greeting/index.js": "module.exports = 'installed'",
    "server.js": SERVER.replace("TEXT", "require('greeting')"),
}


def pushed(repo: Repo, server: RunningDevServer, files: dict[str, str]) -> str:
    """What its preview shows after a push."""
    sha = repo.commit("change", files).sha
    deadline = time.monotonic() + 240
    while server.refresh().sha != sha:
        assert server.info.error is None and time.monotonic() < deadline, server.info
        time.sleep(0.2)
    return get(server.url).text


def test_a_dev_server_outlives_its_daemon_installs_what_is_new_and_is_woken(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        files = {"package.json": json.dumps(PACKAGE), "server.js": SERVER.replace("TEXT", "'first'")}
        repo = fy.git.create("app", files=files)
        server = fy.dev_servers.create("app", command="node server.js")
        assert get(server.url).text == "first"

        own_daemon.kill()
        own_daemon.start()
        # It fetches from http://git.forkyard.internal, which is another daemon's now.
        assert pushed(repo, server, WITH_DEPENDENCY) == "installed"
        assert server.info.install == "npm ci --no-audit --no-fund"

        sandbox = server.sandbox()
        sandbox.pause()
        assert pushed(repo, server, {"server.js": SERVER.replace("TEXT", "'awake'")}) == "awake"
        sandbox.pause()
        assert get(server.url).text == "awake"
        assert "node" in server.logs() or "Started" in server.logs()
        server.delete()
