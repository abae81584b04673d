"""Dev servers against the real API. Machines are agents on this host, without systemd: services are noted, not started."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forkyard import (
    Conflict,
    DevServer,
    DevServerFailed,
    DevServerNotFound,
    Forkyard,
    InvalidRequest,
    RepoNotFound,
    RevisionNotFound,
    ServiceNotReady,
    Spec,
    SpecAction,
)
from forkyard.control import services
from forkyard.models.specs import Service

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
        return fy.dev_servers.create(repo, **{"path": str(tmp_path / "repo"), "env": inside, **fields})

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


def test_a_template_becomes_a_repository_of_its_own(
    fy: Forkyard, serve: Callable[..., Any], started: list[Service]
) -> None:
    template = fy.git.create("template", files={"index.html": "1"})
    template.commit("second", {"index.html": "2"})
    server = serve("mine", template_repo="template")
    mine = fy.git.repo("mine")
    assert [commit.message for commit in mine.commits()] == [commit.message for commit in template.commits()]
    assert server.info.repo_id == mine.id and len(mine.triggers.list()) == 1 and not template.triggers.list()


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
    fy.sandboxes.create(labels={"forkyard.dev-server": "devhalf"})

    async def half() -> None:
        from datetime import UTC, datetime

        from forkyard.store.dev_servers import DevServerRecord

        now = datetime.now(UTC)
        await yard.daemon._store.add_dev_server(DevServerRecord("devhalf", "half", "", {"repo": "x"}, now, now))
        await yard.daemon.dev_servers.start()

    daemon._run(half())
    assert fy.sandboxes.list() == [] and fy.dev_servers.list() == []
