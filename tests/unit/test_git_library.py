"""The one change of a ref that libgit2 makes, beside the real git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forkyard.git.library import swapped
from forkyard.git.names import NO_SHA

MAIN = "refs/heads/main"


class Bare:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "--quiet", "--bare", "--initial-branch=main")
        self.tree = self.git("hash-object", "-t", "tree", "-w", "/dev/null")
        person = ("-c", "user.name=A", "-c", "user.email=a@b")
        self.commits = [self.git(*person, "commit-tree", self.tree, "-m", str(number)) for number in range(3)]
        self.git("update-ref", MAIN, self.commits[0])

    def git(self, *args: str) -> str:
        done = subprocess.run(("git", "-C", self.path, *args), check=True, capture_output=True, text=True)
        return done.stdout.strip()


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    return Bare(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_branch_moves_on_from_where_it_is(bare: Bare, packed: bool) -> None:
    if packed:
        bare.git("pack-refs", "--all")
    assert swapped(bare.path, MAIN, bare.commits[0], bare.commits[1])
    assert bare.git("rev-parse", MAIN) == bare.commits[1]
    assert "error" not in bare.git("fsck", "--full", "--strict")


def test_what_is_not_so_simple_is_left_to_git(bare: Bare) -> None:
    first, second, third = bare.commits
    bare.git("symbolic-ref", "refs/heads/alias", MAIN)
    bare.git("update-ref", "refs/tags/v1", first)
    assert not swapped(bare.path, MAIN, second, third), "it is elsewhere"
    assert not swapped(bare.path, MAIN, first, NO_SHA), "it is removed"
    assert not swapped(bare.path, MAIN, first, bare.tree), "that is no commit"
    assert not swapped(bare.path, MAIN, first, "a" * 40), "that is not there"
    assert not swapped(bare.path, "refs/heads/new", NO_SHA, first), "it is made"
    assert not swapped(bare.path, "refs/heads/alias", first, second), "it is another's name"
    assert not swapped(bare.path, "refs/tags/v1", first, second), "it is no branch"
    lock = bare.path / f"{MAIN}.lock"
    lock.touch()
    assert not swapped(bare.path, MAIN, first, second), "somebody else changes it"
    lock.unlink()
    assert bare.git("rev-parse", MAIN, "refs/tags/v1").split() == [first, first]
    assert bare.git("for-each-ref", "refs/heads/new") == ""
    assert not list(bare.path.rglob("*.lock"))
