"""What is sent ahead of a spec: contexts without what .dockerignore names, the same whenever their files are."""

from __future__ import annotations

import gc
import os
import tarfile
from pathlib import Path

import pytest

from forkyard import InvalidRequest, Spec
from forkyard.sdk.ignore import Ignore
from forkyard.sdk.uploads import context, directory, image_source


@pytest.mark.parametrize(
    ("text", "left_out", "kept"),
    [
        ("*.log", ["a.log"], ["sub/a.log", "a.txt"]),
        ("**/*.log", ["a.log", "sub/deep/a.log"], ["a.logs"]),
        ("node_modules", ["node_modules", "node_modules/x/y"], ["sub/node_modules"]),
        ("/build/\n", ["build/x"], ["src/build"]),
        ("*\n!keep\n", ["other", "other/x"], ["keep", "keep/x"]),
        ("docs/**/draft\n", ["docs/draft", "docs/a/b/draft"], ["draft"]),
        ("a?c\n[xy]z", ["abc", "xz"], ["ac", "wz"]),
        ("# a comment\n\n.git", [".git/config"], ["# a comment"]),
        ("!x\nx", ["x"], []),
    ],
)
def test_patterns_leave_out_what_they_name(text: str, left_out: list[str], kept: list[str]) -> None:
    ignore = Ignore(text)
    assert [path for path in left_out if not ignore.leaves_out(path)] == []
    assert [path for path in kept if ignore.leaves_out(path)] == []


def test_a_context_is_the_same_whenever_its_files_are(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("text")
    (tmp_path / "left").write_text("x")
    (tmp_path / ".dockerignore").write_text("left\n")
    first = context(tmp_path)
    os.utime(tmp_path / "sub" / "file", (1, 1))
    (tmp_path / "left").write_text("y")
    second = context(tmp_path)
    assert first.digest == second.digest
    with tarfile.open(first.path) as archive:
        assert archive.getnames() == [".dockerignore", "sub", "sub/file"]
    (tmp_path / "sub" / "file").chmod(0o755)
    assert context(tmp_path).digest != first.digest


def test_what_was_packed_is_gone_with_the_spec(tmp_path: Path) -> None:
    spec = Spec().dockerfile("FROM debian\nRUN x\n", tmp_path)
    (upload,) = spec.run("more").uploads
    assert upload.path.exists()
    path = upload.path
    del spec, upload
    gc.collect()
    assert not path.exists()


def test_an_image_is_a_reference_an_archive_or_a_layout(tmp_path: Path) -> None:
    assert image_source("registry.test/name:tag") == ({"ref": "registry.test/name:tag"}, None)
    (tmp_path / "archive.tar").write_bytes(b"x")
    source, upload = image_source(tmp_path / "archive.tar")
    assert upload is not None
    assert source == {"upload": upload.digest}
    with pytest.raises(InvalidRequest, match="no OCI layout"):
        image_source(tmp_path)
    (tmp_path / "oci-layout").write_text("{}")
    assert image_source(tmp_path)[0] == {"upload": directory(tmp_path).digest}
    with pytest.raises(InvalidRequest, match="there is no file"):
        image_source("./missing.tar")
    assert Spec().from_image("registry.test/name").model().image is not None
