"""What may be a ref, a revision, a path: never more than git itself allows."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkyard.errors import InvalidRequest
from forkyard.git.names import checked_path, checked_ref, checked_revision

REFS = st.text(alphabet=st.sampled_from("ab./-@{}~^:?*[\\ \x07é\u200clock"), min_size=1, max_size=12)


def git_allows(ref: str) -> bool:
    done = subprocess.run(["git", "check-ref-format", f"refs/heads/{ref}"], check=False, capture_output=True)
    return done.returncode == 0


@given(REFS)
@settings(max_examples=60, deadline=None)
def test_a_name_that_is_accepted_is_one_that_git_accepts(name: str) -> None:
    try:
        checked_ref(name)
    except InvalidRequest:
        return
    assert git_allows(name)


@pytest.mark.parametrize("name", ["main", "feature/x", "v1.0", "a-b_c", "é", "a@b", "x.locked", "1"])
def test_usual_names_are_accepted(name: str) -> None:
    assert checked_ref(name) == name
    assert checked_revision(name) == name


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_a_path_that_is_accepted_stays_inside(path: str) -> None:
    try:
        checked_path(path)
    except InvalidRequest:
        return
    parts = path.split("/")
    assert not path.startswith("/")
    assert all(part not in ("", ".", "..") and part.casefold() != ".git" for part in parts)
    assert "\0" not in path and "\\" not in path


@pytest.mark.parametrize("rev", ["HEAD", "HEAD~3", "main^2~1", "a" * 40, "abc123", "v1.0"])
def test_usual_revisions_are_accepted(rev: str) -> None:
    assert checked_revision(rev) == rev


@pytest.mark.parametrize("path", [".gitignore", ".github/x", "a.git", "git", "..a", "a..", "ü/ß", "a b", "-x"])
def test_usual_paths_are_accepted(path: str) -> None:
    assert checked_path(path) == path
