"""Identities: tokens, what they open, what they do not, and the log of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import forkyard
from forkyard import Forkyard, Repo
from forkyard.api.access import NEEDS
from forkyard.api.app import create_app

from .git_yard import GitYard
from .sdk_daemon import Daemon


@pytest.fixture
def yard(daemon: Daemon, tmp_path: Path) -> GitYard:
    return GitYard(daemon, tmp_path)


@pytest.fixture
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(daemon.url, daemon.key) as fy:
        yield fy


@pytest.fixture
def repo(fy: Forkyard) -> Iterator[Repo]:
    repo = fy.git.create(files={"a.txt": "hello\n"})
    yield repo
    repo.delete()


@pytest.fixture
def agent(fy: Forkyard) -> Iterator[str]:
    made = fy.identities.create("agent")
    yield made.id
    fy.identities.delete(made.id)


def as_agent(daemon: Daemon, token: str) -> Forkyard:
    return Forkyard(daemon.url, token)


def test_a_token_is_shown_once_and_kept_as_a_hash(fy: Forkyard, agent: str, daemon: Daemon) -> None:
    made = fy.identities.create_token(agent, name="laptop", expires_in_s=3600)
    assert made.token.startswith(made.prefix)
    (listed,) = fy.identities.tokens(agent)
    assert "token" not in listed.model_dump() and listed.name == "laptop"
    files = [path.read_bytes() for path in (daemon.root / "state").glob("forkyard.db*")]
    assert files and not any(made.token.encode() in data for data in files)
    with as_agent(daemon, made.token) as client:
        assert client.identities.whoami().id == agent


def test_an_identity_may_do_nothing_until_it_is_granted_something(
    fy: Forkyard, agent: str, repo: Repo, daemon: Daemon
) -> None:
    token = fy.identities.create_token(agent).token
    with as_agent(daemon, token) as client:
        assert client.git.list() == []
        with pytest.raises(forkyard.RepoNotFound):
            client.git.repo(repo.id)
        for forbidden in (client.keys.list, client.sandboxes.list, client.identities.list, client.identities.audit):
            with pytest.raises(forkyard.Forbidden):
                forbidden()
        with pytest.raises(forkyard.Forbidden):
            client.git.create("mine")
        fy.identities.grant_repo(agent, repo.id, "read")
        granted = client.git.repo(repo.id)
        assert granted.read_text("a.txt") == "hello\n"
        assert [one.id for one in client.git.list()] == [repo.id]
        for write in (
            lambda: granted.commit("m", {"b": "c"}),
            lambda: granted.create_branch("b"),
            lambda: granted.merge("main"),
            lambda: granted.update(visibility="public"),
            granted.token,
            granted.delete,
        ):
            with pytest.raises(forkyard.Forbidden):
                write()
        fy.identities.grant_repo(agent, repo.name, "write")
        assert granted.commit("m", {"b": "c"}).author.name == "agent"
        with pytest.raises(forkyard.Forbidden):
            granted.delete()
        fy.identities.revoke_repo(agent, repo.id)
        with pytest.raises(forkyard.RepoNotFound):
            granted.read("a.txt")


def test_a_revoked_or_expired_token_opens_nothing_from_that_moment(
    fy: Forkyard, agent: str, repo: Repo, yard: GitYard
) -> None:
    fy.identities.grant_repo(agent, repo.id, "write")
    made = fy.identities.create_token(agent)
    short = fy.identities.create_token(agent, expires_in_s=1.5)
    for token in (made.token, short.token):
        yard.run("ls-remote", yard.url(repo.id, token))
    fy.identities.revoke_token(agent, made.id)
    assert yard.run("ls-remote", yard.url(repo.id, made.token), check=False).returncode != 0
    with as_agent(yard.daemon, made.token) as client, pytest.raises(forkyard.Unauthenticated):
        client.identities.whoami()
    assert short.expires_at is not None
    time.sleep(max(0.0, short.expires_at.timestamp() - time.time()) + 0.05)
    with as_agent(yard.daemon, short.token) as client, pytest.raises(forkyard.Unauthenticated):
        client.identities.whoami()


def test_the_same_token_works_for_git_and_everything_it_does_is_logged(
    fy: Forkyard, agent: str, repo: Repo, yard: GitYard
) -> None:
    fy.identities.grant_repo(agent, repo.id, "write")
    made = fy.identities.create_token(agent, sandbox_id="s" * 20)
    work = yard.clone(repo.id, "work", token=made.token)
    sha = yard.commit(work, {"pushed": "x"})
    yard.run("push", "--quiet", cwd=work)
    with as_agent(yard.daemon, made.token) as client:
        client.git.repo(repo.id).commits()
        with pytest.raises(forkyard.Forbidden):
            client.keys.list()
    log = fy.identities.audit(actor_id=agent)
    actions = [(entry.action, entry.resource, entry.allowed) for entry in reversed(log)]
    assert actions == [
        ("git.fetch", repo.id, True),
        ("git.push", repo.id, True),
        ("git.get", repo.id, True),
        ("git.read", repo.id, True),
        ("GET /api/v1/keys", "/api/v1/keys", False),
    ]
    push = next(entry for entry in log if entry.action == "git.push")
    assert (push.actor_name, push.sandbox_id, push.token_id, push.address) == ("agent", "s" * 20, made.id, "127.0.0.1")
    assert push.data["refs"][0]["new"] == sha
    assert [entry.action for entry in fy.identities.audit(action="identity.grant", resource=agent)] == [
        "identity.grant"
    ]


def test_a_fetch_is_logged_also_if_it_does_not_ask_for_the_refs_first(
    fy: Forkyard, agent: str, repo: Repo, yard: GitYard
) -> None:
    fy.identities.grant_repo(agent, repo.id, "read")
    token = fy.identities.create_token(agent).token
    want = f"want {repo.branch('main').sha} ofs-delta\n".encode()
    body = f"{len(want) + 4:04x}".encode() + want + b"00000009done\n"
    headers = {"Content-Type": "application/x-git-upload-pack-request"}
    for _ in range(2):
        answer = httpx.post(
            f"{yard.url(repo.id, '')}/git-upload-pack",
            content=body,
            headers=headers,
            auth=("x", token),
            trust_env=False,
            timeout=60,
        )
        assert b"PACK" in answer.content
    assert [entry.action for entry in fy.identities.audit(actor_id=agent)] == ["git.fetch"]


def test_a_sandbox_is_used_as_the_users_that_are_allowed(fy: Forkyard, agent: str, daemon: Daemon) -> None:
    token = fy.identities.create_token(agent).token
    with fy.sandboxes.create() as mine, fy.sandboxes.create() as other:
        root_shell = mine.spawn(["sleep", "60"], stdin=True)
        with as_agent(daemon, token) as client:
            with pytest.raises(forkyard.SandboxNotFound):
                client.sandboxes.get(mine.id)
            fy.identities.grant_sandbox(agent, mine.id, allowed_users=["user"])
            granted = client.sandboxes.get(mine.id)
            with pytest.raises(forkyard.SandboxNotFound):
                client.sandboxes.get(other.id)
            for refused in (
                lambda: granted.exec("id"),
                lambda: granted.exec("id", user="root"),
                lambda: granted.files.read("/etc/hostname"),
                lambda: granted.files.write("/tmp/x", "x"),
                lambda: request(daemon, token, "POST", f"{mine.id}/execs/{root_shell.id}/stdin", content=b"x"),
                lambda: request(daemon, token, "POST", f"{mine.id}/execs/{root_shell.id}/signal", json={}),
                granted.delete,
                granted.fork,
                granted.snapshot,
                granted.pause,
            ):
                with pytest.raises(forkyard.Forbidden):
                    refused()
            fy.identities.grant_sandbox(agent, mine.id)
            assert granted.exec("echo hi").stdout == "hi\n"
            assert granted.files.exists("/etc/hostname")
            with pytest.raises(forkyard.Forbidden):
                granted.delete()
            fy.identities.revoke_sandbox(agent, mine.id)
            with pytest.raises(forkyard.SandboxNotFound):
                granted.exec("id")


def test_a_terminal_asks_for_the_user_too(fy: Forkyard, agent: str, daemon: Daemon) -> None:
    token = fy.identities.create_token(agent).token
    with fy.sandboxes.create() as sandbox:
        fy.identities.grant_sandbox(agent, sandbox.id, allowed_users=["nobody-here"])
        url = f"ws://127.0.0.1:{daemon.port}/api/v1/sandboxes/{sandbox.id}/terminal?key={token}"
        with pytest.raises(InvalidStatus) as caught, connect(url, proxy=None):
            pass
        assert caught.value.response.status_code == 403
        fy.identities.grant_sandbox(agent, sandbox.id, allowed_users=["root"])
        with connect(url, proxy=None) as socket:
            assert '"started"' in str(socket.recv(10))


def request(daemon: Daemon, token: str, method: str, path: str, **given: Any) -> None:
    from forkyard.errors import from_problem

    url = f"{daemon.url}/api/v1/sandboxes/{path}"
    answer = httpx.request(method, url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, **given)
    if answer.is_error:
        raise from_problem(answer.json())


def test_every_route_in_the_table_of_access_exists() -> None:
    paths = create_app(None).openapi()["paths"]  # type: ignore[arg-type]
    known = {(method.upper(), path.removeprefix("/api/v1")) for path, item in paths.items() for method in item}
    needed = {(method, path.replace(":path}", "}")) for method, path in NEEDS if method != "WEBSOCKET"}
    # Of files the table holds every method of every path; whichever there is needs the same.
    assert {need for need in needed - known if "/files" not in need[1]} == set()


def test_deleting_an_identity_ends_its_tokens(fy: Forkyard, daemon: Daemon) -> None:
    made = fy.identities.create("short-lived")
    token = fy.identities.create_token(made.id).token
    with as_agent(daemon, token) as client:
        client.identities.whoami()
        fy.identities.delete(made.id)
        with pytest.raises(forkyard.Unauthenticated):
            client.identities.whoami()
    with pytest.raises(forkyard.NotFound):
        fy.identities.get(made.id)


def test_deleting_a_repository_ends_the_tokens_made_for_it(fy: Forkyard, daemon: Daemon) -> None:
    repo = fy.git.create()
    token = repo.token().token
    with as_agent(daemon, token) as client:
        client.identities.whoami()
        repo.delete()
        with pytest.raises(forkyard.Unauthenticated):
            client.identities.whoami()


def test_the_command_line_knows_identities(yard: GitYard, repo: Repo) -> None:
    made = yard.cli("identities", "create", "from cli")
    token = yard.cli("identities", "token", made["id"], "--expires", "1h")
    yard.cli("identities", "allow", made["id"], "--repo", repo.name, "--write")
    shown = yard.cli("identities", "show", made["id"])
    assert [grant["permission"] for grant in shown["repos"]] == ["write"]
    assert shown["tokens"][0]["id"] == token["id"]
    yard.run("ls-remote", yard.url(repo.id, token["token"]))
    assert yard.cli("audit", "--actor", made["id"])[0]["action"] == "git.fetch"
    yard.cli("identities", "revoke", made["id"], token["id"])
    assert yard.run("ls-remote", yard.url(repo.id, token["token"]), check=False).returncode != 0
    yard.cli("identities", "rm", made["id"])
