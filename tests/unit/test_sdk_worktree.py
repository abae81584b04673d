"""Git's output becomes values, and whatever a guest prints instead is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.errors import GitFailed
from forkyard.sdk import worktree
from forkyard.sdk.worktree import ChangedFile, PushedRef, StatusEntry

SHA = "a" * 40


def test_status_of_an_empty_repository() -> None:
    found = worktree.status(b"# branch.oid (initial)\0# branch.head main\0? a b\0")
    assert (found.branch, found.sha, found.ahead) == ("main", None, 0)
    assert found.files == (StatusEntry("a b", None, "untracked"),)


def test_status_of_every_kind_of_entry() -> None:
    modes = "N... 100644 100644 100644"
    output = (
        f"# branch.oid {SHA}\0# branch.head (detached)\0# branch.upstream origin/x\0# branch.ab +2 -13\0"
        f"1 .M {modes} {SHA} {SHA} one two\0"
        f"2 R. {modes} {SHA} {SHA} R100 new name\0old name\0"
        f"u UU {modes} 100644 {SHA} {SHA} {SHA} both\0! ignored\0"
    )
    found = worktree.status(output.encode())
    assert (found.branch, found.upstream, found.ahead, found.behind) == (None, "origin/x", 2, 13)
    assert found.files == (
        StatusEntry("one two", None, "modified"),
        StatusEntry("new name", "renamed", None, "old name"),
        StatusEntry("both", "unmerged", "unmerged"),
    )
    assert found.conflicts == ["both"]


def test_changed_files_with_renames_and_binaries() -> None:
    raw = (
        f":100644 100644 {SHA} {SHA} M\0a\0:100644 100644 {SHA} {SHA} R090\0old\0new\0:000000 100644 {SHA} {SHA} A\0b\0"
    )
    counts = "1\t2\ta\0" + "3\t0\t\0old\0new\0" + "-\t-\tb\0"
    assert worktree.changed_files((raw + counts).encode()) == (
        ChangedFile("a", "modified", 1, 2),
        ChangedFile("new", "renamed", 3, 0, "old"),
        ChangedFile("b", "added", None, None),
    )


def test_a_push_tells_each_ref() -> None:
    output = b"To http://x\n*\trefs/heads/a:refs/heads/a\t[new branch]\n!\tHEAD:refs/heads/b\t[rejected] (fetch first)\nDone\n"
    assert worktree.pushed(output) == [
        PushedRef("refs/heads/a", "created", "[new branch]"),
        PushedRef("refs/heads/b", "rejected", "[rejected] (fetch first)"),
    ]


def test_a_path_that_is_no_utf8_survives() -> None:
    assert worktree.status(b"? \xff\0").files[0].path == "\udcff"


@pytest.mark.parametrize("output", [b"1 .M too few\0", b"nonsense\0", b"2 R. x\0", b"# branch.ab +x -1\0"])
def test_what_git_does_not_say_is_refused(output: bytes) -> None:
    with pytest.raises(GitFailed):
        worktree.status(output)


@given(st.binary(max_size=200) | st.text("12u?!#:\0\t\n +-abRM", max_size=100).map(str.encode))
def test_no_output_breaks_a_parser(output: bytes) -> None:
    for parse in (worktree.status, worktree.log, worktree.branches, worktree.changed_files, worktree.pushed):
        with contextlib.suppress(GitFailed):
            parse(output)
