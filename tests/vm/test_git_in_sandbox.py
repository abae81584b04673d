"""Hosted repositories inside real guests: they clone and push as the sandbox's identity, and no credential is in there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from forkyard import Forkyard, NotFound, Sandbox

from .conftest import Daemon

pytestmark = pytest.mark.timeout(600)

INSIDE = "http://git.forkyard.internal"


@pytest.fixture
def agent(fy: Forkyard) -> Iterator[str]:
    """An identity that may write to `app` and read `library`; `secret` it may not even see."""
    names = ("app", "library", "secret")
    repos = {name: fy.git.create(name, files={"README.md": f"# {name}\n"}) for name in names}
    identity = fy.identities.create("agent-7")
    fy.identities.grant_repo(identity.id, repos["app"].id, "write")
    fy.identities.grant_repo(identity.id, repos["library"].id, "read")
    yield identity.id
    for repo in repos.values():
        repo.delete()
    with contextlib.suppress(NotFound):
        fy.identities.delete(identity.id)


def test_repositories_clone_and_push_without_a_credential_inside(fy: Forkyard, daemon: Daemon, agent: str) -> None:
    with fy.sandboxes.create(identity="agent-7", network="none") as sandbox:
        _a_push_arrives(sandbox, "from the parent")
        assert fy.git.repo("app").commits()[0].message.strip() == "from the parent"
        _what_is_not_granted_is_refused(sandbox)
        _no_credential_is_inside(sandbox, daemon)
        (child,) = sandbox.fork()
        with child:
            _a_push_arrives(child, "from the child")
            pushes = [line for line in fy.identities.audit(actor_id=agent, action="git.push") if line.data]
            assert [(line.sandbox_id, line.allowed) for line in pushes] == [(child.id, True), (sandbox.id, True)]
            sandbox.update(identity=None)
            assert sandbox.exec(["git", "ls-remote", f"{INSIDE}/app.git"]).exit_code != 0
            assert child.exec(["git", "ls-remote", f"{INSIDE}/app.git"]).exit_code == 0
            fy.identities.delete(agent)
            refused = child.exec(["git", "ls-remote", f"{INSIDE}/app.git"], timeout_s=60)
            assert refused.exit_code != 0 and not refused.timed_out


def _a_push_arrives(sandbox: Sandbox, message: str) -> None:
    script = (
        f"rm -rf /root/app && git clone -q {INSIDE}/app.git && cd app && echo '{message}' >> README.md && "
        f"git -c user.name=A -c user.email=a@b.c commit -qam '{message}' && git push -q"
    )
    done = sandbox.exec(script, timeout_s=120)
    assert done.exit_code == 0, done.stderr


def _what_is_not_granted_is_refused(sandbox: Sandbox) -> None:
    script = (
        f"git clone -q {INSIDE}/library.git && cd library && "
        "git -c user.name=A -c user.email=a@b.c commit -q --allow-empty -m x && git push -q"
    )
    done = sandbox.exec(script, timeout_s=120)
    assert done.exit_code != 0 and "403" in done.stderr
    for claimed in ("", "x:fyt_wrong@"):
        url = f"{INSIDE.replace('//', '//' + claimed)}/secret.git"
        done = sandbox.exec(["git", "ls-remote", url], timeout_s=60)
        assert done.exit_code != 0 and not done.timed_out and "not found" in done.stderr, done.stderr
    # The API itself is not there, whoever one claims to be.
    for path in ("/api/v1/whoami", "/git/../api/v1/sandboxes"):
        assert '"id"' not in sandbox.exec(["curl", "-s", "--path-as-is", INSIDE + path]).stdout


def _no_credential_is_inside(sandbox: Sandbox, daemon: Daemon) -> None:
    key = daemon.settings.key_file.read_text().strip()
    script = "env; cat /root/app/.git/config /root/.gitconfig /etc/gitconfig; cat /root/.git-credentials /root/.netrc"
    seen = (
        sandbox.exec(script).stdout
        + sandbox.exec(f"GIT_CURL_VERBOSE=1 GIT_TRACE_CURL=1 git ls-remote {INSIDE}/app.git 2>&1").stdout
    )
    assert "refs/heads/main" in seen
    assert key not in seen and "fyt_" not in seen
    assert "authorization" not in seen.lower() and "x-forkyard-door" not in seen.lower()


def test_a_review_runs_end_to_end_in_copies_of_a_warm_sandbox(fy: Forkyard) -> None:
    repo = fy.git.create("reviewed", files={"calc.py": "def add(a, b):\n    return a + b\n", ".gitignore": "deps\n"})
    repo.create_branch("fix")
    repo.commit("Break it", {"calc.py": "def add(a, b):\n    return a - b\n"}, branch="fix")
    reviewer = (
        "import json, sys, os\n"
        "d = json.load(sys.stdin)\n"
        "bad = [s for s in d['steps'] if not s['passed']]\n"
        "line = [{'path': f['path'], 'line': 2, 'body': 'minus?'} for f in d['diff']['files']]\n"
        "print(json.dumps({'event': 'REQUEST_CHANGES' if bad else 'APPROVE', 'body': bad[0]['output'],\n"
        "  'comments': line if not os.path.exists('/root/touched') else []}))\n"
    )
    try:
        with fy.sandboxes.create(network="none") as warm:
            warm.exec(
                "mkdir -p /root/review/deps && echo warm > /root/review/deps/x && nohup sleep 600 >/dev/null 2>&1 &"
            )
            warm.files.write("/root/reviewer.py", reviewer)
            review = fy.reviews.branch(
                "reviewed",
                "fix",
                plan={
                    "sandbox": warm.id,
                    "steps": [
                        {"name": "lint", "command": ["python3", "-m", "py_compile", "calc.py"]},
                        {"name": "test", "command": "python3 -c 'import calc; assert calc.add(2, 2) == 4, \"add\"'"},
                        {"name": "warm", "command": "cat deps/x && pgrep -x sleep && touch /root/touched"},
                        # The code under review reaches nothing, not even its own repository.
                        {"name": "alone", "command": f"! git ls-remote {INSIDE}/reviewed.git"},
                    ],
                    "reviewer": {"type": "command", "command": ["python3", "/root/reviewer.py"]},
                },
            )
            assert review.error is None
            passed = {step.name: step.passed for step in review.steps}
            assert passed == {"lint": True, "test": False, "warm": True, "alone": True}, review.steps
            assert review.verdict is not None and review.verdict.event == "REQUEST_CHANGES"
            assert "AssertionError: add" in review.verdict.body
            assert [(one.path, one.line) for one in review.verdict.comments] == [("calc.py", 2)]
            assert warm.exec("ls /root/touched; git -C /root/review rev-parse HEAD").stdout == ""
            assert [sandbox.id for sandbox in fy.sandboxes.list()] == [warm.id]
    finally:
        repo.delete()
