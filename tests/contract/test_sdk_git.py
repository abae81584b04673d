"""`sandbox.git`: git in a sandbox gives back values. The guest is the real agent on this machine, with its real git."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, GitFailed, InvalidRequest, Person, Sandbox

from .git_yard import GitYard
from .sdk_daemon import Daemon

ANN = Person(name="Ann", email="ann@example.com")


@pytest.fixture(scope="module")
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(daemon.url, daemon.key) as fy:
        yield fy


@pytest.fixture(scope="module")
def sbx(fy: Forkyard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    home = tmp_path_factory.mktemp("home")  # nothing of this machine's git configuration
    with fy.sandboxes.create(env={"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"}) as sandbox:
        yield sandbox


@pytest.fixture
def url(fy: Forkyard) -> Iterator[str]:
    repo = fy.git.create(files={"a.txt": "one\ntwo\n", "dir/b c.txt": "b\n"})
    yield repo.token().clone_url
    repo.delete()


@pytest.fixture
def tree(sbx: Sandbox, url: str, tmp_path: Path) -> str:
    return sbx.git.clone(url, str(tmp_path / "tree"))


def test_a_clone_is_clean_and_knows_its_upstream(sbx: Sandbox, tree: str) -> None:
    status = sbx.git.status(tree)
    assert status.clean and (status.branch, status.upstream, status.ahead) == ("main", "origin/main", 0)
    assert [(one.name, one.sha, one.current) for one in sbx.git.branches(tree)] == [("main", status.sha, True)]


def test_status_tells_staged_from_unstaged_and_untracked(sbx: Sandbox, tree: str) -> None:
    sbx.files.write(f"{tree}/a.txt", "changed\n")
    sbx.files.write(f"{tree}/new\nline ü.txt", "new\n")
    sbx.exec(["git", "-C", tree, "mv", "dir/b c.txt", "dir/renamed.txt"], check=True)
    found = {entry.path: entry for entry in sbx.git.status(tree).files}
    assert found["a.txt"].unstaged == "modified" and found["a.txt"].staged is None
    assert found["new\nline ü.txt"].unstaged == "untracked"
    assert (found["dir/renamed.txt"].staged, found["dir/renamed.txt"].previous_path) == ("renamed", "dir/b c.txt")


def test_names_are_names_even_if_they_look_like_options_or_patterns(sbx: Sandbox, tree: str) -> None:
    for name in ("--all", "*.txt", "-n", ":(glob)x"):
        sbx.files.write(f"{tree}/{name}", "x\n")
    sbx.git.add(tree, ["--all", "*.txt"])
    staged = {entry.path for entry in sbx.git.status(tree).files if entry.staged == "added"}
    assert staged == {"--all", "*.txt"}
    assert {file.path for file in sbx.git.diff(tree, staged=True, files=["*.txt"]).files} == {"*.txt"}
    for name in ("-f", "--orphan", ""):
        with pytest.raises(InvalidRequest):
            sbx.git.checkout(tree, name)


def test_commit_log_and_diff_agree(sbx: Sandbox, tree: str) -> None:
    sbx.files.write(f"{tree}/a.txt", "one\n2\nthree\n")
    sbx.files.write(f"{tree}/logo.bin", b"\0\1\2")
    sbx.git.add(tree)
    made = sbx.git.commit(tree, "Count\n\n# in words\n", author=ANN)
    assert (made.author_name, made.committer_email, made.message) == ("Ann", "ann@example.com", "Count\n\n# in words\n")
    newest, first = sbx.git.log(tree)
    assert newest == made and newest.parents == (first.sha,)
    diff = sbx.git.diff(tree, first.sha, made.sha)
    assert [(file.path, file.change, file.additions, file.deletions) for file in diff.files] == [
        ("a.txt", "modified", 2, 1),
        ("logo.bin", "added", None, None),
    ]
    assert "+three\n" in diff.patch and (diff.additions, diff.deletions) == (2, 1)
    assert sbx.git.status(tree).ahead == 1


def test_a_commit_without_an_author_says_what_is_missing(sbx: Sandbox, tree: str) -> None:
    with pytest.raises(GitFailed, match=r"user\.email|nothing to commit|tell me who you are"):
        sbx.git.commit(tree, "empty")


def test_push_and_pull_between_two_trees(sbx: Sandbox, tree: str, url: str, tmp_path: Path) -> None:
    other = sbx.git.clone(url, str(tmp_path / "other"), depth=1)
    sbx.git.checkout(tree, "topic", create=True)
    sbx.files.write(f"{tree}/a.txt", "mine\n")
    made = sbx.git.commit(tree, "mine", all=True, author=ANN)
    (ref,) = sbx.git.push(tree)
    assert (ref.ref, ref.outcome) == ("refs/heads/topic", "created")
    pulled = sbx.git.pull(other, "origin", "topic")
    assert pulled.changed and pulled.after == made.sha
    assert not sbx.git.pull(other, "origin", "topic").changed


def test_what_is_rejected_and_what_conflicts_is_told(sbx: Sandbox, tree: str, url: str, tmp_path: Path) -> None:
    other = sbx.git.clone(url, str(tmp_path / "other"))
    for where, text in ((other, "theirs\n"), (tree, "ours\n")):
        sbx.files.write(f"{where}/a.txt", text)
        sbx.git.commit(where, text, all=True, author=ANN)
    sbx.git.push(other)
    with pytest.raises(GitFailed) as rejected:
        sbx.git.push(tree)
    assert rejected.value.details["refs"][0]["outcome"] == "rejected"
    with pytest.raises(GitFailed) as conflict:
        sbx.git.pull(tree, how="merge", author=ANN)
    assert conflict.value.details["conflicts"] == ["a.txt"]
    assert sbx.git.status(tree).conflicts == ["a.txt"]


def test_a_refused_clone_fails_at_once_and_asks_nobody(sbx: Sandbox, daemon: Daemon, tmp_path: Path) -> None:
    yard = GitYard(daemon, tmp_path)
    with pytest.raises(GitFailed, match=r"could not read Username|terminal prompts disabled"):
        sbx.git.clone(yard.url("none", ""), str(tmp_path / "none"))
    with pytest.raises(GitFailed, match=r"does not exist|not a git repository|cannot change to"):
        sbx.git.status(str(tmp_path / "nowhere"))
