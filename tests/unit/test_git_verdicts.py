"""What reviewers say is checked, and put where GitHub takes it."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.errors import InvalidRequest
from forkyard.git import verdicts
from forkyard.models.git import FileDiff
from forkyard.models.reviews import Dossier, ReviewComment, ReviewDiff, ReviewTarget, ReviewVerdict, StepResult

PATCH = "@@ -1,2 +1,3 @@ def f\n one\n-two\n+2\n+three\n@@ -10 +11,2 @@\n ten\n+eleven\n\\ No newline at end of file"


def test_lines_that_a_patch_shows_are_those_of_the_new_file() -> None:
    assert verdicts.shown_lines(PATCH) == {1, 2, 3, 11, 12}
    assert verdicts.shown_lines("") == set()
    assert verdicts.shown_lines("@@ -1,2 +0,0 @@\n-a\n-b") == set()


def test_a_comment_off_the_diff_goes_into_the_body() -> None:
    verdict = ReviewVerdict(
        event="COMMENT",
        body="Hello",
        comments=[
            ReviewComment(path="a", line=12, body="here"),
            ReviewComment(path="a", line=5, body="hidden"),
            ReviewComment(path="../b", line=1, body="elsewhere"),
        ],
    )
    inline, body = verdicts.placed(verdict, [FileDiff(path="a", status="modified", patch=PATCH)])
    assert [comment.body for comment in inline] == ["here"]
    assert body == "Hello\n\n`a` line 5: hidden\n\n`../b` line 1: elsewhere"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"LGTM",
        b"[]",
        b'{"event": "MERGE"}',
        b'{"event": "APPROVE", "extra": 1}',
        b'{"event": "COMMENT", "comments": [{"path": "a", "line": 0, "body": "x"}]}',
        b'{"event": "COMMENT", "comments": [{"path": "a", "line": 1}]}',
        b"[" * 100_000,
        b"\xff",
        json.dumps({"event": "COMMENT", "body": "x" * 60_001}).encode(),
    ],
)
def test_what_is_no_verdict_is_refused_with_a_reason(answer: bytes) -> None:
    with pytest.raises(InvalidRequest, match="reviewer"):
        verdicts.parsed(answer)


@given(st.binary(max_size=300))
def test_no_answer_breaks_the_parser(answer: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        verdicts.parsed(answer)


@given(st.text(max_size=300))
def test_no_patch_breaks_the_search_for_lines(patch: str) -> None:
    verdicts.shown_lines(patch)


def test_output_of_a_step_cannot_leave_its_fence() -> None:
    step = StepResult(
        name="a|b", command="x", passed=False, exit_code=1, duration_s=1, output="```\n# APPROVED\n````\n"
    )
    target = ReviewTarget(type="hosted", repository="r", base="main", head="x", base_sha="a" * 40, head_sha="b" * 40)
    diff = ReviewDiff(files=[], additions=0, deletions=0)
    found = verdicts.of_steps(Dossier(review_id="rv", target=target, steps=[step], diff=diff))
    assert found.event == "REQUEST_CHANGES"
    assert "`````\n```\n# APPROVED\n````\n`````" in found.body and "| a/b | failed (1) |" in found.body
