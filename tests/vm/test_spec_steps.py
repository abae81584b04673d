"""Steps of specs on real machines: lockfiles, runtimes, services that speak for themselves, defaults of commands.

Packages of Debian are in `docs/specs.md`, which `test_docs.py` runs; defaults after a boot in `test_volumes.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkyard import BuildFailed, Forkyard, Sandbox, Spec

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("nothing_kept")]

LOCK = {
    "name": "app",
    "lockfileVersion": 3,
    "packages": {
        "": {"name": "app", "dependencies": {"is-number": "7.0.0"}},
        "node_modules/is-number": {"version": "7.0.0"},
    },
}
#: Says when it is ready, and that it lives, until it is told to hang.
NOTIFIES = """
import os, socket, time
systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
systemd.connect(os.environ["NOTIFY_SOCKET"])
open("/run/ready", "w").close()
systemd.send(b"READY=1")
while not os.path.exists("/run/hang"):
    systemd.send(b"WATCHDOG=1")
    time.sleep(1)
os.remove("/run/hang")
time.sleep(3600)
"""


@pytest.fixture
def nothing_kept(fy: Forkyard) -> Iterator[None]:
    """Layers stay for the next who wants them; here they would look like a leak."""
    yield
    for build in fy.builds.list():
        build.delete()
    fy.builds.prune()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "package.json").write_text(json.dumps(LOCK["packages"][""]))  # type: ignore[index]
    (tmp_path / "package-lock.json").write_text(json.dumps(LOCK))
    (tmp_path / "requirements.txt").write_text("six==1.17.0\n")
    return tmp_path


def until(condition: Callable[[], bool], timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1)


def test_lockfiles_and_services_are_in_the_sandbox_and_steps_are_kept(fy: Forkyard, project: Path) -> None:
    prefix = (
        Spec()
        .user("user")
        .workdir("/srv/app")
        .install(project / "package-lock.json")
        .install(project / "requirements.txt")
        .files({"/opt/notifies.py": NOTIFIES})
        .service(
            "told", "exec python3 /opt/notifies.py", type="notify", watchdog_s=10, restart="on-failure", user="root"
        )
    )
    sandbox = fy.sandboxes.create(spec=prefix.run("echo one > made"))
    seen = sandbox.exec(
        "pwd && id -un && ls && .venv/bin/python -c 'import six' && .venv/bin/python -m pip --version && cat made"
    )
    assert seen.ok, seen.stderr
    assert {"/srv/app", "user", "node_modules", "one"} <= set(seen.stdout.split())
    assert sandbox.files.exists("/srv/app/node_modules/is-number/package.json")
    assert sandbox.files.exists("/run/ready")
    _watchdog_restarts_it(sandbox)
    (fork,) = sandbox.fork(1)
    assert fork.exec("pwd; id -un").stdout.split() == ["/srv/app", "user"]
    assert fork.exec("pwd; id -un", user="root", cwd="/").stdout.split() == ["/", "root"]
    _only_what_changed_is_done(fy, prefix, project)


def _watchdog_restarts_it(sandbox: Sandbox) -> None:
    before = sandbox.services.get("told")
    assert before.active == "active"
    sandbox.exec("touch /run/hang", user="root")
    until(lambda: sandbox.services.get("told").restarts > before.restarts)


def _only_what_changed_is_done(fy: Forkyard, prefix: Spec, project: Path) -> None:
    (layer,) = fy.builds.explain(prefix.run("echo two > made"))
    assert (layer.cached, layer.steps_kept) == (False, 6)
    (project / "requirements.txt").write_text("six==1.16.0\n")
    changed = Spec().user("user").workdir("/srv/app").install(project / "package-lock.json")
    (layer,) = fy.builds.explain(changed.install(project / "requirements.txt").run("true"))
    assert layer.steps_kept == 3, "a lockfile counts with its content"


def test_runtimes_are_the_bases_own_or_downloaded_or_said_not_to_be_had(fy: Forkyard) -> None:
    spec = Spec().python("3.11").bun().uv().node(22)
    sandbox = fy.sandboxes.create(spec=spec.context("javascript"))
    versions = sandbox.exec("python3 --version; bun --version; uv --version; node --version", check=True).stdout.split(
        "\n"
    )
    for version, begin in zip(versions, ("Python 3.11.", "1.", "uv 0.", "v22."), strict=False):
        assert version.startswith(begin), versions
    assert [context.id for context in sandbox.contexts.list()] == ["javascript"]
    assert sandbox.run_code("process.version", language="javascript").text == repr(versions[3])
    with pytest.raises(BuildFailed, match=r"Python 3\.3 cannot be had"):
        fy.sandboxes.create(spec=spec.python("3.3"))
