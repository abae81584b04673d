"""Objects and packs are what git makes of the same content; edits of a tree are what the files say."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkyard.errors import ForkyardError
from forkyard.git.objects import (
    DIRECTORY,
    FILE,
    Entry,
    PackWriter,
    commit_data,
    object_id,
    signature,
    tree_data,
    tree_entries,
)
from forkyard.git.trees import TreeEdit


def git(path: Path, *args: str, data: bytes = b"") -> str:
    env = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(path)}
    done = subprocess.run(["git", *args], cwd=path, input=data, capture_output=True, check=True, env=env)
    return done.stdout.decode().strip()


def test_a_pack_is_read_by_git_and_is_whole(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--bare", ".")
    with tempfile.TemporaryFile() as file:
        pack = PackWriter(file)
        sizes = (0, 1, 15, 16, 2047, 2048, 100_000)
        blobs = {f"f{size}": Entry(FILE, pack.add("blob", b"x" * size)) for size in sizes}
        sub = pack.add("tree", tree_data(blobs))
        entries = {**blobs, "f1.x": blobs["f1"], "f1-x": blobs["f1"], "f": Entry(DIRECTORY, sub)}
        tree = pack.add("tree", tree_data(entries))
        when = datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone(-timedelta(hours=3, minutes=30)))
        who = signature("A <b>\nc", "x@y>", when)
        commit = pack.add("commit", commit_data(tree, [], who, who, "msg"))
        pack.add("blob", b"")  # once is enough
        assert len(pack) == len(sizes) + 3
        pack.finish()
        data = file.read()
    git(tmp_path, "index-pack", "--stdin", "--strict", data=data)
    git(tmp_path, "update-ref", "refs/heads/main", commit)
    assert git(tmp_path, "fsck", "--strict", "--full") == ""
    assert git(tmp_path, "log", "-1", "--format=%an|%ae|%aI", "main") == "A bc|x@y|2024-01-02T03:04:05-03:30"
    assert git(tmp_path, "hash-object", "--stdin", data=b"x" * 16) == object_id("blob", b"x" * 16)


@given(st.dictionaries(st.text("ab.-/0", min_size=1, max_size=5).filter(lambda name: "/" not in name), st.booleans()))
def test_a_tree_is_read_as_it_was_written(names: dict[str, bool]) -> None:
    entries = {name: Entry(DIRECTORY if directory else FILE, "1" * 40) for name, directory in names.items()}
    assert tree_entries(tree_data(entries)) == entries


PATHS = st.sampled_from(["a", "b", "a/b", "a/c", "a/b/c", "d/e", "d", "A", "D/e"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), PATHS, st.sampled_from("123")),
        st.tuples(st.just("delete"), PATHS, st.just("")),
        st.tuples(st.just("rename"), PATHS, PATHS),
    ),
    max_size=8,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_an_edit_is_what_the_same_steps_do_to_files(steps: list[tuple[str, str, str]]) -> None:
    trees: dict[str, dict[str, Entry]] = {}

    class Remembering(PackWriter):
        def add(self, kind, data):  # type: ignore[no-untyped-def]
            sha = super().add(kind, data)
            if kind == "tree":
                trees[sha] = tree_entries(data)
            return sha

    files: dict[str, str] = {}
    with tempfile.TemporaryFile() as file:
        pack = Remembering(file)
        base: str | None = None
        for verb, path, other in steps:
            edit = TreeEdit(trees.__getitem__, base)
            expected = dict(files)
            with contextlib.suppress(ForkyardError):
                if verb == "put":
                    edit.put(path, FILE, other * 40)
                    expected[path] = other
                elif verb == "delete":
                    edit.delete(path)
                    expected = {name: value for name, value in files.items() if not below(name, path)}
                else:
                    edit.rename(path, other)
                    expected = {
                        (other + name.removeprefix(path) if below(name, path) else name): value
                        for name, value in files.items()
                        if name != other
                    }
                base = edit.write(pack)
                files = expected
    assert listed(trees, base) == {path: value * 40 for path, value in files.items()}
    folded = [path.casefold() for path in files]
    assert len(folded) == len(set(folded))


def below(name: str, path: str) -> bool:
    return name == path or name.startswith(path + "/")


def listed(trees: dict[str, dict[str, Entry]], sha: str | None, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, entry in (trees[sha] if sha else {}).items():
        if entry.mode == DIRECTORY:
            found |= listed(trees, entry.sha, f"{prefix}{name}/")
        else:
            found[prefix + name] = entry.sha
    return found


def test_ten_thousand_files_of_one_directory_are_quick() -> None:
    with tempfile.TemporaryFile() as file:
        edit = TreeEdit(dict)
        for number in range(10_000):
            edit.put(f"d/{number}", FILE, "1" * 40)
        assert edit.write(PackWriter(file))


def test_a_twin_is_found_whichever_comes_first() -> None:
    for first, second in (("x/A", "x/a"), ("x/a", "X/b")):
        edit = TreeEdit(dict)
        edit.put(first, FILE, "1" * 40)
        edit.put(second, FILE, "1" * 40)
        with tempfile.TemporaryFile() as file, pytest.raises(ForkyardError, match="upper and lower case"):
            edit.write(PackWriter(file))
