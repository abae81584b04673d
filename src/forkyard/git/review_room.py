"""Where a review happens: copies of a sandbox, made for it and deleted after it.

Owns: those copies, the checkout, the steps and the reviewer's program in them. All of them bear a label, by which the next
daemon finds what a killed one left. What they print is a stranger's: bounded, and never taken for more than text.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError, GitFailed, GuestFailure, InvalidRequest, OperationTimeout
from forkyard.git.verdicts import MAX_VERDICT_BYTES
from forkyard.guest.base import ExecSpec, Execution, Exit, Guest, Output
from forkyard.lifecycle import Cause
from forkyard.models import SandboxCreate, SandboxFork, SandboxUpdate
from forkyard.models.labels import marked
from forkyard.models.reviews import CommandReviewer, ReviewPlan, ReviewStep, StepResult

log = structlog.get_logger(__name__)

LABEL, ID_LABEL = "forkyard.review", "forkyard.review-id"
OUTPUT_BYTES = 64 * 1024
FETCH_S = 900.0
#: On top of a command's own time limit.
MARGIN_S = 60.0
_STDIN_CHUNK = 256 * 1024
_GIT_ENV = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Checkout:
    url: str
    head_sha: str
    base_sha: str
    #: Who may read it there, if it is hosted here.
    identity_id: str | None


@dataclass(frozen=True)
class _Ended:
    exit_code: int | None
    timed_out: bool
    stdout: bytes
    tail: bytes  # of both streams
    cut: bool


class ReviewRoom:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def clear(self) -> None:
        """What an earlier daemon left."""
        for sandbox in (await self._control.sandboxes.list(labels={LABEL: "copy"}, limit=1000)).items:
            await self._delete(sandbox.id)

    async def steps(self, review_id: str, plan: ReviewPlan, checkout: Checkout, key_id: str) -> list[StepResult]:
        """Check it out in a copy, and run all steps there, one after the other."""
        async with self._copy(review_id, plan, key_id, checkout.identity_id) as sandbox_id:
            async with self._control.sandboxes.use(sandbox_id) as guest:
                await _check_out(guest, plan.directory, checkout)
            if not plan.trusted:
                await self._control.sandboxes.disarm(sandbox_id)
            async with self._control.sandboxes.use(sandbox_id) as guest:
                env = {
                    "FORKYARD_REVIEW": review_id,
                    "FORKYARD_BASE_SHA": checkout.base_sha,
                    "FORKYARD_HEAD_SHA": checkout.head_sha,
                    "CI": "true",
                }
                return [await _step(guest, plan.directory, step, env) for step in plan.steps]

    async def reviewer(
        self, review_id: str, plan: ReviewPlan, reviewer: CommandReviewer, dossier: bytes, key_id: str
    ) -> bytes:
        """In a copy of its own: what ran of the change cannot have touched it."""
        async with self._copy(review_id, plan, key_id) as sandbox_id, self._control.sandboxes.use(sandbox_id) as guest:
            spec = ExecSpec(
                command=reviewer.command,
                env=reviewer.env,
                user=reviewer.user,
                timeout_s=reviewer.timeout_s,
                stdin=True,
                label="reviewer",
            )
            ended = await _ran(guest, spec, dossier, keep_bytes=MAX_VERDICT_BYTES + 1)
        if ended.exit_code != 0:
            how = "ran out of time" if ended.timed_out else f"ended with exit code {ended.exit_code}"
            said = ended.tail[-2000:].decode("utf-8", "replace").strip()
            raise InvalidRequest(f"the reviewer {how}" + (f":\n{said}" if said else ""), field="reviewer")
        return ended.stdout

    @asynccontextmanager
    async def _copy(
        self, review_id: str, plan: ReviewPlan, key_id: str, identity_id: str | None = None
    ) -> AsyncIterator[str]:
        marks = {LABEL: "copy", ID_LABEL: review_id}
        sandboxes = self._control.sandboxes
        if plan.sandbox is not None:
            request = SandboxFork(count=1, name=f"review {review_id}", labels={})
            forked = await self._control.forks.fork(plan.sandbox, marked(request, marks), api_key_id=key_id or None)
            made = forked.children[0].sandbox
            assert made is not None  # else the fork has raised
        else:
            made = await sandboxes.create(
                marked(
                    SandboxCreate(
                        name=f"review {review_id}", **({} if plan.snapshot is None else {"snapshot": plan.snapshot})
                    ),
                    marks,
                ),
                api_key_id=key_id,
            )
        try:
            changes = SandboxUpdate(idle_timeout_s=None, ttl_s=None, checkpoint_every_s=None)
            if identity_id is not None:
                changes = changes.model_copy(update={"identity": identity_id})
                changes.model_fields_set.add("identity")
            await sandboxes.update(made.id, changes)
            yield made.id
        finally:
            await asyncio.shield(asyncio.create_task(self._delete(made.id)))

    async def _delete(self, sandbox_id: str) -> None:
        try:
            await self._control.sandboxes.delete(sandbox_id, Cause.TASK_OVER)
        except ForkyardError as error:
            log.error("a copy made for a review was not deleted", sandbox=sandbox_id, error=error.message)


async def _check_out(guest: Guest, directory: str, checkout: Checkout) -> None:
    at = ["git", "-C", directory, "-c", "advice.detachedHead=false"]
    shas = [checkout.head_sha, checkout.base_sha]
    for command in (
        ["git", "init", "--quiet", "--", directory],
        [*at, "fetch", "--quiet", "--no-tags", "--", checkout.url, *shas],
        [*at, "checkout", "--quiet", "--force", "--detach", checkout.head_sha, "--"],
        # What is ignored stays: that is what makes a warm sandbox warm.
        [*at, "clean", "--quiet", "-d", "--force"],
    ):
        ended = await _ran(guest, ExecSpec(command=command, env=_GIT_ENV, timeout_s=FETCH_S, label="review checkout"))
        if ended.exit_code != 0:
            said = ended.tail[-2000:].decode("utf-8", "replace").strip()
            raise GitFailed(f"{checkout.head_sha[:12]} could not be checked out in the sandbox:\n{said}")


async def _step(guest: Guest, directory: str, step: ReviewStep, env: dict[str, str]) -> StepResult:
    began = time.monotonic()
    spec = ExecSpec(
        command=step.command,
        cwd=posixpath.join(directory, step.cwd) if step.cwd else directory,
        env={**env, **step.env},
        user=step.user,
        timeout_s=step.timeout_s,
        label=f"review: {step.name}",
    )
    try:
        ended = await _ran(guest, spec)
    except GuestFailure as error:  # no such program or directory: the step's fault, and so a result
        ended = _Ended(None, False, b"", error.message.encode(), False)
    except OperationTimeout:
        ended = _Ended(None, True, b"", b"", False)
    return StepResult(
        name=step.name,
        command=step.command,
        passed=ended.exit_code == 0 and not ended.timed_out,
        exit_code=ended.exit_code,
        timed_out=ended.timed_out,
        duration_s=round(time.monotonic() - began, 3),
        output=ended.tail.decode("utf-8", "replace"),
        truncated=ended.cut,
    )


async def _ran(guest: Guest, spec: ExecSpec, stdin: bytes | None = None, *, keep_bytes: int = 0) -> _Ended:
    """`keep_bytes`: of the beginning of stdout."""
    deadline_s = (spec.timeout_s or FETCH_S) + MARGIN_S
    try:
        async with asyncio.timeout(deadline_s), guest.execute(spec) as execution:
            feeding = asyncio.create_task(_feed(guest, execution.id, stdin)) if stdin is not None else None
            try:
                return await _heard(execution, keep_bytes)
            finally:
                if feeding is not None:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)
    except TimeoutError:
        raise OperationTimeout(f"the command did not end within {deadline_s:.0f} s") from None


async def _feed(guest: Guest, exec_id: str, data: bytes) -> None:
    with contextlib.suppress(ForkyardError):  # it need not read to the end
        for at in range(0, len(data), _STDIN_CHUNK):
            await guest.write_stdin(exec_id, data[at : at + _STDIN_CHUNK])
        await guest.write_stdin(exec_id, b"", close=True)


async def _heard(execution: Execution, keep_bytes: int) -> _Ended:
    stdout, tail, cut = b"", b"", False
    async for item in execution:
        if isinstance(item, Output):
            if item.stream == "stdout" and len(stdout) < keep_bytes:
                stdout = (stdout + item.data)[:keep_bytes]
            cut = cut or len(tail) + len(item.data) > OUTPUT_BYTES
            tail = (tail + item.data)[-OUTPUT_BYTES:]
        elif isinstance(item, Exit):
            return _Ended(item.exit_code, item.timed_out, stdout, tail, cut)
        else:
            cut = True
    raise GuestFailure("the sandbox went away before the command ended")
