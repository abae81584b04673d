"""Triggers: what is told of a push, to whom, how often, and what is refused. Endpoints are real servers on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from click.testing import CliRunner, Result

from forkyard import Forkyard, NotFound, WebhookAction
from forkyard.cli.root import cli as forkyard_cli
from forkyard.git import webhooks
from forkyard.git.automation import Outward
from forkyard.git.deliveries import Patience
from forkyard.git.hosting import GitHosting
from forkyard.git.webhooks import Outcome, Sender
from forkyard.net import policy
from forkyard.net.resolver import HostResolver

from .git_yard import GitYard
from .sdk_daemon import Daemon, running_daemon

FILES = {"type": "files", "files": [{"path": "README.md", "content": "# App\n"}]}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    quick = Outward(webhook_timeout_s=0.5, patience=Patience(tries=3, first_s=0.02, most_s=0.05))
    with running_daemon(quick) as daemon:
        yield daemon


@pytest.fixture
def yard(daemon: Daemon, tmp_path: Path) -> GitYard:
    return GitYard(daemon, tmp_path)


@dataclass
class Heard:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Endpoint:
    """Answers as `answers` says, then with 200."""

    url: str = ""
    heard: list[Heard] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    hang: threading.Event | None = None
    news: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, count: int, within_s: float = 10) -> list[Heard]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.heard) >= count, within_s), self.heard
            return list(self.heard)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if found.hang is not None:
                found.hang.wait(10)
            with found.news:
                headers = {name.lower(): value for name, value in self.headers.items()}
                found.heard.append(Heard(self.path, headers, body))
                status, extra = found.answers.pop(0) if found.answers else (200, {})
                found.news.notify_all()
            self.send_response(status)
            for name, value in extra.items():
                self.send_header(name, value)
            self.send_header("content-length", "3")
            self.end_headers()
            self.wfile.write(b"yes")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    if found.hang is not None:
        found.hang.set()
    server.shutdown()
    thread.join()
    server.server_close()


def trigger(yard: GitYard, repo: str, action: dict[str, Any], **fields: Any) -> dict[str, Any]:
    with yard.api as api:
        answer = api.post(f"/git/repos/{repo}/triggers", json={"action": action, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def webhook(endpoint: Endpoint, path: str = "/hook", **fields: Any) -> dict[str, Any]:
    return {"type": "webhook", "url": endpoint.url + path, "allow_private": True, **fields}


def commit(yard: GitYard, repo: str, files: dict[str, str], **fields: Any) -> str:
    changes = [{"path": path, "content": content} for path, content in files.items()]
    with yard.api as api:
        answer = api.post(f"/git/repos/{repo}/commits", json={"message": "work", "files": changes, **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["sha"])


def log(yard: GitYard, repo: str, made: dict[str, Any], until: Callable[[list[Any]], bool]) -> list[Any]:
    """The deliveries, oldest first, once they are as wished."""
    deadline = time.monotonic() + 10
    with yard.api as api:
        while True:
            items = api.get(f"/git/repos/{repo}/triggers/{made['id']}/deliveries").json()["items"][::-1]
            if until(items):
                return list(items)
            assert time.monotonic() < deadline, items
            time.sleep(0.02)


def ended(count: int) -> Callable[[list[Any]], bool]:
    return lambda items: len(items) >= count and all(item["status"] != "pending" for item in items)


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_push_is_told_with_its_commits_and_both_signatures(yard: GitYard, endpoint: Endpoint) -> None:
    repo = yard.repo("told", source=FILES)
    trigger(yard, "told", webhook(endpoint, secret="hush", headers={"Authorization": "Bearer abc"}))
    work = yard.clone("told")
    before = yard.run("rev-parse", "HEAD", cwd=work).stdout.strip()
    after = yard.commit(work, {"a.txt": "a"}, "Add a")
    yard.run("push", "--quiet", cwd=work)
    [heard] = endpoint.wait(1)
    told = heard.json
    assert (told["event"], told["ref"], told["before"], told["after"]) == ("push", "refs/heads/main", before, after)
    assert told["repository"] == {"id": repo["id"], "name": "told"}
    assert [(one["sha"], one["message"].strip()) for one in told["commits"]] == [(after, "Add a")]
    assert told["pusher"]["id"]
    assert heard.headers["x-forkyard-delivery"] == told["delivery"]
    assert heard.headers["authorization"] == "Bearer abc"
    wanted = "sha256=" + hmac.new(b"hush", heard.body, hashlib.sha256).hexdigest()
    assert heard.headers["x-hub-signature-256"] == wanted
    keys = httpx.get(f"{yard.daemon.url}/.well-known/jwks.json", trust_env=False).json()["keys"]
    token = heard.headers["x-forkyard-signature"]
    [key] = [jwt.PyJWK(one) for one in keys if one["kid"] == jwt.get_unverified_header(token)["kid"]]
    claims = jwt.decode(token, key, algorithms=["EdDSA"])
    assert claims["body_sha256"] == hashlib.sha256(heard.body).hexdigest()
    assert claims["jti"] == told["delivery"]


def test_each_event_is_told_once_by_its_first_name(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("names", source=FILES)
    every = ["push", "branch.created", "branch.deleted", "tag.created", "tag.deleted"]
    made = trigger(yard, "names", webhook(endpoint), events=every)
    work = yard.clone("names")
    yard.run("push", "--quiet", "origin", "HEAD:refs/heads/fix", "HEAD:refs/tags/v1", cwd=work)
    log(yard, "names", made, ended(2))
    yard.commit(work, {"b": "b"})
    yard.run("push", "--quiet", "origin", "HEAD:fix", cwd=work)
    log(yard, "names", made, ended(3))
    yard.run("push", "--quiet", "origin", ":fix", ":refs/tags/v1", cwd=work)
    items = log(yard, "names", made, ended(5))
    assert sorted((item["event"], item["ref"]) for item in items) == [
        ("branch.created", "refs/heads/fix"),
        ("branch.deleted", "refs/heads/fix"),
        ("push", "refs/heads/fix"),
        ("tag.created", "refs/tags/v1"),
        ("tag.deleted", "refs/tags/v1"),
    ]
    assert len(endpoint.heard) == 5


def test_filters_by_event_branch_and_path_decide(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("filters", source=FILES)
    trigger(yard, "filters", webhook(endpoint, "/docs"), paths=["docs/**", "*.md"])
    trigger(yard, "filters", webhook(endpoint, "/release"), branches=["release/*"])
    trigger(yard, "filters", webhook(endpoint, "/tags"), events=["tag.created"], tags=["v*"])
    trigger(yard, "filters", webhook(endpoint, "/off"), enabled=False)
    last = trigger(yard, "filters", webhook(endpoint, "/all"), events=["push", "branch.created"])
    commit(yard, "filters", {"src/a.py": "1"})
    commit(yard, "filters", {"docs/deep/b.txt": "1"})
    commit(yard, "filters", {"sub/c.md": "1"})
    commit(yard, "filters", {"x": "1"}, branch="release/1", start="main")
    log(yard, "filters", last, ended(4))
    paths = sorted(heard.path for heard in endpoint.wait(6))
    assert paths == ["/all"] * 4 + ["/docs", "/release"]


def test_pushes_at_once_are_told_each(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("many", source=FILES)
    made = trigger(yard, "many", webhook(endpoint), events=["branch.created"])
    work = yard.clone("many")
    threads = [
        threading.Thread(target=yard.run, args=("push", "--quiet", "origin", f"HEAD:b{n}"), kwargs={"cwd": work})
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log(yard, "many", made, ended(8))
    # At least once: an answer that came late is one that did not come.
    assert {heard.json["ref"] for heard in endpoint.heard} == {f"refs/heads/b{n}" for n in range(8)}


def test_what_a_daemon_that_died_had_no_time_to_tell_is_told_by_the_next(yard: GitYard, endpoint: Endpoint) -> None:
    repo = yard.repo("crash", source=FILES)
    made = trigger(yard, "crash", webhook(endpoint), events=["push", "branch.deleted", "branch.created"])
    commit(yard, "crash", {"a": "1"}, branch="old", start="main")
    log(yard, "crash", made, ended(1))
    # Git moved refs, and nobody heard: exactly what a crash between the two leaves.
    bare = yard.bare(repo)
    sha = yard.run("commit-tree", "-m", "lost", "-p", "main", "main^{tree}", cwd=bare).stdout.strip()
    yard.run("update-ref", "refs/heads/main", sha, cwd=bare)
    yard.run("update-ref", "-d", "refs/heads/old", cwd=bare)
    next_one = GitHosting(
        yard.daemon._store,
        yard.daemon._control.identities,
        yard.daemon.root / "state" / "git",
        control=yard.daemon._control,
        outward=yard.daemon.outward,
    )

    async def start() -> None:
        await next_one.start()
        next_one.automation.deliver()

    yard.daemon._run(start())
    items = log(yard, "crash", made, ended(3))
    assert [(item["event"], item["ref"]) for item in items[1:]] == [
        ("push", "refs/heads/main"),
        ("branch.deleted", "refs/heads/old"),
    ]
    assert items[1]["after"] == sha
    yard.daemon._run(next_one.stop())


# ── when it goes wrong ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_endpoint_that_fails_is_tried_again_with_the_same_id(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("again", source=FILES)
    endpoint.answers = [(500, {}), (503, {})]
    made = trigger(yard, "again", webhook(endpoint))
    commit(yard, "again", {"a": "1"})
    [item] = log(yard, "again", made, ended(1))
    assert item["status"] == "delivered"
    assert [attempt["status"] for attempt in item["attempts"]] == [500, 503, 200]
    assert item["attempts"][-1]["response"] == "yes"
    assert {heard.headers["x-forkyard-delivery"] for heard in endpoint.heard} == {item["id"]}
    assert len({heard.body for heard in endpoint.heard}) == 1


def test_it_is_given_up_after_some_tries_and_can_be_redelivered(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("give-up", source=FILES)
    endpoint.answers = [(500, {})] * 3
    made = trigger(yard, "give-up", webhook(endpoint))
    commit(yard, "give-up", {"a": "1"})
    [item] = log(yard, "give-up", made, ended(1))
    assert (item["status"], len(item["attempts"])) == ("failed", 3)
    path = f"/git/repos/give-up/triggers/{made['id']}/deliveries/{item['id']}"
    with yard.api as api:
        assert api.post(f"{path}/redeliver").status_code == 202
        [item] = log(yard, "give-up", made, lambda items: items[0]["status"] == "delivered")
        assert api.get(path).json()["payload"] == endpoint.heard[0].json
    assert len(endpoint.heard) == 4


def test_one_that_hangs_is_cut_off_and_keeps_no_other_waiting(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("hang", source=FILES)
    slow = trigger(yard, "hang", {"type": "webhook", "url": "http://192.0.2.1:9/", "allow_private": True})
    good = trigger(yard, "hang", webhook(endpoint))
    commit(yard, "hang", {"a": "1"})
    [item] = log(yard, "hang", good, ended(1))
    assert item["attempts"][0]["duration_ms"] < 400
    endpoint.hang = threading.Event()
    commit(yard, "hang", {"a": "2"})
    items = log(yard, "hang", good, ended(2))
    assert [(one["status"], one["error"]) for one in items[1]["attempts"]] == [
        (None, "no whole answer within 0.5 s")
    ] * 3
    assert log(yard, "hang", slow, lambda items: items[0]["status"] == "failed")


def test_a_redirect_to_a_private_address_is_refused(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the endpoint's address, 127.0.0.1, were on the public Internet."""
    monkeypatch.setattr(policy, "is_special", lambda address: str(address) != "127.0.0.1")
    monkeypatch.setattr(webhooks, "is_own", lambda address: False)

    async def post(location: str, *, allowed: bool = False) -> Outcome:
        endpoint.answers = [(307, {"location": location})]
        resolver = HostResolver(lambda name: {"inside.example": ["10.0.0.1"]}.get(name, []))
        sender = Sender(
            resolver,
            ssl.create_default_context(),
            timeout_s=2,
            allow_private=False,
        )
        try:
            return await sender.post(endpoint.url, {}, {}, b"{}", allow_private=allowed)
        finally:
            resolver.close()

    port = endpoint.url.rpartition(":")[2]
    for target in ("http://10.0.0.1/", "http://169.254.169.254/meta", f"http://127.0.0.2:{port}/", "//inside.example/"):
        outcome = asyncio.run(post(target))
        assert not outcome.ok
        assert not outcome.retry
        assert "private or reserved network" in str(outcome.error)
    assert asyncio.run(post("http://[::1]/")).error == "it cannot be reached: ::1 has no IPv4 address"
    assert asyncio.run(post(f"{endpoint.url}/two")).ok
    assert asyncio.run(post("file:///etc/passwd")).error


def test_a_redirect_is_followed_a_few_times_without_private_headers(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("redirects", source=FILES)
    other = endpoint.url.replace("127.0.0.1", "localhost")
    endpoint.answers = [(307, {"location": f"{other}/two"})]
    made = trigger(yard, "redirects", webhook(endpoint, headers={"Authorization": "Bearer abc"}))
    commit(yard, "redirects", {"a": "1"})
    [item] = log(yard, "redirects", made, ended(1))
    assert item["status"] == "delivered"
    assert [heard.path for heard in endpoint.heard] == ["/hook", "/two"]
    assert "authorization" not in endpoint.heard[1].headers
    endpoint.answers = [(307, {"location": "/round"})] * 20
    commit(yard, "redirects", {"a": "2"})
    items = log(yard, "redirects", made, ended(2))
    assert "more than 3 times" in items[1]["attempts"][0]["error"]


def test_private_addresses_are_refused_from_the_start(yard: GitYard) -> None:
    yard.repo("private", source=FILES)
    with yard.api as api:
        for url in ("http://127.0.0.1/x", "http://localhost:99/", "http://10.1.2.3", "http://169.254.169.254/"):
            answer = api.post("/git/repos/private/triggers", json={"action": {"type": "webhook", "url": url}})
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
        nul = {"type": "exec", "sandbox_id": "a" * 20, "command": "a\0b"}
        assert api.post("/git/repos/private/triggers", json={"action": nul}).status_code == 422
        for url in ("ftp://example.com", "http://u:p@example.com/", "http://example.com:99999/", "http://a b/"):
            answer = api.post("/git/repos/private/triggers", json={"action": {"type": "webhook", "url": url}})
            assert answer.status_code == 422, url


def test_a_name_that_leads_to_a_private_address_is_refused_when_it_is_used(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("rebind", source=FILES)
    # Forms of 127.0.0.1 that only a resolver understands.
    made = trigger(yard, "rebind", {"type": "webhook", "url": endpoint.url.replace("127.0.0.1", "127.1")})
    commit(yard, "rebind", {"a": "1"})
    [item] = log(yard, "rebind", made, ended(1))
    assert "127.1 (127.0.0.1)" in item["attempts"][0]["error"]
    assert endpoint.heard == []


def test_what_is_secret_is_not_shown_and_not_in_the_database(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("hidden", source=FILES)
    made = trigger(yard, "hidden", webhook(endpoint, secret="hush-hush", headers={"X-Key": "top-secret"}))
    with yard.api as api:
        shown = api.get(f"/git/repos/hidden/triggers/{made['id']}").text + api.get("/git/repos/hidden/triggers").text
    assert "hush-hush" not in shown
    assert "top-secret" not in shown
    for file in (yard.daemon.root / "state").glob("forkyard.db*"):
        assert b"top-secret" not in file.read_bytes()
        assert b"hush-hush" not in file.read_bytes()


def test_triggers_take_an_api_key(yard: GitYard) -> None:
    yard.repo("keys-only", source=FILES)
    with yard.api as api:
        token = api.post("/git/repos/keys-only/tokens", json={}).json()["token"]
    with yard.as_(token) as identity:
        assert identity.get("/git/repos/keys-only/triggers").status_code == 403
        body = {"action": {"type": "webhook", "url": "https://example.com/"}}
        assert identity.post("/git/repos/keys-only/triggers", json=body).status_code == 403


def test_a_trigger_of_another_repository_is_not_found(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("mine", source=FILES)
    yard.repo("yours", source=FILES)
    made = trigger(yard, "mine", webhook(endpoint))
    with yard.api as api:
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/deliveries")):
            assert api.request(method, f"/git/repos/yours/triggers/{made['id']}{rest}").status_code == 404
        assert api.delete(f"/git/repos/mine/triggers/{made['id']}").status_code == 204
        assert api.get("/git/repos/mine/triggers").json()["items"] == []
    commit(yard, "mine", {"a": "1"})
    assert endpoint.heard == []


# ── other actions ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_push_starts_a_sandbox_that_knows_what_was_pushed(yard: GitYard) -> None:
    yard.repo("starts", source=FILES)
    made = trigger(yard, "starts", {"type": "sandbox", "sandbox": {"name": "ci", "env": {"MODE": "test"}}})
    sha = commit(yard, "starts", {"a": "1"})
    [item] = log(yard, "starts", made, ended(1))
    assert item["status"] == "delivered", item
    sandbox_id = item["attempts"][0]["response"]
    with yard.api as api:
        info = api.get(f"/sandboxes/{sandbox_id}").json()
        assert (info["name"], info["state"]) == ("ci", "running")
        record = yard.daemon._run(yard.daemon._store.sandbox(sandbox_id))
        assert record is not None
        env = record.env
        assert (env["MODE"], env["FORKYARD_REPO"], env["FORKYARD_REF"], env["FORKYARD_SHA"]) == (
            "test",
            "starts",
            "refs/heads/main",
            sha,
        )
        api.delete(f"/sandboxes/{sandbox_id}")


def test_a_push_runs_a_command_in_a_sandbox(yard: GitYard, tmp_path: Path) -> None:
    yard.repo("reload", source=FILES)
    with yard.api as api:
        sandbox_id = api.post("/sandboxes", json={}).json()["id"]
    command = f'echo "$FORKYARD_REPO $FORKYARD_SHA" | tee {tmp_path}/told; [ "$FORKYARD_REF" = refs/heads/main ]'
    made = trigger(yard, "reload", {"type": "exec", "sandbox_id": sandbox_id, "command": command})
    sha = commit(yard, "reload", {"a": "1"})
    [item] = log(yard, "reload", made, ended(1))
    assert (item["status"], item["attempts"][0]["status"]) == ("delivered", 0), item
    assert (tmp_path / "told").read_text() == f"reload {sha}\n"
    commit(yard, "reload", {"a": "2"}, branch="other", start="main")
    items = log(yard, "reload", made, ended(2))
    assert (items[1]["status"], items[1]["attempts"][0]["status"]) == ("failed", 1)
    assert len(items[1]["attempts"]) == 1
    with yard.api as api:
        api.delete(f"/sandboxes/{sandbox_id}")
    commit(yard, "reload", {"a": "3"})
    items = log(yard, "reload", made, ended(3))
    assert items[2]["status"] == "failed"


# ── SDK and command line ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_sdk_makes_triggers_and_reads_their_log(yard: GitYard, endpoint: Endpoint) -> None:
    with Forkyard(yard.daemon.url, yard.daemon.key) as fy:
        repo = fy.git.create("by-sdk", files={"a": "a"})
        made = repo.triggers.create(WebhookAction(url=endpoint.url, allow_private=True), branches=["main"])
        assert [one.id for one in repo.triggers.list()] == [made.id]
        repo.commit("more", {"b": "b"})
        endpoint.wait(1)
        log(yard, "by-sdk", {"id": made.id}, ended(1))
        [delivery] = repo.triggers.deliveries(made.id, status="delivered")
        assert repo.triggers.delivery(made.id, delivery.id).payload["delivery"] == delivery.id
        repo.triggers.redeliver(made.id, delivery.id)
        endpoint.wait(2)
        assert repo.triggers.update(made.id, enabled=False).enabled is False
        assert repo.triggers.get(made.id).branches == ["main"]
        repo.triggers.delete(made.id)
        with pytest.raises(NotFound):
            repo.triggers.get(made.id)


def run(yard: GitYard, *args: str) -> Result:
    """In this process: a new one for each takes its time."""
    return CliRunner().invoke(forkyard_cli, ["--url", yard.daemon.url, "--api-key", yard.daemon.key, *args])


def cli(yard: GitYard, *args: str) -> Any:
    done = run(yard, *args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_command_line_makes_triggers_and_reads_their_log(yard: GitYard, endpoint: Endpoint) -> None:
    yard.repo("by-cli", source=FILES)
    made = cli(
        yard, "git", "triggers", "add", "by-cli", "--webhook", endpoint.url, "--allow-private", "--branch", "main"
    )
    assert [one["id"] for one in cli(yard, "git", "triggers", "ls", "by-cli")] == [made["id"]]
    commit(yard, "by-cli", {"a": "1"})
    log(yard, "by-cli", made, ended(1))
    shown = run(yard, "git", "triggers", "deliveries", "by-cli", made["id"]).output
    assert "delivered" in shown
    [item] = cli(yard, "git", "triggers", "deliveries", "by-cli", made["id"])
    cli(yard, "git", "triggers", "redeliver", "by-cli", made["id"], item["id"])
    endpoint.wait(2)
    assert cli(yard, "git", "triggers", "rm", "by-cli", made["id"]) == {"deleted": [made["id"]]}
    assert run(yard, "git", "triggers", "add", "by-cli").exit_code == 2
