"""Which side a change is taken from, and globs."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from forkyard.git.globs import matches
from forkyard.git.step import wanted

SHAS = st.sampled_from([None, "a", "b", "c"])


def test_who_has_changed_since_both_agreed_decides() -> None:
    assert wanted("b", "a", "a", tag=False) == "push"
    assert wanted("a", "b", "a", tag=False) == "pull"
    assert wanted("b", "c", "a", tag=False) == "compare"
    assert wanted("a", None, None, tag=False) == "push"  # new here
    assert wanted("a", None, "a", tag=False) == "pull"  # deleted there
    assert wanted("b", None, "a", tag=False) == "diverged"  # changed here, deleted there
    assert wanted("a", "b", "a", tag=True) == "diverged"


@given(local=SHAS, remote=SHAS, agreed=SHAS, tag=st.booleans())
def test_both_sides_mirror_each_other_and_what_is_equal_stays(
    local: str | None, remote: str | None, agreed: str | None, tag: bool
) -> None:
    mirror = {"push": "pull", "pull": "push"}
    one, other = wanted(local, remote, agreed, tag=tag), wanted(remote, local, agreed, tag=tag)
    assert other == mirror.get(one, one)
    assert (one == "none") == (local == remote)


def test_globs() -> None:
    assert matches("main", "main")
    assert matches("release/*", "release/1")
    assert not matches("release/*", "release/1/x")
    assert not matches("*", "a/b")
    assert matches("**", "a/b/c")
    assert matches("docs/**", "docs/a/b")
    assert matches("**/*.md", "a.md")
    assert matches("**/*.md", "x/y/a.md")
    assert matches("a/**/b", "a/b")
    assert not matches("a/**/b", "a/c")
    assert matches("v[0-9]*", "v1.2")


@given(st.text("ab*?/[]", max_size=40), st.text("ab/", max_size=200))
def test_no_glob_takes_long(pattern: str, name: str) -> None:
    began = time.process_time()
    matches(pattern, name)
    matches("**/" * 50 + "*a" * 60, name)
    assert time.process_time() - began < 1
