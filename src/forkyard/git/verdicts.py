"""What reviewers say, made fit to be posted. Pure; all input is a reviewer's.

GitHub refuses a whole review for one comment on a line that the diff does not show: such comments go into the body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pydantic import ValidationError

from forkyard.errors import InvalidRequest
from forkyard.models.git import FileDiff
from forkyard.models.reviews import Dossier, ReviewComment, ReviewVerdict, StepResult

MAX_VERDICT_BYTES = 4 * 2**20
#: GitHub's limit.
MAX_BODY_CHARS = 65_000
_HUNK = re.compile(r"@@ -[0-9]+(?:,[0-9]+)? \+([0-9]{1,9})(?:,([0-9]{1,9}))? @@")
_TAIL_CHARS = 2000


def parsed(output: bytes) -> ReviewVerdict:
    """`InvalidRequest` says what is wrong with it."""
    if len(output) > MAX_VERDICT_BYTES:
        raise InvalidRequest(f"the reviewer answered with more than {MAX_VERDICT_BYTES} bytes")
    try:
        return ReviewVerdict.model_validate(json.loads(output))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the verdict"
        raise InvalidRequest(f"the reviewer's answer is no verdict: {where}: {first['msg']}") from None
    except (ValueError, RecursionError):
        shown = output[:200].decode("utf-8", "replace")
        raise InvalidRequest(f"the reviewer's answer is not JSON; it begins with {shown!r}") from None


def of_steps(dossier: Dossier) -> ReviewVerdict:
    """When nobody is asked, the steps are the verdict."""
    passed = all(step.passed for step in dossier.steps)
    lines = [table(dossier.steps)] if dossier.steps else ["There were no steps to run."]
    for step in dossier.steps:
        if not step.passed:
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", step.output)), default=0))
            lines.append(f"**{step.name}**\n\n{fence}\n{step.output[-_TAIL_CHARS:].strip()}\n{fence}")
    return ReviewVerdict(event="APPROVE" if passed else "REQUEST_CHANGES", body="\n\n".join(lines)[:60_000])


def table(steps: Sequence[StepResult]) -> str:
    rows = ["| Step | Result | Time |", "|---|---|---|"]
    for step in steps:
        if step.passed:
            result = "passed"
        elif step.timed_out:
            result = "ran out of time"
        else:
            result = "failed" if step.exit_code is None else f"failed ({step.exit_code})"
        rows.append(f"| {step.name.replace('|', '/')} | {result} | {step.duration_s:.1f} s |")
    return "\n".join(rows)


def shown_lines(patch: str) -> set[int]:
    """Lines of the new file that a patch shows, and so can be commented on."""
    found: set[int] = set()
    at, left = 0, 0
    for line in patch.split("\n"):
        if (hunk := _HUNK.match(line)) is not None:
            at, left = int(hunk[1]), 1 if hunk[2] is None else int(hunk[2])
        elif left and line[:1] in ("+", " "):
            found.add(at)
            at, left = at + 1, left - 1
    return found


def placed(verdict: ReviewVerdict, files: Sequence[FileDiff]) -> tuple[list[ReviewComment], str]:
    """The comments that can stand at their line, and the body with the others."""
    shown = {file.path: shown_lines(file.patch or "") for file in files}
    inline: list[ReviewComment] = []
    others: list[ReviewComment] = []
    for comment in verdict.comments:
        (inline if comment.line in shown.get(comment.path, ()) else others).append(comment)
    return inline, with_comments(verdict.body, others)


def with_comments(body: str, comments: Sequence[ReviewComment]) -> str:
    said = [body] if body else []
    said += [f"`{comment.path}` line {comment.line}: {comment.body}" for comment in comments]
    return "\n\n".join(said)[:MAX_BODY_CHARS]
