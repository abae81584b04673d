"""In step with another git server: a second daemon, and `git daemon`, both real and both on loopback."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from forkyard import Conflict, Forkyard, InvalidRequest, RemoteFailed
from forkyard.cli.root import cli as forkyard_cli
from forkyard.git.automation import Outward
from forkyard.git.deliveries import Patience
from forkyard.net.outside import Outside
from forkyard.net.resolver import HostResolver

from .git_yard import GitYard, git_env
from .sdk_daemon import running_daemon

FILES = {"type": "files", "files": [{"path": "README.md", "content": "# App\n"}]}
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


class GitHub(HTTPServer):
    """What of GitHub's API an installation token takes."""

    token = ""
    asked = 0

    class Handler(BaseHTTPRequestHandler):
        server: GitHub

        def do_POST(self) -> None:
            scheme, _, claim = self.headers["authorization"].partition(" ")
            claims = jwt.decode(claim, KEY.public_key(), algorithms=["RS256"], options={"verify_iat": False})
            good = (scheme, self.path, claims["iss"]) == ("Bearer", "/app/installations/7/access_tokens", "app1")
            self.server.asked += 1
            expires = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
            body = json.dumps({"token": self.server.token, "expires_at": expires}).encode()
            self.send_response(201 if good else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)


@pytest.fixture(scope="module")
def github() -> Iterator[GitHub]:
    server = GitHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def daemons(github: GitHub) -> Iterator[tuple[Any, Any]]:
    outward = Outward(
        allow_private=True,
        patience=Patience(3, 0.05, 0.1),
        github_api=f"http://127.0.0.1:{github.server_port}",
    )
    with running_daemon(outward) as here, running_daemon(outward) as there:
        yield here, there
        for daemon in (here, there):  # whatever was tried, every repository is whole
            for bare in (daemon.root / "state" / "git").glob("*.git"):
                done = subprocess.run(("git", "-C", bare, "fsck", "--full", "--strict"), capture_output=True, text=True)
                assert done.returncode == 0, f"{bare.name}: {done.stdout}{done.stderr}"


@pytest.fixture
def here(daemons: tuple[Any, Any], tmp_path: Path) -> GitYard:
    (tmp_path / "here").mkdir()
    return GitYard(daemons[0], tmp_path / "here")


@pytest.fixture
def there(daemons: tuple[Any, Any], tmp_path: Path) -> GitYard:
    (tmp_path / "there").mkdir()
    return GitYard(daemons[1], tmp_path / "there")


def remote(here: GitYard, there: GitYard, name: str, **fields: Any) -> dict[str, Any]:
    """The repository of this name here, in step with that of this name there, only when told."""
    with here.api as api:
        assert api.put("/secrets/THERE", json={"value": there.daemon.key}).status_code == 200
        body = {"url": there.url(name, ""), "secret": "THERE", "poll_s": None, **fields}
        answer = api.post(f"/git/repos/{name}/remotes", json=body)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())


def sync(here: GitYard, name: str) -> dict[str, Any]:
    with here.api as api:
        answer = api.post(f"/git/repos/{name}/remotes/origin/sync")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refs(yard: GitYard, name: str) -> dict[str, str]:
    lines = yard.run("ls-remote", yard.url(name), "refs/heads/*", "refs/tags/*").stdout.splitlines()
    return {ref: sha for sha, ref in (line.split("\t") for line in lines) if not ref.endswith("^{}")}


def commit(yard: GitYard, repo: str, path: str, **fields: Any) -> str:
    body = {"message": path, "files": [{"path": path, "content": path}], **fields}
    with yard.api as api:
        answer = api.post(f"/git/repos/{repo}/commits", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["sha"])


def test_a_remote_on_this_host_or_in_a_private_network_is_refused_and_says_how(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        yard = GitYard(daemon, tmp_path)
        yard.repo("home", source=FILES)
        with yard.api as api:
            for url in (yard.url("home", ""), "http://localhost/x", "ssh://git@10.0.0.1/x", "git@127.0.0.1:x"):
                answer = api.post("/git/repos/home/remotes", json={"url": url})
                assert (answer.status_code, "FORKYARD_GIT_ALLOW_PRIVATE" in answer.text) == (403, True), answer.text
            # A name shows where it leads only when it is looked up.
            answer = api.post("/git/repos/home/remotes", json={"url": "http://home.example/x", "poll_s": None})
            assert answer.status_code == 201, answer.text
            daemon.hosting.sync._ways._outside = Outside(HostResolver(lambda _: ["10.0.0.1"]))
            answer = api.post("/git/repos/home/remotes/origin/sync")
            assert (answer.status_code, "FORKYARD_GIT_ALLOW_PRIVATE" in answer.text) == (403, True), answer.text
            assert "10.0.0.1" in api.get("/git/repos/home/remotes/origin").json()["error"]


def until(wish: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not wish():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_branches_tags_and_deletions_go_both_ways(here: GitYard, there: GitYard) -> None:
    mine = here.repo("both")
    theirs = there.repo("both", source=FILES, default_branch="trunk")
    remote(here, there, "both")
    sync(here, "both")
    assert refs(here, "both") == refs(there, "both")
    with here.api as api:
        assert api.get("/git/repos/both").json()["default_branch"] == "trunk"
        # Here: a commit, a branch, an annotated tag.
        commit(here, "both", "a", branch="trunk")
        commit(here, "both", "b", branch="mine", start="trunk")
        api.post("/git/repos/both/tags", json={"name": "v1", "message": "one"})
    # There: another branch and tag.
    commit(there, "both", "c", branch="theirs", start="trunk")
    with there.api as api:
        api.post("/git/repos/both/tags", json={"name": "v2", "rev": "theirs"})
    sync(here, "both")
    assert refs(here, "both") == refs(there, "both")
    assert set(refs(here, "both")) == {f"refs/heads/{n}" for n in ("trunk", "mine", "theirs")} | {
        "refs/tags/v1",
        "refs/tags/v2",
    }
    with here.api as api:
        api.delete("/git/repos/both/branches/mine")
        api.delete("/git/repos/both/tags/v2")
    with there.api as api:
        api.delete("/git/repos/both/branches/theirs")
        api.delete("/git/repos/both/tags/v1")
    report = sync(here, "both")
    assert set(refs(here, "both")) == set(refs(there, "both")) == {"refs/heads/trunk"}
    assert [state["state"] for state in report["refs"]] == ["in_step"]
    here.fsck(mine)
    there.fsck(theirs)


def test_what_has_diverged_is_reported_and_left_and_the_rest_goes_on(here: GitYard, there: GitYard) -> None:
    here.repo("apart")
    there.repo("apart", source=FILES)
    remote(here, there, "apart")
    sync(here, "apart")
    # Made while they cannot hear of each other: the hosts have no sync between these two commits.
    with here.api as api:
        assert api.delete("/git/repos/apart/remotes/origin").status_code == 204
    mine, theirs = commit(here, "apart", "mine"), commit(there, "apart", "theirs")
    commit(here, "apart", "more", branch="fine", start="main")
    with here.api as api:
        api.post("/git/repos/apart/tags", json={"name": "v1", "rev": mine})
    with there.api as api:
        api.post("/git/repos/apart/tags", json={"name": "v1", "rev": theirs})
    remote(here, there, "apart")
    report = sync(here, "apart")
    states = {state["ref"]: state for state in report["refs"]}
    assert states["refs/heads/main"]["state"] == states["refs/tags/v1"]["state"] == "diverged"
    assert (states["refs/heads/main"]["local_sha"], states["refs/heads/main"]["remote_sha"]) == (mine, theirs)
    assert states["refs/heads/fine"]["state"] == "in_step"
    assert (refs(here, "apart")["refs/heads/main"], refs(there, "apart")["refs/heads/main"]) == (mine, theirs)
    with here.api as api:
        assert api.get("/git/repos/apart/remotes/origin").json()["in_step"] is False
        shown = api.get("/git/repos/apart/remotes/origin/refs").json()["items"]
        assert shown[0]["state"] == "diverged"
    # A merge there settles it.
    work = there.clone("apart")
    there.run("pull", "--quiet", "--no-rebase", "--no-edit", here.url("apart"), "main", cwd=work)
    there.run("push", "--quiet", "origin", "main", cwd=work)
    report = sync(here, "apart")
    assert {state["ref"]: state["state"] for state in report["refs"]}["refs/heads/main"] == "in_step"
    assert refs(here, "apart")["refs/heads/main"] == refs(there, "apart")["refs/heads/main"] != mine


def test_history_that_was_rewritten_is_never_forced_on_the_other_side(here: GitYard, there: GitYard) -> None:
    here.repo("force")
    there.repo("force", source=FILES)
    first = refs(there, "force")["refs/heads/main"]
    second = commit(there, "force", "second")
    remote(here, there, "force")
    sync(here, "force")
    assert refs(here, "force")["refs/heads/main"] == second
    work = here.clone("force")
    here.run("reset", "--quiet", "--hard", first, cwd=work)
    other = here.commit(work, {"x": "x"})
    here.run("push", "--quiet", "--force", "origin", "main", cwd=work)
    report = sync(here, "force")
    assert [state["state"] for state in report["refs"]] == ["diverged"]
    assert refs(there, "force")["refs/heads/main"] == second
    assert refs(here, "force")["refs/heads/main"] == other


def test_a_name_in_the_way_of_another_holds_up_nothing_else(here: GitYard, there: GitYard) -> None:
    here.repo("in-the-way", source=FILES)
    there.repo("in-the-way", source=FILES)
    commit(here, "in-the-way", "a", branch="x", start="main")
    commit(there, "in-the-way", "b", branch="x/y", start="main")
    fine = commit(there, "in-the-way", "c", branch="fine", start="main")
    remote(here, there, "in-the-way", direction="in")
    states = {state["ref"]: state for state in sync(here, "in-the-way")["refs"]}
    assert refs(here, "in-the-way")["refs/heads/fine"] == fine
    assert (states["refs/heads/x/y"]["state"], states["refs/heads/x"]["state"]) == ("behind", "ahead")
    assert "in its way" in states["refs/heads/x/y"]["detail"]


def test_hooks_bring_changes_at_once_and_nothing_goes_round_in_circles(here: GitYard, there: GitYard) -> None:
    mine = here.repo("loop")
    there.repo("loop", source=FILES)
    made = remote(here, there, "loop")
    sync(here, "loop")
    # Both ends tell their own triggers; that of the other end is the hook.
    hook = {"type": "webhook", "url": here.daemon.url + made["hook_path"], "secret": made["hook_secret"]}
    watch = {"type": "exec", "sandbox_id": "a" * 20, "command": "true"}  # its log is what counts
    with there.api as api:
        hooked = api.post("/git/repos/loop/triggers", json={"events": ["push"], "action": hook}).json()["id"]
    with here.api as api:
        watched = api.post("/git/repos/loop/triggers", json={"action": watch}).json()["id"]
    theirs = commit(there, "loop", "theirs")
    until(lambda: refs(here, "loop")["refs/heads/main"] == theirs)
    ours = commit(here, "loop", "ours")
    until(lambda: refs(there, "loop")["refs/heads/main"] == ours)

    def told(yard: GitYard, trigger: str) -> list[tuple[str, str]]:
        with yard.api as api:
            items = api.get(f"/git/repos/loop/triggers/{trigger}/deliveries").json()["items"]
        return [(item["after"], item["status"]) for item in items[::-1]]

    until(lambda: told(there, hooked) == [(theirs, "delivered"), (ours, "delivered")])
    sync(here, "loop")
    assert [after for after, _ in told(here, watched)] == [theirs, ours]
    assert len(told(there, hooked)) == 2
    here.fsck(mine)


def test_a_hook_without_the_right_signature_is_refused(here: GitYard, there: GitYard) -> None:
    here.repo("hooked")
    there.repo("hooked", source=FILES)
    made = remote(here, there, "hooked", hook_secret="swordfish")
    body = b'{"ref":"refs/heads/main"}'

    def signed(secret: bytes) -> dict[str, str]:
        return {"X-Hub-Signature-256": "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()}

    path = made["hook_path"].removeprefix("/api/v1")
    with here.as_("nobody") as api:
        api.headers.pop("authorization")
        assert api.post(path, content=body, headers=signed(b"swordfish")).status_code == 202
        bad: list[dict[str, str]] = [signed(b"other"), {}, {"X-Hub-Signature-256": "sha256=é".encode("latin-1")}]  # type: ignore[dict-item]
        for headers in bad:
            assert api.post(path, content=body, headers=headers).status_code == 401
        for missing in (path.replace("origin", "nothing"), path.replace(made["repo_id"], "nothing")):
            assert api.post(missing, content=body, headers=signed(b"swordfish")).status_code == 401
        assert api.get(path.removesuffix("/hook")).status_code == 401


def test_a_remote_is_looked_at_every_so_often(here: GitYard, there: GitYard) -> None:
    here.repo("polled")
    there.repo("polled", source=FILES)
    remote(here, there, "polled", poll_s=1)
    until(lambda: refs(here, "polled") == refs(there, "polled") != {})
    sha = commit(there, "polled", "later")
    until(lambda: refs(here, "polled")["refs/heads/main"] == sha)


def test_direction_and_globs_say_what_goes_where(here: GitYard, there: GitYard) -> None:
    here.repo("inward")
    there.repo("inward", source=FILES)
    remote(here, there, "inward", direction="in", branches=["main", "release/*"], tags=False)
    sync(here, "inward")
    commit(there, "inward", "r", branch="release/1", start="main")
    commit(there, "inward", "x", branch="other", start="main")
    with there.api as api:
        api.post("/git/repos/inward/tags", json={"name": "v1"})
    mine = commit(here, "inward", "mine")
    report = sync(here, "inward")
    assert set(refs(here, "inward")) == {"refs/heads/main", "refs/heads/release/1"}
    assert refs(there, "inward")["refs/heads/main"] != mine
    assert {state["ref"]: state["state"] for state in report["refs"]}["refs/heads/main"] == "ahead"

    here.repo("outward", source=FILES)
    there.repo("outward")
    remote(here, there, "outward", direction="out")
    sync(here, "outward")
    assert refs(here, "outward") == refs(there, "outward")
    commit(there, "outward", "theirs")
    report = sync(here, "outward")
    assert [state["state"] for state in report["refs"]] == ["behind"]


def test_a_credential_is_in_no_argument_file_or_answer(here: GitYard, there: GitYard) -> None:
    repo = here.repo("quiet")
    there.repo("quiet", source=FILES)
    key = there.daemon.key
    basic = base64.b64encode(f"git:{key}".encode()).decode()
    git = here.daemon.hosting.repositories.git
    seen: list[tuple[str, ...]] = []
    plain = git.process

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(tuple(map(str, args)))
        return plain(*args, **options)

    git.process = noted  # type: ignore[method-assign]
    try:
        remote(here, there, "quiet")
        sync(here, "quiet")
        commit(here, "quiet", "a")
        sync(here, "quiet")
    finally:
        del git.process  # type: ignore[method-assign]
    assert any("push" in args for args in seen)
    assert refs(here, "quiet") == refs(there, "quiet")
    with here.api as api:
        shown = api.get("/git/repos/quiet/remotes").text
    files = [path for path in here.bare(repo).rglob("*") if path.is_file() and "objects" not in path.parts]
    files += list((here.daemon.root / "state").glob("forkyard.db*"))
    for text in (repr(seen).encode(), shown.encode(), *(path.read_bytes() for path in files)):
        assert key.encode() not in text
        assert basic.encode() not in text


def test_wrong_credentials_and_bad_urls_are_told(here: GitYard, there: GitYard) -> None:
    here.repo("wrong")
    there.repo("wrong", source=FILES)
    with here.api as api:
        api.put("/secrets/WRONG", json={"value": "fy_wrong"})
    remote(here, there, "wrong", secret="WRONG")
    with here.api as api:
        answer = api.post("/git/repos/wrong/remotes/origin/sync")
        assert (answer.status_code, answer.json()["code"]) == (502, "remote_failed")
        assert "check the secret" in answer.json()["detail"]
        assert "fy_wrong" not in answer.text
        assert api.get("/git/repos/wrong/remotes/origin").json()["error"]
        for url in ("file:///etc", "/etc", "http://u:p@127.0.0.1/x.git", "--upload-pack=x", "ext::sh -c id", "http://"):
            assert api.post("/git/repos/wrong/remotes", json={"name": "b", "url": url}).status_code == 422, url
        body = {"name": "b", "url": "http://127.0.0.1:1/x.git", "secret": "NOT_THERE"}
        assert api.post("/git/repos/wrong/remotes", json=body).status_code == 404
        body = {"name": "origin", "url": "http://127.0.0.1:1/x.git"}
        assert api.post("/git/repos/wrong/remotes", json=body).status_code == 409


def test_a_github_app_gets_its_tokens(here: GitYard, there: GitYard, github: GitHub) -> None:
    here.repo("app")
    there.repo("app", source=FILES)
    github.token = there.daemon.key
    pem = KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    with here.api as api:
        api.put("/secrets/APP_KEY", json={"value": base64.b64encode(pem).decode()})
    app = {"app_id": "app1", "installation_id": 7, "private_key_secret": "APP_KEY"}
    remote(here, there, "app", secret=None, github_app=app)
    sync(here, "app")
    commit(here, "app", "a")
    sync(here, "app")
    assert refs(here, "app") == refs(there, "app")
    assert github.asked == 1


def test_it_works_with_any_git_server(here: GitYard, tmp_path: Path) -> None:
    bare = tmp_path / "served" / "plain.git"
    here.run("init", "--quiet", "--bare", str(bare))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            *("git", "daemon", "--export-all", "--enable=receive-pack", "--reuseaddr", "--listen=127.0.0.1"),
            *(f"--port={port}", f"--base-path={bare.parent}", str(bare.parent)),
        ],
        env=git_env(tmp_path),
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: here.run("ls-remote", f"git://127.0.0.1:{port}/plain.git", check=False).returncode == 0)
        here.repo("plain", source=FILES)
        with here.api as api:
            body = {"url": f"git://127.0.0.1:{port}/plain.git", "poll_s": None}
            assert api.post("/git/repos/plain/remotes", json=body).status_code == 201
        sync(here, "plain")
        assert here.run("rev-parse", "main", cwd=bare).stdout.strip() == refs(here, "plain")["refs/heads/main"]
        sha = here.run("commit-tree", "-m", "there", "-p", "main", "main^{tree}", cwd=bare).stdout.strip()
        here.run("update-ref", "refs/heads/main", sha, cwd=bare)
        sync(here, "plain")
        assert refs(here, "plain")["refs/heads/main"] == sha
    finally:
        server.terminate()
        server.wait(10)


def run(yard: GitYard, *args: str) -> Result:
    """In this process: a new one for each takes its time."""
    return CliRunner().invoke(forkyard_cli, ["--url", yard.daemon.url, "--api-key", yard.daemon.key, *args])


def cli(yard: GitYard, *args: str) -> Any:
    done = run(yard, *args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_command_line_and_the_sdk_keep_in_step_too(here: GitYard, there: GitYard) -> None:
    here.repo("by-cli")
    there.repo("by-cli", source=FILES)
    with here.api as api:
        api.put("/secrets/THERE", json={"value": there.daemon.key})
    url = there.url("by-cli", "")
    made = cli(here, "git", "remotes", "add", "by-cli", url, "--secret", "THERE", "--poll", "never")
    assert made["hook_secret"]
    report = cli(here, "git", "sync", "by-cli")
    assert [state["state"] for state in report["refs"]] == ["in_step"]
    assert "in step" in run(here, "git", "remotes", "ls", "by-cli").output
    assert run(here, "git", "remotes", "show", "by-cli").exit_code == 0
    with Forkyard(here.daemon.url, here.daemon.key) as fy:
        repo = fy.git.repo("by-cli")
        sha = repo.commit("more", {"x": "x"}).sha
        repo.remotes.sync()
        [state] = repo.remotes.refs()
        assert (state.local_sha, state.remote_sha, repo.remotes.get().in_step) == (sha, sha, True)
    assert cli(here, "git", "remotes", "rm", "by-cli", "origin") == {"deleted": ["origin"]}
    assert cli(here, "git", "remotes", "ls", "by-cli") == []


def test_a_remote_can_be_renamed_and_moved_and_given_another_credential(here: GitYard, there: GitYard) -> None:
    here.repo("moving")
    there.repo("moving", source=FILES)
    there.repo("moved")
    remote(here, there, "moving")
    sync(here, "moving")
    with Forkyard(url=here.daemon.url, api_key=here.daemon.key) as fy:
        remotes = fy.git.repo("moving").remotes
        changed = remotes.update("origin", name="hub", url=there.url("moved", ""), poll_s=60)
        assert (changed.name, changed.poll_s) == ("hub", 60) and [one.name for one in remotes.list()] == ["hub"]
        # Nothing was agreed on with the new place, so that what it lacks is not taken for deleted.
        until(lambda: refs(there, "moved") == refs(here, "moving") != {})
        assert remotes.update("hub", secret=None).secret is None
        with pytest.raises(RemoteFailed):
            remotes.sync("hub")
        remotes.create(there.url("moving", ""), "other", secret="THERE")
        with pytest.raises(Conflict, match="another name"):
            remotes.update("hub", name="other")
        with pytest.raises(InvalidRequest, match="cannot be null"):
            remotes.update("hub", url=None)
    done = here.daemon.cli("git", "remotes", "set", "moving", "hub", "--secret", "THERE", "--poll", "never", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["poll_s"] is None, done.stderr
    sync_of = here.daemon.cli("git", "sync", "moving", "hub")
    assert sync_of.returncode == 0, sync_of.stderr
