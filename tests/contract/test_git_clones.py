"""Repositories that are there when a sandbox is: hosted ones, and those of another git host, which a second daemon is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forkyard import (
    FileConflict,
    Forbidden,
    Forkyard,
    GitFailed,
    GitRepo,
    HostFailure,
    InvalidRequest,
    RemoteDenied,
    RemoteFailed,
    RemoteMissing,
    RepoNotFound,
    RevisionNotFound,
    Secret,
    Spec,
)
from forkyard.git.clones import _archived

from .git_yard import GitYard
from .sdk_daemon import Daemon, running_daemon

#: What lets a sandbox, and so its clones, go to this host itself.
LOOPBACK = {"egress": {"rules": [{"cidr": "127.0.0.1/32"}]}}


@pytest.fixture(scope="module")
def daemons() -> Iterator[tuple[Daemon, Daemon]]:
    with running_daemon() as here, running_daemon() as there:
        yield here, there


@pytest.fixture
def fy(daemons: tuple[Daemon, Daemon]) -> Iterator[Forkyard]:
    with Forkyard(socket=daemons[0].socket, key_file=daemons[0].key_file) as client:
        yield client
        for sandbox in client.sandboxes.list():
            sandbox.delete()


@pytest.fixture
def here(daemons: tuple[Daemon, Daemon], tmp_path: Path) -> GitYard:
    return GitYard(daemons[0], tmp_path)


@pytest.fixture
def there(daemons: tuple[Daemon, Daemon], tmp_path: Path) -> GitYard:
    return GitYard(daemons[1], tmp_path)


_names = iter(f"repo-{number}" for number in range(1000))


def filled(yard: GitYard, **fields: Any) -> str:
    """A repository with two commits on main, a branch and a tag."""
    name = next(_names)
    yard.repo(name, **fields)
    work = yard.clone(name, f"work-{name}")
    yard.commit(work, {"a.txt": "first\n"}, "first")
    yard.run("tag", "v1", cwd=work)
    yard.commit(work, {"a.txt": "second\n", "bin/run": "#!/bin/sh\n"}, "second")
    yard.run("branch", "side", "HEAD~1", cwd=work)
    yard.run("push", "--quiet", "origin", "main", "side", "v1", cwd=work)
    return name


def public(yard: GitYard) -> str:
    return yard.url(filled(yard, visibility="public"), "")


def test_a_hosted_repository_is_there_by_its_name_and_calls_an_inner_address_that_stays_its_origin(
    fy: Forkyard, here: GitYard, tmp_path: Path
) -> None:
    name, path = filled(here), tmp_path / "app"
    sbx = fy.sandboxes.create(git=[GitRepo(name, str(path))])
    assert (path / "a.txt").read_text() == "second\n"
    git = f"git -C {path}"
    assert sbx.exec(f"{git} status --porcelain --branch").stdout == "## main...origin/main\n"
    repo_id = fy.git.repo(name).id  # of its name it may get another
    assert sbx.exec(f"{git} remote get-url origin").stdout == f"http://git.forkyard.internal/{repo_id}.git\n"
    assert sbx.exec(f"{git} fsck --strict").exit_code == 0
    assert here.daemon.key not in (path / ".git" / "config").read_text()


@pytest.mark.parametrize(
    ("rev", "text", "head"), [("side", "first\n", "side"), ("v1", "first\n", "HEAD"), ("main~1", "first\n", "HEAD")]
)
@pytest.mark.parametrize("hosted", [True, False])
def test_a_branch_is_checked_out_and_another_revision_is_detached(
    fy: Forkyard, here: GitYard, there: GitYard, tmp_path: Path, rev: str, text: str, head: str, hosted: bool
) -> None:
    url = filled(here) if hosted else public(there)
    path = tmp_path / "app"
    if rev == "main~1":  # a commit by its name
        work = tmp_path / f"work-{url.rpartition('/')[2].removesuffix('.git')}"
        rev = here.run("rev-parse", "main~1", cwd=work).stdout.strip()
    sbx = fy.sandboxes.create(git=[f"{url}#{rev}:{path}"], network=LOOPBACK)
    assert (path / "a.txt").read_text() == text
    assert sbx.exec(f"git -C {path} rev-parse --abbrev-ref HEAD").stdout.strip() == head
    shallow = tmp_path / "shallow"
    sbx = fy.sandboxes.create(git=[GitRepo(url, str(shallow), rev, 1)], network=LOOPBACK)
    assert (shallow / "a.txt").read_text() == text
    assert sbx.exec(f"git -C {shallow} rev-list --count HEAD").stdout == "1\n"


def test_the_second_clone_comes_from_the_mirror_and_has_what_is_new(
    fy: Forkyard, there: GitYard, daemons: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    url = public(there)
    fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "one"))], network=LOOPBACK)
    mirrors = daemons[0].root / "state" / "git" / "mirrors"
    before = {path.name for path in mirrors.glob("*.git/objects/pack/*.pack")}
    work = tmp_path / f"work-{url.rpartition('/')[2].removesuffix('.git')}"
    there.commit(work, {"a.txt": "third\n"}, "third")
    there.run("push", "--quiet", cwd=work)
    fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "two"))], network=LOOPBACK)
    assert (tmp_path / "two" / "a.txt").read_text() == "third\n"
    assert before < {path.name for path in mirrors.glob("*.git/objects/pack/*.pack")}
    assert not list((daemons[0].root / "state" / "git" / "clones").iterdir())


@pytest.mark.parametrize("damage", ["lock", "head", "objects"])
def test_a_mirror_that_is_damaged_is_made_anew(
    fy: Forkyard, there: GitYard, daemons: tuple[Daemon, Daemon], tmp_path: Path, damage: str
) -> None:
    url, mirrors = public(there), daemons[0].root / "state" / "git" / "mirrors"
    before = set(mirrors.glob("*.git"))
    fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "one"))], network=LOOPBACK)
    (mirror,) = set(mirrors.glob("*.git")) - before
    work = tmp_path / f"work-{url.rpartition('/')[2].removesuffix('.git')}"
    there.commit(work, {"a.txt": "third\n"}, "third")
    there.run("push", "--quiet", cwd=work)
    if damage == "lock":
        (mirror / "refs" / "heads" / "main.lock").touch()
    elif damage == "head":
        (mirror / "HEAD").write_text("?")
    else:
        for pack in mirror.glob("objects/pack/*"):
            pack.unlink()
    fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "two"))], network=LOOPBACK)
    assert (tmp_path / "two" / "a.txt").read_text() == "third\n"


@pytest.mark.parametrize(("rev", "head"), [("refs/heads/side", "side"), ("refs/tags/v1", "HEAD")])
@pytest.mark.parametrize("hosted", [True, False])
def test_a_revision_may_be_a_whole_ref(
    fy: Forkyard, here: GitYard, there: GitYard, tmp_path: Path, rev: str, head: str, hosted: bool
) -> None:
    url, path = filled(here) if hosted else public(there), tmp_path / "app"
    sbx = fy.sandboxes.create(git=[GitRepo(url, str(path), rev)], network=LOOPBACK)
    assert (path / "a.txt").read_text() == "first\n"
    assert sbx.exec(f"git -C {path} rev-parse --abbrev-ref HEAD").stdout.strip() == head


@pytest.mark.parametrize("fields", [{"rev": "+main:refs/x"}, {"depth": 10**30}, {"rev": "a b"}])
def test_what_git_would_take_for_something_else_is_refused(here: GitYard, fields: dict[str, Any]) -> None:
    with here.api as api:
        assert api.post("/sandboxes", json={"git": [{"url": "app", **fields}]}).status_code == 422


def test_a_hosted_repository_is_known_by_every_address_of_it(here: GitYard) -> None:
    hosted_name, port = here.daemon.hosting.clones.hosted_name, here.daemon.port
    for url in (
        "app",
        "http://git.forkyard.internal/app.git/",
        *(f"http://{host}:{port}/git/app.git/" for host in ("127.0.0.1", "localhost", "[::1]")),
    ):
        assert hosted_name(url) == "app", url
    for url in (
        f"http://localhost:{port}/app.git",
        f"http://localhost:{port + 1}/git/app.git",
        "http://a:x/git/app",
        "http://[/git/app",
        "https://example.com/git/app.git",
    ):
        assert hosted_name(url) is None, url


def test_a_repository_that_is_too_large_for_a_mirror_is_cloned_without(
    fy: Forkyard, there: GitYard, daemons: tuple[Daemon, Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(_names)
    there.repo(name, visibility="public")
    there.commit(there.clone(name, "large"), {"noise": os.urandom(200_000)})
    there.run("push", "--quiet", cwd=tmp_path / "large")
    monkeypatch.setattr(daemons[0].hosting.clones._mirrors, "_budget_bytes", 100_000)
    mirrors = daemons[0].root / "state" / "git" / "mirrors"
    before = set(mirrors.iterdir())
    fy.sandboxes.create(git=[GitRepo(there.url(name, ""), str(tmp_path / "app"))], network=LOOPBACK)
    assert (tmp_path / "app" / "noise").stat().st_size == 200_000
    assert set(mirrors.iterdir()) <= before


def test_a_clone_goes_only_where_the_sandbox_may_also_if_there_is_a_mirror(
    fy: Forkyard, there: GitYard, tmp_path: Path
) -> None:
    url = public(there)
    fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "one"))], network=LOOPBACK)
    for network in ("coding", "none", "open"):  # `open` is everything public
        with pytest.raises(Forbidden, match=r"127\.0\.0\.1.*forkyard egress allow"):
            fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "two"))], network=network)
    (failed, *_) = [sbx for sbx in fy.sandboxes.list(all=True) if sbx.state == "failed"]
    assert "egress allow" in (failed.info.cause_detail or "")
    denied = [line for line in failed.egress.list() if line.verdict == "denied"]
    assert denied and denied[0].process == "git"


class _Nothing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def nothing_there() -> Iterator[int]:
    """The port of a web server without repositories."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Nothing) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_what_cannot_be_cloned_is_told_by_its_kind(
    fy: Forkyard, here: GitYard, there: GitYard, nothing_there: int, tmp_path: Path
) -> None:
    url, private = public(there), there.url(filled(there), "")
    path = str(tmp_path / "app")
    for repo, error in (
        # Our hosting does not tell strangers what there is.
        (GitRepo(url.replace("repo-", "none-"), path), RemoteDenied),
        (GitRepo(private, path), RemoteDenied),
        (GitRepo(f"http://127.0.0.1:{nothing_there}/a.git", path), RemoteMissing),
        (GitRepo(url, path, "nowhere"), RevisionNotFound),
        (GitRepo(url, path, "0" * 40), RevisionNotFound),
        (GitRepo(url, path, "nowhere", 1), RevisionNotFound),
        (GitRepo("none-of-ours", path), RepoNotFound),
        (GitRepo(filled(here), path, "nowhere"), RevisionNotFound),
        (GitRepo("http://127.0.0.1:9/a.git", path), RemoteFailed),
        (GitRepo(url, path, secret="NOT_STORED"), InvalidRequest),
    ):
        with pytest.raises(error):
            fy.sandboxes.create(git=[repo], network=LOOPBACK)
        assert not Path(path).exists() or not list(Path(path).iterdir()), repo
    (tmp_path / "app" / "mine").mkdir(parents=True)
    with pytest.raises(FileConflict, match="not empty"):
        fy.sandboxes.create(git=[GitRepo(filled(here), path)])
    with pytest.raises(InvalidRequest, match="credential"):
        fy.sandboxes.create(git=["https://me:token@example.com/a.git"])
    with pytest.raises(InvalidRequest, match="two repositories"):
        fy.sandboxes.create(git=["a", "b"])


def test_a_machine_without_git_is_told_so_and_an_empty_repository_needs_none(
    fy: Forkyard, here: GitYard, tmp_path: Path
) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("sh", "bash", "install", "ls"):
        (bare / name).symlink_to(str(shutil.which(name)))
    with pytest.raises(GitFailed, match=r"has no git; install it .*apt"):
        fy.sandboxes.create(git=[GitRepo(filled(here), str(tmp_path / "app"))], env={"PATH": str(bare)})
    here.repo("nothing-in-it")
    fy.sandboxes.create(git=[GitRepo("nothing-in-it", str(tmp_path / "empty"))], env={"PATH": str(bare)})
    assert [entry.name for entry in (tmp_path / "empty").iterdir()] == [".git"]


@pytest.mark.parametrize(("code", "whole"), [(0, True), (1, True), (2, False)])
def test_a_clone_whose_packs_are_linked_again_meanwhile_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, whole: bool
) -> None:
    (tmp_path / "a" / ".git").mkdir(parents=True)
    (tmp_path / "tar").write_text(f'#!/bin/sh\n{shutil.which("tar")} "$@"\nexit {code}\n')
    (tmp_path / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def read() -> bytes:
        return b"".join([chunk async for chunk in _archived(tmp_path / "a" / ".git")])

    with contextlib.nullcontext() if whole else pytest.raises(HostFailure):
        assert b".git/" in asyncio.run(read())


def test_a_credential_opens_a_private_repository_and_is_nowhere_in_the_clone(
    fy: Forkyard, there: GitYard, daemons: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    url = there.url(filled(there), "")
    fy.secrets.set("HOST_TOKEN", there.daemon.key)
    sbx = fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "one"), secret="HOST_TOKEN")], network=LOOPBACK)
    assert (tmp_path / "one" / "a.txt").read_text() == "second\n"
    with pytest.raises(RemoteDenied):  # the mirror is there, and not for whoever shows nothing
        fy.sandboxes.create(git=[GitRepo(url, str(tmp_path / "two"))], network=LOOPBACK)
    own = Secret(hosts=["127.0.0.1.example"], value=there.daemon.key)
    fy.sandboxes.create(
        git=[GitRepo(url, str(tmp_path / "three"), secret="OWN")], secrets={"OWN": own}, network=LOOPBACK
    )
    assert "password=$OWN" in (tmp_path / "three" / ".git" / "config").read_text()
    for root in (tmp_path / "one", tmp_path / "three", daemons[0].root / "state" / "git"):
        for directory, _, files in os.walk(root):
            for name in files:
                assert there.daemon.key.encode() not in (Path(directory) / name).read_bytes(), (directory, name)
    assert there.daemon.key not in sbx.exec("env").stdout
    fy.secrets.delete("HOST_TOKEN")


def test_a_sandbox_with_an_identity_gets_what_that_may_read(fy: Forkyard, here: GitYard, tmp_path: Path) -> None:
    mine, other = filled(here), filled(here)
    identity = fy.identities.create("cloner")
    fy.identities.grant_repo(identity.id, fy.git.repo(mine).id, "read")
    fy.sandboxes.create(identity=identity.id, git=[GitRepo(mine, str(tmp_path / "mine"))])
    assert (tmp_path / "mine" / "a.txt").exists()
    with pytest.raises(RepoNotFound):
        fy.sandboxes.create(identity=identity.id, git=[GitRepo(other, str(tmp_path / "other"))])
    fy.identities.delete(identity.id)


def test_a_step_of_a_spec_and_the_command_line_clone_the_same_way(
    fy: Forkyard, here: GitYard, there: GitYard, tmp_path: Path
) -> None:
    fy.sandboxes.create(spec=Spec().git(filled(here), str(tmp_path / "spec"), "side"))
    assert (tmp_path / "spec" / "a.txt").read_text() == "first\n"
    fy.builds.prune()
    fy.secrets.set("HOST_TOKEN", there.daemon.key)
    url = there.url(filled(there), "")
    made = here.daemon.cli(
        "create",
        "--json",
        "--allow-cidr",
        "127.0.0.1/32",
        "--git-secret",
        "HOST_TOKEN",
        "--git",
        f"{url}#v1:{tmp_path}/cli",
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["state"] == "running"
    assert (tmp_path / "cli" / "a.txt").read_text() == "first\n"
    fy.secrets.delete("HOST_TOKEN")
