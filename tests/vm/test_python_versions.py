"""A Python that the base has not: downloaded by uv in the guest, from where the daemon is told."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from forkyard import Forkyard, Sandbox, Spec
from forkyard.models.network import EgressPolicy, EgressRule

from .conftest import make_daemon, remove_daemon
from .pythons import SERIES, Mirror, mirror

pytestmark = pytest.mark.timeout(900)

NAMES = ("python", "python3", f"python{SERIES}")


@pytest.fixture
def pythons() -> Iterator[Mirror]:
    with mirror() as made:
        yield made


@pytest.fixture
def told(pythons: Mirror) -> Iterator[Forkyard]:
    daemon = make_daemon()
    daemon.extra_env = {"UV_PYTHON_DOWNLOADS_JSON_URL": pythons.url}
    daemon.start()
    try:
        with daemon.client() as fy:
            yield fy
    finally:
        remove_daemon(daemon)


def test_another_python_is_downloaded_once_and_is_everybodys(told: Forkyard, pythons: Mirror) -> None:
    spec = Spec().python(SERIES)
    opened = EgressPolicy(rules=[EgressRule(cidr=f"{pythons.address}/32", ports=[pythons.port])])
    assert told.builds.create(spec, network=opened).wait().state == "succeeded"
    assert pythons.asked[-1].endswith(".tar.gz")
    pythons.asked.clear()

    sandbox = told.sandboxes.create(spec=spec)
    loaded = sandbox.exec("python3 -v -c 'import ipykernel.kernelapp'", user="user", check=True).stderr
    assert ".pyc'\n" in loaded and not re.findall(r"^# code object from (/.*\.py)$", loaded, re.M), "compiled for all"
    for user in ("root", "user"):
        _it_is_the_python(sandbox, user, pythons.version)
    _packages_are_installed(sandbox)
    _code_is_run(sandbox, pythons.version)

    assert told.builds.explain(spec)[0].cached
    with told.sandboxes.create(spec=spec) as second:
        assert second.exec("python --version").stdout == f"Python {pythons.version}\n"
    assert "is this host itself" in sandbox.exec(f"curl -sS {pythons.url}").stdout, (
        "what a build may, its sandboxes may not"
    )
    assert pythons.asked == []
    sandbox.delete()


def _it_is_the_python(sandbox: Sandbox, user: str, version: str) -> None:
    said = sandbox.exec("; ".join(f"{name} --version" for name in NAMES), user=user, check=True).stdout
    assert said.splitlines() == [f"Python {version}"] * len(NAMES)
    said = sandbox.exec("; ".join(f"readlink -f $(command -v {name})" for name in NAMES), user=user, check=True).stdout
    (binary,) = set(said.splitlines())
    assert binary.startswith("/opt/pythons/")
    assert sandbox.exec("pip --version", user=user, check=True).stdout.endswith(f"(python {SERIES})\n")


def _packages_are_installed(sandbox: Sandbox) -> None:
    """From the registry that the base's own pip uses too: by pip for all, by uv into an environment of a user."""
    which = "python -c 'import six, sys; print(six.__version__, sys.version_info[:2])'"
    wanted = f"1.17.0 {tuple(map(int, SERIES.split('.')))}\n"
    assert sandbox.exec(f"pip install -q six==1.17.0 && {which}", check=True).stdout == wanted
    made = "cd && python3 -m venv --without-pip made && . made/bin/activate && uv pip install -q six==1.17.0"
    assert sandbox.exec(f"{made} && {which}", user="user", check=True).stdout == wanted


def _code_is_run(sandbox: Sandbox, version: str) -> None:
    ran = sandbox.run_code("import six, sys; sys.version.split()[0]")
    assert (ran.text, ran.stderr) == (repr(version), "")
    context = sandbox.contexts.create(language="python", user="user")
    ran = sandbox.run_code("import os, sys; (os.getuid() > 0, sys.version.split()[0])", context=context)
    assert (ran.text, ran.stderr) == (repr((True, version)), "")
