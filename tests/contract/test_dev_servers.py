"""Dev servers against the real API. Machines are agents on this host, without systemd: services are noted, not started."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from forkyard import (
    Conflict,
    DevServer,
    DevServerFailed,
    DevServerNotFound,
    Forkyard,
    InvalidRequest,
    RemoteDenied,
    RepoNotFound,
    RevisionNotFound,
    ServiceNotReady,
    Spec,
    SpecAction,
)
from forkyard.builds.builds import Builds
from forkyard.control import services
from forkyard.control.plane import ControlPlane
from forkyard.dev.actions import dev_servers
from forkyard.dev.answers import listening
from forkyard.git.deliveries import Deliveries
from forkyard.git.hosting import GitHosting
from forkyard.hosts.memory import MemoryHost
from forkyard.models import SandboxCreate
from forkyard.models.labels import marked
from forkyard.models.specs import Service
from forkyard.store.sql import Store

from .conftest import ScriptedGuest
from .git_yard import GitYard
from .sdk_daemon import Daemon, running_daemon

PACKAGE = json.dumps({"scripts": {"dev": "node server.js"}})


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(socket=daemon.socket, key_file=daemon.key_file) as client:
        yield client
        for server in client.dev_servers.list():
            server.delete()
        for sandbox in client.sandboxes.list():
            sandbox.delete()
        for repo in client.git.list():
            repo.delete()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Service]:
    """What systemd would have been given."""
    found: list[Service] = []

    async def put(_guest: object, new: list[Service], **_: object) -> None:
        if any("fails" in service.exec for service in new):
            raise ServiceNotReady("service dev-server did not start", unit={})
        if any("elsewhere" in service.exec for service in new):
            raise ServiceNotReady("`(exec 3<>…)` did not succeed", unit={"active": "active", "log": "a\nb\nthere!\n"})
        found.extend(new)

    monkeypatch.setattr(services, "put", put)
    return found


@pytest.fixture
def serve(fy: Forkyard, daemon: Daemon, tmp_path: Path) -> Callable[..., Any]:
    """With the way to hosted repositories that a door would give."""
    inside = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.http://x:{daemon.key}@127.0.0.1:{daemon.port}/git/.insteadOf",
        "GIT_CONFIG_VALUE_0": "http://git.forkyard.internal/",
    }

    def create(repo: str | DevServer | None, **fields: Any) -> Any:
        env = {**inside, **fields.pop("env", {})}
        return fy.dev_servers.create(repo, **{"path": str(tmp_path / "repo"), "env": env, **fields})

    return create


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_repository_is_cloned_understood_and_served(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    fy.git.create("app", files={"package.json": PACKAGE, "server.js": "1"})
    server = serve("app", name="web", port=4000)
    assert (server.info.manager, server.info.install, server.info.command) == ("npm", None, "npm run dev")
    assert server.url.startswith(f"http://4000-{server.info.sandbox_id}.") and server.info.branch == "main"
    (service,) = started
    assert (service.exec, service.workdir, service.env["PORT"]) == ("npm run dev", str(tmp_path / "repo"), "4000")
    assert "127.0.0.1:4000" in (service.ready or "")
    assert [one.id for one in fy.dev_servers.list()] == [server.id] == [fy.dev_servers.get("web").id]
    with pytest.raises(Conflict, match="another name"):
        serve("app", name="web")


def test_a_dev_server_may_be_described_first(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    fy.git.create("template", files={"app.txt": "1"})
    (tmp_path / "brought").mkdir()
    (tmp_path / "brought" / "file").write_text("x")
    described = DevServer("mine", "template", "make serve", 4000, sandbox={"labels": {"a": "b"}})
    server = serve(described, name="web")
    assert (server.info.repo_url, server.info.command, server.info.port) == ("mine", "make serve", 4000)
    assert server.sandbox().info.labels["a"] == "b" and server.sandbox().info.persistence == "persistent"
    with pytest.raises(InvalidRequest, match="port"):
        fy.dev_servers.create(DevServer("mine", port=70000))
    # What a spec of its machine brings along is sent ahead.
    spec = Spec().add(tmp_path / "brought", str(tmp_path / "there"))
    serve(
        DevServer("mine", command="x", sandbox={"spec": spec}, path=str(tmp_path / "other")),
        path=str(tmp_path / "third"),
    )
    assert (tmp_path / "there" / "file").exists() and (tmp_path / "third").is_dir()


def test_a_push_brings_it_to_the_new_commit_and_restarts_it(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    repo = fy.git.create("app", files={"package.json": PACKAGE, "server.js": "1"})
    server = serve("app")
    commit = repo.commit("second", {"server.js": "2"})
    until(lambda: server.refresh().sha == commit.sha)
    assert (tmp_path / "repo" / "server.js").read_text() == "2" and len(started) == 2
    repo.create_branch("other")
    repo.commit("elsewhere", {"server.js": "3"}, branch="other")
    (trigger,) = repo.triggers.list()
    until(lambda: all(line.status == "delivered" for line in repo.triggers.deliveries(trigger.id)))
    assert len(repo.triggers.deliveries(trigger.id)) == 1 and server.refresh().sha == commit.sha
    # A command that is new is taken over.
    fresh = repo.commit("third", {"package.json": json.dumps({"scripts": {"start": "node server.js"}})})
    until(lambda: server.refresh().sha == fresh.sha)
    assert started[-1].exec == "npm run start"


@pytest.mark.anyio
async def test_deliveries_begin_when_all_that_performs_them_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[set[str]] = []
    store = await Store.open(tmp_path / "forkyard.db")
    control = ControlPlane(store, MemoryHost(lambda *_: ScriptedGuest()))
    hosting = GitHosting(store, control.identities, tmp_path / "git", control=control)
    builds = Builds(control, tmp_path / "builds")

    async def run(_: Deliveries) -> None:
        assert hosting.automation.actions is not None
        begun.append(set(hosting.automation.actions.by_type))

    monkeypatch.setattr(Deliveries, "run", run)
    await control.start()
    await hosting.start()
    await builds.start()
    await asyncio.sleep(0.01)
    assert begun == []
    async with dev_servers(control, hosting, builds):
        await asyncio.sleep(0.01)
    assert [{"dev_server", "spec", "review", "webhook"} - one for one in begun] == [set()]
    await builds.stop()
    await hosting.stop()
    await control.stop(destroy=True)
    await store.close()


def test_what_was_changed_in_there_is_never_overwritten(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    server = serve("app", on_push="pull")
    before = server.info.sha
    (tmp_path / "repo" / "index.html").write_text("mine")
    repo.commit("second", {"index.html": "2"})
    until(lambda: server.refresh().error is not None)
    assert "overwritten" in str(server.info.error) or "local changes" in str(server.info.error)
    assert (tmp_path / "repo" / "index.html").read_text() == "mine" and server.info.sha == before
    with pytest.raises(DevServerFailed):
        server.reload()
    (tmp_path / "repo" / "index.html").write_text("1")
    assert server.reload().error is None
    assert (tmp_path / "repo" / "index.html").read_text() == "2"
    assert len(started) == 2  # by hand it is restarted; a push left that to the server itself


def test_a_lockfile_that_an_install_left_is_in_nobodys_way(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    npm, said, lockfile = tmp_path / "bin" / "npm", tmp_path / "said", tmp_path / "repo" / "package-lock.json"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\necho "$1" >> {said}\n[ -f package-lock.json ] || echo left > package-lock.json\n')
    npm.chmod(0o755)

    def package(version: str) -> str:
        return json.dumps({**json.loads(PACKAGE), "dependencies": {"a": version}})

    repo = fy.git.create("app", files={"package.json": package("1"), "server.js": "1"})
    server = serve("app", env={"PATH": f"{npm.parent}:{os.environ['PATH']}"})
    # What was left is no lockfile of the repository: `ci` would refuse the new dependency.
    commit = repo.commit("another dependency", {"package.json": package("2")})
    until(lambda: server.refresh().sha == commit.sha)
    assert said.read_text().split() == ["install", "install"] and lockfile.read_text() == "left\n"
    commit = repo.commit("a lockfile", {"package-lock.json": "theirs"})
    until(lambda: server.refresh().sha == commit.sha or server.info.error is not None)
    assert (server.info.error, lockfile.read_text()) == (None, "theirs")
    assert said.read_text().split() == ["install", "install", "ci"]
    # One that somebody has written in there is theirs to keep.
    other = tmp_path / "repo" / "yarn.lock"
    other.write_text("mine")
    repo.commit("another lockfile", {"yarn.lock": "theirs"})
    until(lambda: server.refresh().error is not None)
    assert "untracked" in str(server.info.error) and other.read_text() == "mine"


def test_a_repository_that_gets_another_name_is_served_on(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    server = serve("app")
    repo.update(name="renamed")
    commit = fy.git.repo("renamed").commit("second", {"index.html": "2"})
    until(lambda: server.refresh().sha == commit.sha)
    assert server.info.error is None and (tmp_path / "repo" / "index.html").read_text() == "2"


def test_a_head_that_cannot_be_fetched_is_not_blamed_on_changes_in_there(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service]
) -> None:
    fy.git.create("blank")
    with pytest.raises(RevisionNotFound, match=r"^blank has no"):
        serve("blank")
    repo = fy.git.create("app", files={"index.html": "1"})
    server = serve("app")
    repo.delete()
    with pytest.raises(DevServerFailed, match="the head of main cannot be fetched") as failed:
        server.reload()
    assert "stash" not in str(failed.value)


def test_a_branch_that_is_pushed_anew_is_served_if_nothing_of_it_was_made_in_there(
    fy: Forkyard, daemon: Daemon, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    repo, yard, page = fy.git.create("app", files={"index.html": "1"}), GitYard(daemon, tmp_path), tmp_path / "repo"
    server, work = serve("app"), yard.clone("app", "work")

    def push_anew(text: str) -> str:
        (work / "index.html").write_text(text)
        yard.run("commit", "--quiet", "--all", "--amend", "--message", text, cwd=work)
        yard.run("push", "--quiet", "--force", cwd=work)
        return yard.run("rev-parse", "HEAD", cwd=work).stdout.strip()

    sha = push_anew("2")
    until(lambda: server.refresh().sha == sha)
    assert (page / "index.html").read_text() == "2"
    # What is in the way is kept, and when it is gone all goes on.
    (page / "index.html").write_text("mine")
    sha = push_anew("3")
    until(lambda: server.refresh().error is not None)
    assert (page / "index.html").read_text() == "mine"
    yard.run("checkout", "--quiet", "index.html", cwd=page)
    assert (server.reload().sha, server.refresh().error) == (sha, None)
    # A commit of somebody in there is kept, also if it was served.
    mine = yard.commit(page, {"mine.txt": "1"})
    assert server.reload().sha == mine
    push_anew("4")
    until(lambda: server.refresh().error is not None)
    assert "cannot be brought" in str(server.info.error) and (page / "mine.txt").exists()
    assert repo.commits()[0].message.strip() == "4"


def test_what_was_rolled_back_is_installed_again(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    repo, work, snapshot = fy.git.create("app", files={"index.html": "1"}), tmp_path / "repo", tmp_path / "snapshot"
    server = serve("app", install="cp packages/a/package.json installed 2>/dev/null || true")
    shutil.copytree(work, snapshot)
    commit = repo.commit("a dependency", {"packages/a/package.json": "{}"})
    until(lambda: server.refresh().sha == commit.sha)
    assert (work / "installed").exists()
    shutil.rmtree(work)
    shutil.move(snapshot, work)
    commit = repo.commit("another file", {"README.md": "1"})
    until(lambda: server.refresh().sha == commit.sha)
    assert (work / "installed").exists()


def test_a_push_that_an_earlier_reload_has_brought_already_restarts_nothing(
    fy: Forkyard, daemon: Daemon, serve: Callable[..., Any], started: list[Service]
) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    server = serve("app")
    commit = repo.commit("second", {"index.html": "2"})
    until(lambda: server.refresh().sha == commit.sha and len(started) == 2)
    assert daemon._run(daemon.dev_servers.reload(server.id, pushed=True)).sha == commit.sha
    assert len(started) == 2
    assert server.reload().sha == commit.sha and len(started) == 3


def test_a_push_while_it_is_made_is_served_when_it_is_up(
    fy: Forkyard,
    daemon: Daemon,
    serve: Callable[..., Any],
    started: list[Service],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    real, commits = daemon.hosting.triggers.create, []

    async def create(*args: Any, **given: Any) -> Any:
        commits.append(await asyncio.to_thread(repo.commit, "second", {"index.html": "2"}))
        return await real(*args, **given)

    monkeypatch.setattr(daemon.hosting.triggers, "create", create)
    server = serve("app")
    assert server.info.sha == commits[0].sha and (tmp_path / "repo" / "index.html").read_text() == "2"


def test_what_fails_leaves_nothing(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    fy.git.create("app", files={"README.md": "no server"})
    fy.git.create("template", files={"README.md": "no server"})
    for request, error in (
        ({"repo": "app"}, InvalidRequest),
        ({"repo": "none"}, RepoNotFound),
        ({"repo": "app", "branch": "none"}, RevisionNotFound),
        ({"repo": "app", "command": "fails"}, ServiceNotReady),
        ({"repo": "app", "command": "x", "install": "echo why; exit 3"}, DevServerFailed),
        ({"repo": "new", "template_repo": "template"}, InvalidRequest),
    ):
        with pytest.raises(error):
            serve(**request)
        shutil.rmtree(tmp_path / "repo", ignore_errors=True)  # the disk of its machine would be gone
    assert fy.dev_servers.list() == [] and fy.sandboxes.list() == [] and fy.git.repo("app").triggers.list() == []
    assert {repo.name for repo in fy.git.list()} == {"app", "template"}
    with pytest.raises(InvalidRequest, match="give a repo"):
        serve(None)


def test_what_fails_says_how_it_ended_and_a_wrong_port_which_there_are(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    fy.git.create("app", files={"index.html": "1"})
    with pytest.raises(DevServerFailed, match=r"exited with 3:\n40\n(\d+\n){10}the reason\nstack 1\nstack 2\nstack 3$"):
        serve("app", install="seq 50; echo the reason; printf 'stack %s\\n' 1 2 3; exit 3")
    shutil.rmtree(tmp_path / "repo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ServiceNotReady, match=r"nothing answered on port 1 within 300 s.*give `port`") as failed:
            serve("app", command="elsewhere", port=1)
        shutil.rmtree(tmp_path / "repo")
        assert "exec" not in str(failed.value) and str(failed.value).endswith("a\nb\nthere!")
        with pytest.raises(ServiceNotReady, match=f"listens on port {port} and did not answer HTTP"):
            serve("app", command="elsewhere", port=port)
    table = "sl local rem st\n 0: 0100007F:1435 00000000:0000 0A\n 1: 0100007F:1F90 0100007F:0016 01\n"
    assert listening(table) == [5173]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("repo", {"repo": "git@host:me/app.git"}),
        ("repo", {"repo": "../etc"}),
        ("repo", {"repo": "/local/x"}),
        ("repo", {"repo": "http://[/x.git"}),
        ("repo", {"repo": "http://host:port/x.git"}),
        ("repo", {"repo": "http://u:hunter2@127.0.0.1/x.git"}),
        ("repo", {"repo": "a b", "template_repo": "app"}),
        ("repo", {}),
        ("template_repo", {"template_repo": f"http://host/{'x' * 2048}"}),
        ("path", {"repo": "app", "path": "rel"}),
        ("path", {"repo": "app", "path": "/a/../b"}),
        ("branch", {"repo": "app", "branch": "a b"}),
        ("secret", {"repo": "ssh://git@host/app.git", "secret": "TOKEN"}),
        ("sandbox.git", {"repo": "app", "sandbox": {"git": ["other"]}}),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_its_field(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str], field: str, given: dict[str, Any]
) -> None:
    with GitYard(daemon, tmp_path).api as api:
        answer = api.post("/dev-servers", json=given)
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["details"]["errors"]] == [f"body.{field}"]
    printed = capfd.readouterr()
    assert "hunter2" not in answer.text + printed.out + printed.err


def test_an_error_of_a_model_does_not_show_what_was_given() -> None:
    with pytest.raises(ValidationError) as refused:
        SandboxCreate.model_validate({"env": {"TOKEN": ["hunter2"]}})
    assert "TOKEN" in str(refused.value) and "hunter2" not in str(refused.value)


def test_a_template_becomes_a_repository_of_its_own(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service]
) -> None:
    template = fy.git.create("template", files={"index.html": "1"})
    template.commit("second", {"index.html": "2"})
    server = serve("mine", template_repo="template")
    mine = fy.git.repo("mine")
    assert [commit.message for commit in mine.commits()] == [commit.message for commit in template.commits()]
    assert server.info.repo_id == mine.id and len(mine.triggers.list()) == 1 and not template.triggers.list()


def test_a_template_elsewhere_is_opened_with_the_secret(
    fy: Forkyard, daemon: Daemon, serve: Callable[..., Any], started: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    fy.git.create("template", files={"index.html": "1"})
    address = f"http://localhost:{daemon.port}/git/template.git"  # as another host would have it
    monkeypatch.setattr(daemon.hosting.clones, "hosted_name", lambda url: None if "//" in url else url)
    monkeypatch.setattr(daemon.hosting._imports._ways, "_allow_private", True)
    with pytest.raises(RemoteDenied, match="put one into the url"):
        fy.git.create("mine", url=address)
    with pytest.raises(RemoteDenied):
        serve("mine", template_repo=address)
    with pytest.raises(InvalidRequest, match="store it first"):
        serve("mine", template_repo=address, secret="HOST_TOKEN")
    fy.secrets.set("HOST_TOKEN", daemon.key)
    server = serve("mine", template_repo=address, secret="HOST_TOKEN")
    assert server.info.repo_url == "mine" and fy.git.repo("mine").commits()
    fy.secrets.delete("HOST_TOKEN")


def test_a_private_repository_elsewhere_is_reloaded_with_the_secret_that_it_was_cloned_with(
    fy: Forkyard,
    daemon: Daemon,
    serve: Callable[..., Any],
    started: list[Service],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    monkeypatch.setattr(daemon.hosting.clones, "hosted_name", lambda url: None if "//" in url else url)
    fy.secrets.set("HOST_TOKEN", daemon.key)
    machine = {"network": {"egress": {"rules": [{"cidr": "127.0.0.1/32"}]}}}
    server = serve(f"{daemon.url}/git/app.git", secret="HOST_TOKEN", sandbox=machine)
    repo.commit("second", {"index.html": "2"})
    assert server.reload().sha == repo.commits()[0].sha
    assert (tmp_path / "repo" / "index.html").read_text() == "2"
    left = [path for path in (tmp_path / "repo" / ".git").rglob("*") if path.is_file()]
    assert not any(daemon.key.encode() in path.read_bytes() or "forkyard-fetch" in str(path) for path in left)
    fy.secrets.delete("HOST_TOKEN")


def test_what_its_sandbox_is_given_is_written_down_nowhere_else(
    fy: Forkyard, daemon: Daemon, serve: Callable[..., Any], started: list[Service]
) -> None:
    fy.git.create("app", files={"index.html": "1"})
    given = {"API_KEY": {"value": "hunter2-and-more", "hosts": ["api.example.com"]}}
    serve("app", sandbox={"secrets": given, "env": {"OWN": "hunter3-and-more"}})
    (record,) = daemon._run(daemon._store.list_dev_servers())
    assert "hunter" not in json.dumps(record.request)
    daemon._run(daemon._store.change_dev_server(record.id, request={**record.request, "sandbox": {"secrets": given}}))
    daemon._run(daemon.dev_servers.start())
    (record,) = daemon._run(daemon._store.list_dev_servers())
    assert "hunter" not in json.dumps(record.request), "what an older daemon has written goes"


def test_deleting_it_keeps_the_repository_and_one_without_a_sandbox_is_gone(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service], tmp_path: Path
) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    server = serve("app")
    assert server.sandbox().state == "running"
    server.delete()
    assert fy.sandboxes.list() == [] and repo.triggers.list() == [] and repo.commits()
    other = fy.dev_servers.create("app", path=str(tmp_path / "other"))
    other.sandbox().delete()
    with pytest.raises(DevServerNotFound):
        other.refresh()
    assert fy.dev_servers.list() == [] and repo.triggers.list() == []


def test_the_command_line_does_the_same(fy: Forkyard, daemon: Daemon, started: list[Service], tmp_path: Path) -> None:
    fy.git.create("app", files={"index.html": "1"})
    done = daemon.cli("dev", "up", "app", "--name", "web", "--path", str(tmp_path / "repo"), "--port", "8080")
    assert done.returncode == 0 and done.stdout.startswith("http://8080-"), done.stderr
    assert "web" in daemon.cli("dev", "ls").stdout
    assert json.loads(daemon.cli("dev", "show", "web", "--json").stdout)["command"].startswith("python3 -m http.server")
    assert daemon.cli("dev", "rm", "web").returncode == 0
    assert "`forkyard dev ls`" in daemon.cli("dev", "show", "web").stderr


def test_a_push_runs_a_spec_at_the_commit_that_was_pushed(fy: Forkyard, daemon: Daemon, tmp_path: Path) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    steps = [
        {"git": {"url": "app", "path": str(tmp_path / "work")}},
        {"run": f"git -C {tmp_path}/work rev-parse HEAD >> {tmp_path}/seen; rm -rf {tmp_path}/work"},
    ]
    trigger = repo.triggers.create(SpecAction(spec={"steps": steps}))  # type: ignore[arg-type]
    commits = [repo.commit("second", {"index.html": "2"}).sha]
    until(lambda: [one.status for one in repo.triggers.deliveries(trigger.id)] == ["delivered"])
    commits.append(repo.commit("third", {"index.html": "3"}).sha)
    until(lambda: [one.status for one in repo.triggers.deliveries(trigger.id)] == ["delivered"] * 2)
    assert (tmp_path / "seen").read_text().split() == commits
    fy.builds.prune()


@pytest.mark.parametrize("step", ["sandbox", "service", "trigger"])
def test_what_a_daemon_had_made_when_it_died_is_cleared_away_by_the_next(
    step: str,
    daemon: Daemon,
    fy: Forkyard,
    serve: Callable[..., Any],
    started: list[Service],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dies(*_: object, **__: object) -> None:
        raise Conflict("the power is gone")

    def dies_after(patched: pytest.MonkeyPatch, owner: object, name: str) -> None:
        real = getattr(owner, name)

        async def work(*args: Any, **given: Any) -> None:
            await real(*args, **given)
            await dies()

        patched.setattr(owner, name, work)

    fy.git.create("template", files={"index.html": "1"})
    servers = daemon.dev_servers
    with monkeypatch.context() as patched:
        patched.setattr(servers, "_abandon", dies)  # a daemon that died undoes nothing
        if step == "sandbox":
            dies_after(patched, servers, "_make_sandbox")
        elif step == "service":
            dies_after(patched, services, "put")
        else:
            dies_after(patched, daemon.hosting.triggers, "create")
        with pytest.raises(Conflict):
            serve("mine", template_repo="template")
    assert {repo.name for repo in fy.git.list()} == {"template", "mine"} and len(fy.sandboxes.list()) == 1
    daemon._run(servers.start())
    assert [repo.name for repo in fy.git.list()] == ["template"] and fy.sandboxes.list() == []
    assert fy.dev_servers.list() == []


def test_a_trigger_that_a_daemon_died_after_making_is_gone_with_its_server(
    daemon: Daemon, fy: Forkyard, serve: Callable[..., Any], started: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = fy.git.create("app", files={"index.html": "1"})
    real = daemon.hosting.triggers.create

    async def makes_and_dies(*args: Any, **given: Any) -> None:
        await real(*args, **given)
        raise Conflict("the power is gone")

    async def nothing(*_: object) -> None:
        pass

    with monkeypatch.context() as patched:
        patched.setattr(daemon.dev_servers, "_abandon", nothing)
        patched.setattr(daemon.hosting.triggers, "create", makes_and_dies)
        with pytest.raises(Conflict):
            serve("app")
    assert len(repo.triggers.list()) == 1
    daemon._run(daemon.dev_servers.start())
    assert repo.triggers.list() == [] and [one.name for one in fy.git.list()] == ["app"]


def test_one_that_is_deleted_while_it_is_made_leaves_nothing(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service]
) -> None:
    fy.git.create("template", files={"index.html": "1"})
    failed: list[BaseException] = []

    def make() -> None:
        try:
            serve("mine", template_repo="template", name="slow", install="sleep 600")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    until(lambda: any(repo.name == "mine" for repo in fy.git.list()) and len(fy.sandboxes.list()) == 1)
    fy.dev_servers.delete("slow")
    thread.join(30)
    assert isinstance(failed[0], DevServerFailed) and "deleted" in str(failed[0])
    assert [repo.name for repo in fy.git.list()] == ["template"] and fy.sandboxes.list() == []


def test_a_half_made_one_is_cleared_away_by_the_next_daemon(daemon: Daemon, fy: Forkyard, tmp_path: Path) -> None:
    yard = GitYard(daemon, tmp_path)

    async def half() -> None:
        from datetime import UTC, datetime

        from forkyard.store.dev_servers import DevServerRecord

        now = datetime.now(UTC)
        await yard.daemon._control.sandboxes.create(marked(SandboxCreate(), {"forkyard.dev-server": "devhalf"}))
        await yard.daemon._store.add_dev_server(DevServerRecord("devhalf", "half", "", {"repo": "x"}, now, now))
        await yard.daemon.dev_servers.start()

    daemon._run(half())
    assert fy.sandboxes.list() == [] and fy.dev_servers.list() == []
