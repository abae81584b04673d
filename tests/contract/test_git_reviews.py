"""Reviews, over the real API with the real git: hosted branches, and pull requests of a GitHub that is strict."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forkyard import Conflict, Forkyard, GitHubApp, InvalidRequest, NotFound, Repo, RevisionNotFound
from forkyard.models.reviews import Dossier, ReviewComment, ReviewVerdict

from .fake_github import TOKEN, FakeGitHub, fake_github
from .git_yard import GitYard
from .sdk_daemon import Daemon, running_daemon

STEPS = [
    {"name": "lint", "command": ["grep", "-q", "two", "a.txt"]},
    {"name": "test", "command": 'echo tested $FORKYARD_HEAD_SHA; test -z "$(git status --porcelain)"'},
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yard = GitYard(daemon, daemon.root)
        # These guests have no door; a real one needs no credential in there.
        daemon.hosting.reviews.inside_url = yard.url
        yield daemon


@pytest.fixture
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(daemon.url, daemon.key) as fy:
        yield fy
        assert fy.sandboxes.list() == []  # whatever became of a review, its copies are gone


@pytest.fixture
def repo(fy: Forkyard) -> Iterator[Repo]:
    # No two are alike, also if they are made in the same second: what was reviewed once is not reviewed again.
    repo = fy.git.create(files={"a.txt": "one\n", "which": secrets.token_hex()})
    repo.create_branch("fix")
    repo.commit("Count on", {"a.txt": "one\ntwo\n", "new.txt": "new\n"}, branch="fix")
    yield repo
    repo.delete()


def plan(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    return {"directory": str(tmp_path / "work"), "steps": STEPS, **fields}


def test_a_branch_is_reviewed_and_the_verdict_kept(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    review = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path))
    assert (review.state, review.error) == ("done", None)
    assert [(step.name, step.passed) for step in review.steps] == [("lint", True), ("test", True)]
    assert review.steps[1].output == f"tested {review.target.head_sha}\n"
    assert review.verdict is not None and review.verdict.event == "APPROVE"
    assert review.target.head_sha == repo.branch("fix").sha and review.target.title == "Count on"
    assert fy.reviews.list(repo.id) == [review]
    dossier = fy.reviews.dossier(review.id)
    assert {file.path for file in dossier.diff.files} == {"a.txt", "new.txt"} and dossier.diff.additions == 2


def test_steps_that_fail_hang_or_do_not_exist_ask_for_changes(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    steps = [
        {"name": "fails", "command": "echo why; exit 3"},
        {"name": "hangs", "command": "sleep 60", "timeout_s": 0.5},
        {"name": "missing", "command": ["no-such-program"]},
        {"name": "loud", "command": "yes | head -c 200000"},
    ]
    review = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path, steps=steps))
    fails, hangs, missing, loud = review.steps
    assert (fails.exit_code, fails.output) == (3, "why\n")
    assert hangs.timed_out and not hangs.passed
    assert not missing.passed and "no-such-program" in missing.output
    assert loud.passed and loud.truncated and len(loud.output) == 65536
    assert review.verdict is not None and review.verdict.event == "REQUEST_CHANGES"
    assert "| fails | failed (3) |" in review.verdict.body


def test_a_head_is_reviewed_once_however_often_it_is_asked_for(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    target = {"type": "hosted", "repo": repo.name, "head": "fix"}
    ids = {fy.reviews.request(target, plan(tmp_path)).id for _ in range(5)}
    assert len(ids) == 1
    first = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path))
    assert {first.id} == ids
    assert fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path), key="again").id != first.id
    repo.commit("More", {"a.txt": "two\n"}, branch="fix")
    assert fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path)).id != first.id


def test_a_review_that_failed_is_tried_again(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    broken = plan(tmp_path, reviewer={"type": "command", "command": "echo this is no verdict"})
    failed = fy.reviews.branch(repo.name, "fix", plan=broken)
    assert failed.state == "failed" and "not JSON" in (failed.error or "")
    again = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path))
    assert (again.id, again.state, again.error) == (failed.id, "done", None)


def test_a_command_reviews_in_a_copy_of_its_own(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    script = tmp_path / "reviewer.py"
    script.write_text(
        "import json, sys\nd = json.load(sys.stdin)\n"
        "c = [{'path': f['path'], 'line': 1, 'body': 'hm'} for f in d['diff']['files']]\n"
        "print(json.dumps({'event': 'COMMENT', 'body': d['steps'][0]['name'], 'comments': c}))\n"
    )
    with fy.sandboxes.create() as warm:
        reviewer = {"type": "command", "command": [sys.executable, str(script)]}
        review = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path, sandbox=warm.id, reviewer=reviewer))
        copies = [info for info in fy.sandboxes.list(all=True) if info.parent_id == warm.id]
        assert len(copies) == 2  # the steps', and the reviewer's
    assert review.error is None
    assert review.verdict == ReviewVerdict(
        event="COMMENT",
        body="lint",
        comments=[ReviewComment(path=path, line=1, body="hm") for path in ("a.txt", "new.txt")],
    )


def test_an_endpoint_reviews(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    seen: list[tuple[str | None, dict[str, Any]]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.headers.get("authorization"), body))
            answer = json.dumps({"event": "APPROVE", "body": "x" * 50_000}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    fy.secrets.set("REVIEWER_TOKEN", "t0k3n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reviewer: dict[str, Any] = {
            "type": "http",
            "url": f"http://127.0.0.1:{server.server_port}/review",
            "secret": "REVIEWER_TOKEN",
        }
        refused = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path, reviewer=reviewer))
        assert refused.state == "failed" and "allow_private" in (refused.error or "") and not seen
        reviewer["allow_private"] = True
        review = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path, reviewer=reviewer))
        server.shutdown()
    assert review.verdict is not None and len(review.verdict.body) == 50_000
    ((authorization, dossier),) = seen
    assert authorization == "Bearer t0k3n" and Dossier.model_validate(dossier).review_id == review.id


def test_a_client_reviews_and_only_once(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    def reviewer(dossier: Dossier) -> ReviewVerdict:
        assert dossier.target.repository == repo.name
        return ReviewVerdict(event="APPROVE", body="fine")

    review = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path), reviewer=reviewer)
    assert review.state == "done" and review.verdict == ReviewVerdict(event="APPROVE", body="fine")
    with pytest.raises(Conflict):
        fy.reviews.give(review.id, ReviewVerdict(event="COMMENT", body="late"))


def test_the_command_line_runs_a_reviewer_of_this_machine(
    fy: Forkyard, daemon: Daemon, repo: Repo, tmp_path: Path
) -> None:
    script = tmp_path / "reviewer"
    script.write_text('#!/bin/sh\ncat > /dev/null\necho \'{"event": "REQUEST_CHANGES", "body": "no"}\'\n')
    script.chmod(0o755)
    options = ["--directory", str(tmp_path / "work"), "--step", "lint=true", "--reviewer", str(script)]
    done = daemon.cli("review", repo.name, "fix", *options, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"]["body"] == "no"
    assert fy.reviews.list(repo.name)[0].state == "done"


def test_what_is_not_there_is_told_at_once(fy: Forkyard, repo: Repo, tmp_path: Path) -> None:
    with pytest.raises(RevisionNotFound):
        fy.reviews.branch(repo.name, "nowhere")
    with pytest.raises(NotFound):
        fy.reviews.branch("no-such-repo", "main")
    with pytest.raises(NotFound):
        fy.reviews.get("rv0")
    with pytest.raises(InvalidRequest):
        fy.reviews.branch(repo.name, "fix", plan={"steps": [{"name": "x"}]})
    gone = fy.reviews.branch(repo.name, "fix", plan=plan(tmp_path, sandbox="0" * 20))
    assert gone.state == "failed" and "0" * 20 in (gone.error or "")


# ── GitHub ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def github(fy: Forkyard, daemon: Daemon, repo: Repo) -> Iterator[FakeGitHub]:
    fy.secrets.set("GITHUB_TOKEN", TOKEN)
    with fake_github() as github:
        daemon.hosting.reviews.github_api = github.url
        diff = repo.compare("main", "fix")
        github.pull = {
            "title": "Count on",
            "body": None,
            "head": {"ref": "fix", "sha": diff.head},
            "base": {"ref": "main", "sha": diff.base, "repo": {"clone_url": repo.token("read").clone_url}},
        }
        github.files = [
            {
                "filename": file.path,
                "status": file.status,
                "additions": file.additions,
                "deletions": file.deletions,
                "changes": file.additions + file.deletions,
                "sha": file.new_sha,
                "patch": file.patch,
            }
            for file in diff.files
        ]
        yield github


def ask(fy: Forkyard, tmp_path: Path, verdict: ReviewVerdict, **options: Any) -> Any:
    return fy.reviews.pull_request(
        "acme", "app", 7, secret="GITHUB_TOKEN", plan=plan(tmp_path), reviewer=lambda _: verdict, **options
    )


def test_a_review_is_posted_with_its_comments_where_github_takes_them(
    fy: Forkyard, github: FakeGitHub, tmp_path: Path
) -> None:
    comments = [ReviewComment(path="a.txt", line=2, body="why two?"), ReviewComment(path="a.txt", line=99, body="far")]
    review = ask(fy, tmp_path, ReviewVerdict(event="REQUEST_CHANGES", body="Look:", comments=comments))
    assert review.error is None and [step.passed for step in review.steps] == [True, True]
    assert review.posted == {"id": 80, "url": "https://github.test/r/80", "event": "CHANGES_REQUESTED"}
    (post,) = github.posts
    assert post["comments"] == [{"path": "a.txt", "line": 2, "side": "RIGHT", "body": "why two?"}]
    assert "`a.txt` line 99: far" in post["body"] and post["commit_id"] == review.target.head_sha


def test_a_redelivered_webhook_posts_nothing_twice(fy: Forkyard, github: FakeGitHub, tmp_path: Path) -> None:
    first = ask(fy, tmp_path, ReviewVerdict(event="APPROVE"))
    assert ask(fy, tmp_path, ReviewVerdict(event="APPROVE")).id == first.id
    assert len(github.posts) == 1


def test_a_review_whose_answer_was_lost_is_found_and_not_posted_again(
    fy: Forkyard, github: FakeGitHub, tmp_path: Path
) -> None:
    github.lose_answer = True
    failed = ask(fy, tmp_path, ReviewVerdict(event="APPROVE", body="good"))
    assert failed.state == "failed" and "cannot be reached" in (failed.error or "")
    again = ask(fy, tmp_path, ReviewVerdict(event="APPROVE", body="good"))
    assert (again.id, again.state) == (failed.id, "done")
    assert again.posted["id"] == 80 and len(github.reviews) == 1


def test_who_may_not_approve_his_own_says_so_in_a_comment(fy: Forkyard, github: FakeGitHub, tmp_path: Path) -> None:
    github.own = True
    review = ask(fy, tmp_path, ReviewVerdict(event="APPROVE", body="good"))
    assert review.posted is not None and review.posted["event"] == "COMMENTED"
    assert "**APPROVE**" in github.reviews[0]["body"]


def test_a_wrong_token_is_told_and_never_shown(fy: Forkyard, github: FakeGitHub, tmp_path: Path) -> None:
    fy.secrets.set("GITHUB_TOKEN", "ghp_wrong")
    with pytest.raises(InvalidRequest, match="401") as refused:
        ask(fy, tmp_path, ReviewVerdict(event="APPROVE"))
    assert "ghp_" not in refused.value.message
    assert github.posts == []


# ── by a trigger ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_push_has_its_branch_reviewed_once(fy: Forkyard, daemon: Daemon, repo: Repo, tmp_path: Path) -> None:
    yard = GitYard(daemon, tmp_path)
    action = {"type": "review", "plan": plan(tmp_path)}
    with yard.api as api:
        made = api.post(f"/git/repos/{repo.id}/triggers", json={"events": ["push"], "action": action})
        assert made.status_code == 201, made.text
        path = f"/git/repos/{repo.id}/triggers/{made.json()['id']}/deliveries"
        work = yard.clone(repo.name, "clone", "--branch", "fix")
        head = yard.commit(work, {"b.txt": "b\n"})
        yard.run("push", "--quiet", cwd=work)
        (delivery,) = _delivered(api, path, 1)
        review = fy.reviews.get(delivery["attempts"][0]["response"], wait_s=30)
        assert (review.target.head_sha, review.state, review.error) == (head, "done", None)
        again = api.post(f"{path}/{delivery['id']}/redeliver")
        assert again.is_success, again.text
        (delivery,) = _delivered(api, path, 2)
        assert delivery["attempts"][1]["response"] == review.id
    assert fy.reviews.list(repo.id) == [review]


def _delivered(api: httpx.Client, path: str, attempts: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [one for one in api.get(path).json()["items"] if len(one["attempts"]) >= attempts]
        if found and all(one["status"] == "delivered" for one in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"not delivered: {api.get(path).text}")


def test_a_webhook_about_a_pull_request_has_it_reviewed_once_with_the_credential_of_the_remote(
    fy: Forkyard, daemon: Daemon, repo: Repo, github: FakeGitHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of an installation of a GitHub App; how its token is made is tested with remotes."""

    async def token(app: dict[str, Any]) -> str:
        return TOKEN if (app["app_id"], app["installation_id"]) == ("app1", 7) else ""

    fy.secrets.set("APP_KEY", "x")
    monkeypatch.setattr(daemon.hosting.sync.github, "token", token)
    app = GitHubApp(app_id="app1", installation_id=7, private_key_secret="APP_KEY")
    url = "https://git.invalid/acme/app.git"
    remote = repo.remotes.create(url, "hub", github_app=app, poll_s=None, direction="in", review=plan(tmp_path))

    def tell(event: dict[str, Any], kind: str = "pull_request") -> httpx.Response:
        body = json.dumps(event).encode()
        signature = "sha256=" + hmac.new(remote.hook_secret.encode(), body, hashlib.sha256).hexdigest()
        headers = {"X-Hub-Signature-256": signature, "X-GitHub-Event": kind}
        return httpx.post(daemon.url + remote.hook_path, content=body, headers=headers, trust_env=False, timeout=30)

    opened = {"action": "opened", "number": 7, "repository": {"full_name": "somebody/else"}}
    first = tell(opened)
    assert first.status_code == 202, first.text
    assert tell(opened).json()["id"] == tell({**opened, "action": "synchronize"}).json()["id"] == first.json()["id"]
    review = until_ended(fy, first.json()["id"])
    assert review.state == "done" and len(github.posts) == 1, review
    for event, kind in (({"action": "closed", "number": 7}, "pull_request"), ({"ref": "refs/heads/x"}, "push")):
        answer = tell(event, kind)
        assert (answer.status_code, answer.content) == (202, b"")
    assert tell({"action": "opened"}).status_code == 422
    with pytest.raises(InvalidRequest, match="credential"):
        repo.remotes.create(url, "other", review=plan(tmp_path))
    with pytest.raises(InvalidRequest, match="no repository on GitHub"):
        repo.remotes.create("https://git.invalid/a/b/c.git", "other", secret="GITHUB_TOKEN", review=plan(tmp_path))
    repo.remotes.delete("hub")


def until_ended(fy: Forkyard, review_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (review := fy.reviews.get(review_id)).state not in ("done", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return review
