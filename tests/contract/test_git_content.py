"""A repository without a clone: commits, refs, contents, merges, comparisons, search. Through the SDK."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import os
import random
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forkyard
from forkyard import FileChange, Forkyard, Person, Repo
from forkyard.net import errands, policy

from .git_yard import GitYard
from .place import Place
from .sdk_daemon import Daemon

NONE = "0" * 40


@pytest.fixture
def yard(daemon: Daemon, tmp_path: Path) -> GitYard:
    return GitYard(daemon, tmp_path)


@pytest.fixture
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(daemon.url, daemon.key) as fy:
        yield fy


@pytest.fixture
def repo(fy: Forkyard, yard: GitYard) -> Iterator[Repo]:
    repo = fy.git.create(files={"README.md": "# Hello\n", "src/a.py": "import os\n", "src/b.py": "import sys\n"})
    yield repo
    yard.fsck({"id": repo.id})
    repo.delete()


# ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_commit_adds_changes_deletes_renames_and_sets_modes(repo: Repo, yard: GitYard) -> None:
    data = bytes(range(256))
    made = repo.commit(
        "Many things",
        {"bin/data": data, "README.md": "# Bye\n", "src/b.py": None},
        changes=[
            FileChange(path="lib/a.py", rename_from="src/a.py"),
            FileChange(path="run.sh", content="#!/bin/sh\n", mode="100755"),
            FileChange(path="link", content="README.md", mode="120000"),
            FileChange(path="README.md", mode="100755"),
        ],
        author=Person(name="Ann", email="ann@example.com", date=datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)),
    )
    work = yard.clone(repo.id, "check")
    assert (work / "bin/data").read_bytes() == data
    assert (work / "link").is_symlink()
    listed = yard.run("ls-tree", "-r", "HEAD", cwd=work).stdout.split("\n")
    assert [line.split("\t")[1] for line in listed if line] == ["README.md", "bin/data", "lib/a.py", "link", "run.sh"]
    assert [line[:6] for line in listed if line] == ["100755", "100644", "100644", "120000", "100755"]
    assert yard.run("log", "-1", "--format=%H %an %aI %s", cwd=work).stdout.strip() == (
        f"{made.sha} Ann 2024-05-06T07:08:09+00:00 Many things"
    )
    assert repo.get_commit("main") == made.model_copy(update={"message": "Many things\n"})


def test_a_commit_is_only_made_where_it_was_expected(repo: Repo) -> None:
    tip = repo.branch("main").sha
    made = repo.commit("one", {"a": "1"}, expected_sha=tip)
    with pytest.raises(forkyard.RefConflict) as caught:
        repo.commit("two", {"a": "2"}, expected_sha=tip)
    assert caught.value.details["sha"] == made.sha
    with pytest.raises(forkyard.RefConflict):
        repo.commit("new", {"a": "2"}, branch="main", expected_sha=NONE)
    assert repo.branch("main").sha == made.sha


def test_a_missing_branch_is_made_with_or_without_history(repo: Repo) -> None:
    orphan = repo.commit("alone", {"a": "1"}, branch="orphan", expected_sha=NONE)
    assert orphan.parents == []
    child = repo.commit("child", {"a": "1"}, branch="team/feature", start="main")
    assert child.parents == [repo.branch("main").sha]
    assert {branch.name for branch in repo.branches()} == {"main", "orphan", "team/feature"}


def test_commits_from_many_threads_are_all_there(repo: Repo) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: repo.commit(f"n {number}", {f"n/{number}": "x"}), range(16)))
    assert len(repo.contents("n").entries or []) == 16
    assert len(repo.commits(limit=None)) == 17


def test_a_commit_that_changes_nothing_is_refused_unless_asked_for(repo: Repo) -> None:
    with pytest.raises(forkyard.Conflict, match="change nothing"):
        repo.commit("same", {"README.md": "# Hello\n"})
    assert repo.commit("empty", allow_empty=True).tree == repo.get_commit("main~1").tree


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../x",
            "/etc/passwd",
            "a/../b",
            ".git/config",
            "a/.GIT/hooks/x",
            ".g\u200cit/config",
            "git~1/x",
            "a\\b",
            "a\0b",
        ),
        *("a//b", "a/", ".", "x" * 300, "\ud800"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(repo: Repo, yard: GitYard, path: str) -> None:
    tip = repo.branch("main").sha
    body = {"message": "evil", "files": [{"path": path, "content": "x"}]}
    with yard.api as api:
        answer = api.post(f"/git/repos/{repo.id}/commits", content=json.dumps(body).encode("ascii"))
    assert answer.status_code == 422
    assert repo.branch("main").sha == tip


def test_paths_that_differ_only_in_case_are_refused(repo: Repo) -> None:
    for files in ({"readme.MD": "x"}, {"SRC/c.py": "x"}, {"new": "1", "NEW": "2"}):
        with pytest.raises(forkyard.Conflict, match="upper and lower case"):
            repo.commit("twin", files)
    repo.commit("renamed", changes=[FileChange(path="readme.md", rename_from="README.md")])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"path": "README.md/x", "content": "x"}, "conflict"),
        ({"path": "src", "content": "x"}, "conflict"),
        ({"path": "nowhere", "delete": True}, "revision_not_found"),
        ({"path": "x", "rename_from": "nowhere"}, "revision_not_found"),
        ({"path": "src/deep", "rename_from": "src"}, "invalid_path"),
        ({"path": "src/a.py", "rename_from": "src/b.py", "delete": True}, "invalid_request"),
        ({"path": "x"}, "invalid_request"),
        ({"path": "x", "content": "%%", "encoding": "base64"}, "invalid_request"),
        ({"path": "src/a.py", "mode": "120000"}, "conflict"),
        ({"path": "x", "content": "", "mode": "120000"}, "invalid_request"),
    ],
)
def test_a_change_that_cannot_be_changes_nothing(repo: Repo, yard: GitYard, change: dict[str, Any], error: str) -> None:
    tip = repo.branch("main").sha
    with yard.api as api:
        answer = api.post(
            f"/git/repos/{repo.id}/commits",
            json={"message": "m", "files": [{"path": "good", "content": "x"}, change]},
        )
    assert (answer.status_code // 100, answer.json()["code"]) == (4, error)
    assert repo.branch("main").sha == tip


def test_a_commit_over_quota_is_refused(fy: Forkyard) -> None:
    repo = fy.git.create(quota_mib=1)
    with pytest.raises(forkyard.RepoFull):
        repo.commit("big", {"big": os.urandom(2_000_000)})
    repo.commit("small", {"small": "x"})
    repo.delete()


# ── refs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_commits_that_waited_for_each_other_do_not_exceed_the_quota_together(fy: Forkyard, daemon: Daemon) -> None:
    repo = fy.git.create("waiting", quota_mib=1)
    lock = daemon.hosting.repositories.lock(SimpleNamespace(id=repo.id))  # type: ignore[arg-type]
    refused: list[forkyard.RepoFull] = []

    def commit(number: int) -> None:
        try:
            repo.commit("large", {f"{number}": random.Random(number).randbytes(400_000)})
        except forkyard.RepoFull as error:
            refused.append(error)

    async def all_wait(threads: list[threading.Thread]) -> None:
        async with asyncio.timeout(60), lock:
            for thread in threads:
                thread.start()
            while len(lock._waiters or ()) < len(threads):  # each has read how large the repository is
                await asyncio.sleep(0.01)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(4)]
    asyncio.run_coroutine_threadsafe(all_wait(threads), daemon._loop).result(timeout=60)
    for thread in threads:
        thread.join()
    assert len(refused) == 2
    assert fy.git.repo(repo.id).info.size_bytes <= 2**20
    repo.delete()


def test_branches_are_made_moved_and_deleted(repo: Repo) -> None:
    first = repo.branch("main").sha
    second = repo.commit("two", {"two": "2"}).sha
    assert repo.create_branch("fix", first).sha == first
    with pytest.raises(forkyard.RefConflict):
        repo.create_branch("fix")
    assert repo.move_branch("fix", "main", expected_sha=first).sha == second
    with pytest.raises(forkyard.Conflict, match="lose commits"):
        repo.move_branch("fix", first)
    assert repo.move_branch("fix", first, force=True).sha == first
    repo.delete_branch("fix")
    with pytest.raises(forkyard.RevisionNotFound):
        repo.branch("fix")
    with pytest.raises(forkyard.Conflict, match="default branch"):
        repo.delete_branch("main")


def test_the_default_branch_can_be_another(repo: Repo, yard: GitYard) -> None:
    repo.create_branch("trunk")
    assert repo.update(default_branch="trunk").default_branch == "trunk"
    work = yard.clone(repo.id, "trunk")
    assert yard.run("branch", "--show-current", cwd=work).stdout.strip() == "trunk"


def test_tags_are_lightweight_or_annotated(repo: Repo) -> None:
    tip = repo.branch("main").sha
    assert repo.create_tag("v1").target == tip
    annotated = repo.create_tag("v2", message="Second\n", tagger=Person(name="Ann", email="a@example.com"))
    assert (annotated.target, annotated.message) == (tip, "Second\n")
    assert annotated.sha != tip and annotated.tagger is not None and annotated.tagger.name == "Ann"
    assert repo.get_commit("v2").sha == tip
    assert [tag.name for tag in repo.tags()] == ["v1", "v2"]
    repo.delete_tag("v1")
    assert [tag.name for tag in repo.tags()] == ["v2"]


@pytest.mark.parametrize(
    "name",
    [
        *("a..b", "-x", "a b", "x.lock", "a/.b", "a~1", "a^", "a:b", "a*", "HEAD", "@", "a@{1}", "/a", "a\\b"),
        *("refs/heads/x", "é" * 200),
    ],
)
def test_evil_names_of_refs_are_refused(repo: Repo, name: str) -> None:
    with pytest.raises(forkyard.InvalidRequest):
        repo.create_branch(name)
    with pytest.raises(forkyard.InvalidRequest):
        repo.create_tag(name)
    with pytest.raises(forkyard.InvalidRequest):
        repo.commit("m", {"a": "b"}, branch=name)


@pytest.mark.parametrize("rev", ["--all", "main..fix", "main:README.md", "^main", "main@{1}", ":/x", "a b"])
def test_a_revision_is_never_an_option_a_range_or_a_path(repo: Repo, rev: str) -> None:
    with pytest.raises(forkyard.InvalidRequest):
        repo.contents("", rev)
    with pytest.raises(forkyard.InvalidRequest):
        repo.commits(rev)


# ── contents ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_and_directories_are_read_at_any_revision(repo: Repo) -> None:
    first = repo.branch("main").sha
    repo.commit("change", {"README.md": "# New\n"})
    assert repo.read_text("README.md") == "# New\n"
    assert repo.read_text("README.md", first) == repo.read_text("README.md", "main~1") == "# Hello\n"
    top = repo.contents()
    assert [(entry.path, entry.type) for entry in top.entries or []] == [("README.md", "file"), ("src", "directory")]
    file = repo.contents("src/a.py")
    assert (base64.b64decode(file.content or ""), file.size, file.type) == (b"import os\n", 10, "file")
    with pytest.raises(forkyard.RevisionNotFound):
        repo.contents("src/none.py")


def test_a_symlink_is_shown_and_not_followed(repo: Repo) -> None:
    repo.commit("links", changes=[FileChange(path="etc", content="/etc", mode="120000")])
    assert repo.contents("etc").type == "symlink"
    with pytest.raises(forkyard.RevisionNotFound):
        repo.contents("etc/passwd")
    with pytest.raises(forkyard.Conflict):
        repo.commit("through", {"etc/passwd": "x"})


def test_trees_and_blobs(repo: Repo) -> None:
    tree = repo.tree("main", recursive=True)
    assert [entry.path for entry in tree.entries] == ["README.md", "src", "src/a.py", "src/b.py"]
    assert base64.b64decode(repo.blob(tree.entries[0].sha).content) == b"# Hello\n"
    assert repo.tree(tree.sha).sha == tree.sha


def test_archives_hold_the_files(repo: Repo) -> None:
    with tarfile.open(fileobj=io.BytesIO(b"".join(repo.archive()))) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert names == ["README.md", "src/a.py", "src/b.py"]
    with zipfile.ZipFile(io.BytesIO(b"".join(repo.archive(format="zip", path="src")))) as zipped:
        assert [name.partition("/")[2] for name in zipped.namelist() if not name.endswith("/")] == ["a.py", "b.py"]


# ── history ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_log_is_filtered_and_paged(repo: Repo) -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC)
    for number in range(5):
        who = Person(name="Ann" if number % 2 else "Bob", email="x@example.com", date=start + timedelta(days=number))
        repo.commit(f"n {number}", {"src/a.py": str(number)} if number > 2 else {f"{number}": "x"}, author=who)
    messages = [commit.message.strip() for commit in repo.commits()]
    assert messages == ["n 4", "n 3", "n 2", "n 1", "n 0", "First commit"]
    assert [one.message.strip() for one in repo.commits(path="src/a.py")] == ["n 4", "n 3", "First commit"]
    assert [one.message.strip() for one in repo.commits(author="ann")] == ["n 3", "n 1"]
    window = repo.commits(since=start + timedelta(days=1), until=start + timedelta(days=2, hours=1))
    assert [one.message.strip() for one in window] == ["n 2", "n 1"]
    assert [one.message.strip() for one in repo.commits(order="asc", limit=2)] == ["First commit", "n 0"]
    assert repo.commits("main~3")[0].message == "n 1\n"


def test_pages_of_the_log_do_not_shift(repo: Repo, yard: GitYard) -> None:
    for number in range(4):
        repo.commit(f"n {number}", {f"{number}": "x"})
    with yard.api as api:
        first = api.get(f"/git/repos/{repo.id}/commits", params={"limit": 2}).json()
        repo.commit("news", {"news": "x"})
        second = api.get(f"/git/repos/{repo.id}/commits", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [one["message"] for one in second["items"]] == ["n 1\n", "n 0\n", "First commit\n"]
    assert second["next_cursor"] is None


def test_a_comparison_counts_and_shows_what_changed(repo: Repo) -> None:
    repo.create_branch("fix")
    repo.commit("on main", {"main.txt": "m\n"})
    repo.commit(
        "on fix",
        {"README.md": "# Hello\nagain\n", "bin": b"\0\1\2", "src/b.py": None},
        changes=[FileChange(path="src/c.py", rename_from="src/a.py")],
        branch="fix",
    )
    found = repo.compare("main", "fix")
    assert (found.status, found.ahead_by, found.behind_by) == ("diverged", 1, 1)
    files = {file.path: file for file in found.files}
    assert {path: file.status for path, file in files.items()} == {
        "README.md": "modified",
        "bin": "added",
        "src/b.py": "deleted",
        "src/c.py": "renamed",
    }
    assert (files["README.md"].additions, files["README.md"].deletions) == (1, 0)
    assert "+again" in (files["README.md"].patch or "")
    assert files["bin"].binary and files["bin"].patch is None
    assert files["src/c.py"].previous_path == "src/a.py"
    assert repo.compare("main", "main").status == "identical"
    assert repo.compare("fix", "main~1").status == "behind"


# ── merges ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_merge_brings_both_sides_together(repo: Repo) -> None:
    repo.create_branch("fix")
    main = repo.commit("on main", {"main.txt": "m\n"}).sha
    fix = repo.commit("on fix", {"fix.txt": "f\n"}, branch="fix").sha
    merged = repo.merge("fix", message="Both")
    assert repo.get_commit(merged.sha).parents == [main, fix]
    assert repo.read("main.txt") + repo.read("fix.txt") == b"m\nf\n"
    assert repo.merge("fix").sha == merged.sha  # nothing left to merge
    assert repo.merge("main", into="fix").fast_forward
    repo.commit("more", {"more": "x"}, branch="fix")
    squashed = repo.merge("fix", squash=True)
    assert repo.get_commit(squashed.sha).parents == [merged.sha]


def test_a_conflict_names_its_paths_and_changes_nothing(repo: Repo) -> None:
    repo.create_branch("fix")
    main = repo.commit("on main", {"README.md": "# Main\n", "src/a.py": "main\n"}).sha
    fix = repo.commit("on fix", {"README.md": "# Fix\n", "src/a.py": None}, branch="fix").sha
    with pytest.raises(forkyard.MergeConflict) as caught:
        repo.merge("fix")
    assert caught.value.details["paths"] == ["README.md", "src/a.py"]
    assert any("README.md" in reason for reason in caught.value.details["reasons"])
    with pytest.raises(forkyard.MergeConflict) as caught:
        repo.cherry_pick([fix])
    assert caught.value.details["paths"] == ["README.md", "src/a.py"]
    assert (repo.branch("main").sha, repo.branch("fix").sha) == (main, fix)


def test_commits_are_picked_with_their_authors(repo: Repo) -> None:
    repo.create_branch("fix")
    who = Person(name="Ann", email="ann@example.com", date=datetime(2024, 1, 1, tzinfo=UTC))
    picked = [repo.commit(f"n {n}", {f"{n}.txt": f"number {n}\n"}, branch="fix", author=who).sha for n in range(3)]
    repo.commit("on main", {"main.txt": "m\n"})
    made = repo.cherry_pick(picked[1:])
    assert len(made.commits) == 2
    tip = repo.get_commit("main")
    assert (tip.author.name, tip.author.date, tip.message) == ("Ann", who.date, "n 2\n")
    assert [entry.path for entry in repo.tree("main").entries] == ["1.txt", "2.txt", "README.md", "main.txt", "src"]
    with pytest.raises(forkyard.Conflict, match="changes nothing"):
        repo.cherry_pick([picked[1]])


# ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def library(repo: Repo) -> Repo:
    text = "def main():\n    print('höllo main')\n    mainly()\n"
    repo.commit(
        "Add the program\n\nIt says hello.", {"app/main.py": text, "docs/guide.md": "run MAIN\n", "x.bin": b"\0main"}
    )
    repo.commit("Remove a line", {"app/main.py": "def main():\n    mainly()\n"})
    return repo


def test_files_are_searched(library: Repo) -> None:
    found = library.search("main")
    assert {file.path: len(file.matches) for file in found.files} == {"app/main.py": 2}
    assert {file.path for file in library.search("main", case_sensitive=False).files} == {
        "app/main.py",
        "docs/guide.md",
    }
    assert library.search("main", whole_word=True).total_matches == 1
    match = library.search(r"main\w+", regex=True, context=1).files[0].matches[0]
    assert (match.line_number, match.start_column, match.end_column, match.before) == (2, 5, 11, ["def main():"])
    assert library.search("main", include=["docs/**"], case_sensitive=False).files[0].path == "docs/guide.md"
    assert library.search("main", exclude=["**/*.py"]).total_matches == 0
    assert library.search("höllo", rev="main~1").files[0].matches[0].start_column == 12
    assert library.search("import", limit=1).truncated
    assert library.search("(.*").total_matches == 0
    with pytest.raises(forkyard.InvalidRequest):
        library.search("(.*", regex=True)


def test_every_match_of_a_line_is_where_it_is(library: Repo) -> None:
    library.commit("Needles", {"n.txt": "needle 0 needle\nhöllo needle needles needle\n"})
    (file,) = library.search("needle", whole_word=True, context=1).files
    found = [(match.line_number, match.start_column, match.end_column) for match in file.matches]
    assert found == [(1, 1, 7), (1, 10, 16), (2, 7, 13), (2, 22, 28)]
    assert file.matches[-1].after == [], "nothing comes after the last line"
    (commit,) = library.search_diffs("ne+dles", regex=True).commits
    assert [(line.start_column, line.end_column) for line in commit.lines] == [(14, 21)]
    assert library.search_diffs("needle", exclude=["**/*.txt"]).commits == []
    with pytest.raises(forkyard.InvalidRequest, match="NUL"):
        library.search("needle", include=["a\0b"])


def test_file_names_messages_and_diffs_are_searched(library: Repo) -> None:
    assert [file.path for file in library.search_files("MAIN").files] == ["app/main.py"]
    assert [file.path for file in library.search_files("*.md", glob=True).files] == ["README.md", "docs/guide.md"]
    assert [file.path for file in library.search_files(r"^src/.\.py$", regex=True).files] == ["src/a.py", "src/b.py"]
    assert [one.message for one in library.search_commits("HELLO").commits] == ["Add the program\n\nIt says hello.\n"]
    assert library.search_commits("hell", whole_word=True).commits == []
    diffs = library.search_diffs("höllo").commits
    assert [(one.commit.message.partition("\n")[0], one.lines[0].kind, one.lines[0].line_number) for one in diffs] == [
        ("Remove a line", "removed", 2),
        ("Add the program", "added", 2),
    ]
    assert len(library.search_diffs(r"^import (os|sys)$", regex=True).commits[0].lines) == 2


def test_a_pattern_that_takes_for_ever_is_ended(repo: Repo) -> None:
    repo.commit("food", {"food.txt": "a" * 5000 + "!\n"})
    with pytest.raises(forkyard.ForkyardError):
        found = repo.search(r"(a+)+$", regex=True)
        assert found.total_matches == 0
        raise forkyard.InvalidRequest("answered in time, which is as good")


# ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_repositories_are_listed_renamed_and_deleted(fy: Forkyard) -> None:
    made = fy.git.create("first-name", description="what it is")
    made.update(name="second-name", visibility="public")
    assert fy.git.repo("second-name").id == made.id
    assert fy.git.repo(made.id).info.description == "what it is"
    with pytest.raises(forkyard.RepoNotFound):
        fy.git.repo("first-name")
    with pytest.raises(forkyard.Conflict, match="already called"):
        fy.git.create("second-name")
    assert [repo.name for repo in fy.git.list(search="COND-NA")] == ["second-name"]
    made.delete()
    with pytest.raises(forkyard.RepoNotFound):
        made.refresh()


@pytest.mark.parametrize("name", ["..", "a/b", "a..b", "x.git", "-x", "a b", "x.lock", "", "r" * 20, "ü"])
def test_names_that_would_be_trouble_are_refused(fy: Forkyard, name: str) -> None:
    with pytest.raises(forkyard.InvalidRequest):
        fy.git.create(name)


def archive(
    kind: str, entries: dict[str, bytes], links: dict[str, str] | None = None, hard: dict[str, str] | None = None
) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, data in entries.items():
                zipped.writestr(name, data)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for kind_, some in ((tarfile.SYMTYPE, links or {}), (tarfile.LNKTYPE, hard or {})):
            for name, target in some.items():
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind_, target
                tar.addfile(info)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_repository_begins_with_an_archive(fy: Forkyard, yard: GitYard, kind: Any) -> None:
    made = fy.git.create_from_archive(
        archive(kind, {"top/a": b"1", "top/d/b": b"2"}), format=kind, strip=1, message="In"
    )
    assert [entry.path for entry in made.tree("main", recursive=True).entries] == ["a", "d", "d/b"]
    assert made.get_commit("main").message == "In\n"
    yard.fsck({"id": made.id})
    made.delete()


BROKEN = {
    "tar above": archive("tar", {"../x": b"1"}),
    "zip above": archive("zip", {"../x": b"1"}),
    "tar absolute": archive("tar", {"/etc/passwd": b"1"}),
    "tar dot git": archive("tar", {".git/config": b"1"}),
    "zip dot git": archive("zip", {"fine": b"1", ".git/hooks/x": b""}),
    "tar hard link": archive("tar", {"a": b"1"}, hard={"b": "/etc/passwd"}),
    "tar garbage": b"garbage",
    "zip garbage": b"PK\3\4garbage",
    "tar cut": archive("tar", {"a": random.Random(1).randbytes(10_000)})[:5000],
    "zip cut": archive("zip", {"a": random.Random(1).randbytes(10_000)})[:5000],
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_archive_that_leads_elsewhere_or_is_broken_is_refused(fy: Forkyard, yard: GitYard, name: str) -> None:
    before = len(fy.git.list())
    with pytest.raises(forkyard.ForkyardError) as caught:
        fy.git.create_from_archive(BROKEN[name], format="zip" if name.startswith("zip") else "tar")
    assert 400 <= caught.value.status < 500
    assert len(fy.git.list()) == before
    assert not list((yard.daemon.root / "state" / "git").glob("*.tmp"))


def test_an_archive_cannot_write_through_a_symlink(fy: Forkyard) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        link = tarfile.TarInfo("d")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
        info = tarfile.TarInfo("d/passwd")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(forkyard.Conflict, match="is a file"):
        fy.git.create_from_archive(out.getvalue())


def test_an_archive_that_unpacks_to_more_than_the_quota_is_refused(fy: Forkyard) -> None:
    for kind in ("tar", "zip"):
        with pytest.raises(forkyard.RepoFull):
            fy.git.create_from_archive(archive(kind, {"zeros": b"\0" * 3_000_000}), format=kind, quota_mib=1)  # type: ignore[arg-type]


@pytest.fixture
def place() -> Iterator[Place]:
    with Place() as place:
        yield place


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_repository_begins_with_an_archive_at_an_address(
    fy: Forkyard, yard: GitYard, place: Place, kind: Any
) -> None:
    place.files["/it"] = archive(kind, {"README": b"0", "src/a": b"1", "src/d/b": b"2", "srcs/c": b"3"})
    place.elsewhere["/moved"] = "/it"
    whole = fy.git.create(url=place.url("/moved"), format=kind, message="In", allow_private=True)
    assert whole.read("src/d/b") == b"2"
    assert whole.get_commit("main").message == "In\n"
    part = fy.git.create(url=place.url("/it", "me:secret@"), format=kind, directory="src/", allow_private=True)
    assert [entry.path for entry in part.tree("main", recursive=True).entries] == ["a", "d", "d/b"]
    assert place.seen == [("/moved", None), ("/it", None), ("/it", "Basic bWU6c2VjcmV0")]
    for repo in (whole, part):
        yard.fsck({"id": repo.id})
        repo.delete()
    with pytest.raises(forkyard.InvalidRequest, match="nothing below 'sr'"):
        fy.git.create(url=place.url("/it"), format=kind, directory="sr", allow_private=True)


def test_an_address_that_has_no_archive_is_refused(fy: Forkyard, yard: GitYard, place: Place) -> None:
    before = len(fy.git.list())
    place.files |= {"/garbage": b"garbage", "/large": archive("tar", {"a": random.Random(1).randbytes(2_000_000)})}
    place.elsewhere |= {"/round": "/round", "/away": "http://169.254.169.254/x", "/file": "file:///etc/passwd"}
    for path, error, quota in (
        ("/nothing", forkyard.RemoteFailed, None),
        ("/garbage", forkyard.InvalidRequest, None),
        ("/large", forkyard.RepoFull, 1),
        ("/round", forkyard.Forbidden, None),
        ("/file", forkyard.InvalidRequest, None),
    ):
        with pytest.raises(error):
            fy.git.create(url=place.url(path), format="tar", allow_private=True, quota_mib=quota)
    for url in (place.url("/garbage"), "http://169.254.169.254/x", "http://localhost:1/x", "http://0x7f.1/x"):
        with pytest.raises(forkyard.Forbidden, match="allow-private"):
            fy.git.create(url=url, format="zip")
    for url in ("ftp://example.com/a.tar", "/etc/passwd", "git@example.com:a", "http://", "http://a b/"):
        with pytest.raises(forkyard.InvalidRequest):
            fy.git.create(url=url, format="tar")
    assert len(fy.git.list()) == before
    assert not list((yard.daemon.root / "state" / "git").glob("*.tmp"))


def test_a_repository_begins_with_a_directory_of_another(fy: Forkyard, yard: GitYard) -> None:
    source = fy.git.create(files={"README": "0", "src/a": "1", "src/d/b": "2", "src*/c": "3"})
    url = source.token("read").clone_url
    made = fy.git.create(url=url, directory="src", history=False, message="Part", allow_private=True)
    assert [entry.path for entry in made.tree("main", recursive=True).entries] == ["a", "d", "d/b"]
    assert [one.message for one in made.commits(limit=None)] == ["Part\n"]
    yard.fsck({"id": made.id})
    for directory in ("README", "nothing", "sr*", ".git", "../src", ":/"):
        with pytest.raises(forkyard.ForkyardError) as caught:
            fy.git.create(url=url, directory=directory, history=False, allow_private=True)
        assert 400 <= caught.value.status < 500
    with pytest.raises(forkyard.InvalidRequest, match="history"):
        fy.git.create(url=url, directory="src", allow_private=True)
    for repo in (source, made):
        repo.delete()


def test_a_repository_begins_with_another(fy: Forkyard, yard: GitYard) -> None:
    source = fy.git.create("source", files={"a": "1"}, default_branch="trunk")
    source.commit("two", {"b": "2"})
    source.create_tag("v1", message="One")
    source.create_branch("other")
    url = source.token("read").clone_url
    whole = fy.git.create("whole", url=url, allow_private=True)
    assert whole.info.default_branch == "trunk"
    assert len(whole.commits(limit=None)) == 2
    assert [tag.name for tag in whole.tags()] == ["v1"]
    assert {branch.name for branch in whole.branches()} == {"trunk", "other"}
    files = fy.git.create("files", url=url, rev="v1", history=False, message="Fresh", allow_private=True)
    assert [one.message for one in files.commits(limit=None)] == ["Fresh\n"]
    assert files.read("b") == b"2"
    for repo in (whole, files):
        yard.fsck({"id": repo.id})
        yard.clone(repo.name)
    for repo in (source, whole, files):
        repo.delete()


@pytest.mark.parametrize(
    "url",
    [
        "/etc",
        "file:///etc",
        "ext::sh -c id",
        "--upload-pack=id",
        "https://",
        "ssh://-oProxyCommand=x/y",
        "x y",
        "http://[/a",
    ],
)
def test_a_url_that_reads_this_machine_or_runs_a_program_is_refused(fy: Forkyard, url: str) -> None:
    with pytest.raises(forkyard.InvalidRequest):
        fy.git.create(url=url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:9/a.git", "http://localhost:9/a.git", "https://169.254.169.254/a.git", "http://0x7f.1/a"),
        *("git://127.0.0.1/a.git", "git://10.0.0.1:9/a.git", "ssh://git@localhost/a.git", "git@192.168.0.1:a.git"),
    ],
)
def test_a_url_that_leads_to_this_host_or_a_private_network_is_refused_and_says_how(fy: Forkyard, url: str) -> None:
    before = len(fy.git.list())
    with pytest.raises(forkyard.Forbidden, match="--allow-private"):
        fy.git.create(url=url)
    assert len(fy.git.list()) == before


def test_a_redirect_of_an_import_to_a_private_address_is_refused(
    daemon: Daemon, fy: Forkyard, yard: GitYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if 127.0.0.1 were on the public Internet."""
    monkeypatch.setattr(policy, "is_special", lambda address: str(address) != "127.0.0.1")
    monkeypatch.setattr(errands, "is_own", lambda address: False)

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            host = "127.0.0.2" if self.path.startswith("/inside") else "127.0.0.1"
            self.send_header("Location", f"http://{host}:{daemon.port}/git/{self.path.split('/', 2)[2]}")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    source = fy.git.create("public", files={"a": "1"}, visibility="public")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        with pytest.raises(forkyard.Forbidden, match=r"127\.0\.0\.2"):
            fy.git.create(url=f"http://127.0.0.1:{server.server_port}/inside/public.git")
        made = fy.git.create(url=f"http://127.0.0.1:{server.server_port}/outside/public.git")
        server.shutdown()
    assert made.read("a") == b"1"
    for repo in (source, made):
        repo.delete()


def test_what_an_earlier_daemon_left_half_made_is_cleared_away(daemon: Daemon, fy: Forkyard) -> None:
    import asyncio

    store, root = daemon._store, daemon.root / "state" / "git"
    half = asyncio.run_coroutine_threadsafe(
        store.add_repo("r" + "0" * 19, "half", description=None, visibility="private", quota_bytes=1), daemon._loop
    ).result()
    (root / f"{half.id}.tmp").mkdir()
    asyncio.run_coroutine_threadsafe(daemon.hosting.repositories.start(), daemon._loop).result()
    assert not (root / f"{half.id}.tmp").exists()
    fy.git.create("half").delete()


def test_cleaning_up_keeps_everything(repo: Repo, yard: GitYard) -> None:
    for number in range(5):
        repo.commit(f"n {number}", {f"{number}": "x"})
    before = len(list((yard.bare({"id": repo.id}) / "objects" / "pack").glob("*.pack")))
    with yard.api as api:
        assert api.post(f"/git/repos/{repo.id}/gc").status_code == 200
    assert len(list((yard.bare({"id": repo.id}) / "objects" / "pack").glob("*.pack"))) == 1 < before
    assert len(repo.commits(limit=None)) == 6


def test_the_command_line_makes_a_url_that_git_can_use_at_once(yard: GitYard) -> None:
    made = yard.cli("git", "create", "from-cli")
    yard.run("clone", "--quiet", made["clone_url"], str(yard.root / "from-cli"))
    yard.commit(yard.root / "from-cli", {"a": "1"})
    yard.run("push", "--quiet", "origin", "HEAD", cwd=yard.root / "from-cli")
    assert [one["name"] for one in yard.cli("git", "ls", "--search", "from-cli")] == ["from-cli"]
    assert yard.cli("git", "log", "from-cli")[0]["message"] == "work\n"
    assert yard.cli("git", "show", "from-cli")["branches"][0]["name"] == "main"
    assert yard.cli("git", "set", "from-cli", "--public")["visibility"] == "public"
    (yard.root / "b").write_text("two")
    sha = yard.cli("git", "commit", "from-cli", f"b={yard.root}/b", "--delete", "a", "-m", "Swap")["sha"]
    assert yard.cli("git", "compare", "from-cli", "main~1", "main")["head"] == sha
    assert yard.cli("git", "search", "from-cli", "two")["total_matches"] == 1
    assert yard.cli("git", "url", "from-cli", "--read", "--expires", "1h")["permission"] == "read"
    assert yard.cli("git", "rm", "from-cli") == {"deleted": ["from-cli"]}


def test_branches_tags_picks_and_archives_by_the_command_line(repo: Repo, yard: GitYard, tmp_path: Path) -> None:
    def git(*args: str) -> str:
        done = yard.daemon.cli("git", *args)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    name = repo.name
    git("branch", "create", name, "topic")
    sha = repo.commit("On a topic", {"topic.txt": "x"}, branch="topic").sha
    assert "topic" in git("branch", "ls", name)
    picked = git("cherry-pick", name, sha).strip()
    assert repo.branch(repo.info.default_branch).sha == picked
    git("tag", "create", name, "v9", "topic", "-m", "nine")
    assert "v9" in git("tag", "ls", name)
    archive = tmp_path / "files.zip"
    git("archive", name, "v9", "-o", str(archive))
    assert any(entry.endswith("topic.txt") for entry in zipfile.ZipFile(archive).namelist())
    git("tag", "rm", name, "v9")
    git("branch", "rm", name, "topic")
    assert "topic" not in git("branch", "ls", name) and "v9" not in git("tag", "ls", name)
