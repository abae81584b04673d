"""Runs: a script in a machine of its own, which is restored warm, used once, and gone.

Owns: what a run is, its record, and the program around the script. What a guest says of the outcome is bounded and
checked. Never does: when (`schedules`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import structlog
from pydantic import ValidationError

from forkyard.builds.builds import Builds
from forkyard.control.commands import run
from forkyard.control.ground import new_id
from forkyard.control.plane import ControlPlane
from forkyard.errors import BuildFailed, ForkyardError, NotFound
from forkyard.guest.base import ExecSpec, Guest
from forkyard.lifecycle import Cause
from forkyard.models import SandboxCreate
from forkyard.models.labels import marked
from forkyard.models.runs import RunCreate, RunInfo, RunOutcome
from forkyard.models.specs import Spec, Step
from forkyard.store.runs import RunRecord

log = structlog.get_logger(__name__)

LABEL = "forkyard.run"
RUNS_KEPT = 1000
OUTCOME_BYTES = 4 * 2**20
MACHINE_SPARE_S = 600.0
_PLACE = "/opt/forkyard/run"
_END = "\n::forkyard outcome::\n"
#: Calls the script, and says on its last line how that went. Whatever the script prints is among the logs.
_PROGRAM = """
import { copyFileSync, readFileSync } from 'node:fs'
import { format } from 'node:util'
const logs = []
let left = 1_000_000
const note = (type) => (...words) => {
  const message = format(...words).slice(0, Math.max(left, 0))
  left -= message.length + 40
  if (left > 0) logs.push({ type, message })
}
for (const name of ['log', 'info', 'debug']) console[name] = note('log')
for (const name of ['warn', 'error']) console[name] = note('error')
const told = { ok: true, result: null, logs }
let loaded = false
try {
  const { payload } = JSON.parse(readFileSync(new URL('request.json', import.meta.url)))
  let script = './script.mts'
  if (!process.features.typescript) {
    copyFileSync(new URL('script.mts', import.meta.url), new URL('script.mjs', import.meta.url))
    script = './script.mjs'
  }
  const found = (await import(script)).default
  loaded = true
  told.result = (typeof found === 'function' ? await found(payload ?? undefined) : found) ?? null
  JSON.stringify(told.result)
} catch (error) {
  const syntax = !loaded && (error instanceof SyntaxError || error?.code === 'ERR_INVALID_TYPESCRIPT_SYNTAX')
  Object.assign(told, {
    ok: false, result: null, kind: syntax ? 'syntax' : 'runtime',
    error: String(error?.message ?? error).slice(0, 10_000), stack: String(error?.stack ?? '').slice(0, 10_000),
  })
}
process.stdout.write('\\n::forkyard outcome::\\n' + JSON.stringify(told) + '\\n', () => process.exit(0))
"""


class Runs:
    def __init__(self, control: ControlPlane, builds: Builds) -> None:
        self._control = control
        self._builds = builds
        self._store = control.ground.store

    async def start(self) -> None:
        """Clears away what a daemon before this one did not come to finish."""
        for record in await self._store.list_runs(states=["running"]):
            if record.schedule_id is None:
                outcome = RunOutcome(ok=False, error="the daemon was restarted", kind="host")
                await self._ended(record.id, outcome)
        page = await self._control.sandboxes.list(limit=1000)
        for info in page.items:
            if LABEL in info.labels:
                with contextlib.suppress(ForkyardError):
                    await self._control.sandboxes.delete(info.id, Cause.TASK_OVER)

    async def create(self, request: RunCreate, *, key_id: str = "", keep: bool = True) -> RunInfo:
        """Returns when it has ended, one way or the other. Not to `keep` it: nothing is on record."""
        now = datetime.now(UTC)
        record = new_record(request, key_id, now, state="running")
        if not keep:
            outcome = await self.perform(record.id, request, key_id)
            return run_info(record).model_copy(update=_end_of(outcome))
        await self._store.add_run(record)
        outcome = await self.perform(record.id, request, key_id)
        await self._ended(record.id, outcome)
        await self._store.forget_runs(RUNS_KEPT)
        return await self.get(record.id)

    async def get(self, run_id: str) -> RunInfo:
        return run_info(await self._record(run_id))

    async def asked(self, run_id: str) -> RunCreate:
        """What was to be run."""
        return RunCreate.model_validate((await self._record(run_id)).request)

    async def _record(self, run_id: str) -> RunRecord:
        record = await self._store.run(run_id)
        if record is None:
            raise NotFound(f"there is no run {run_id!r}")
        return record

    async def list(self, *, limit: int = 100, offset: int = 0) -> tuple[list[RunInfo], int]:
        """Newest first, and how many there are."""
        found = await self._store.list_runs(limit=limit, offset=offset)
        return [run_info(record) for record in found], await self._store.count_runs()

    async def perform(self, run_id: str, request: RunCreate, key_id: str) -> RunOutcome:
        """One attempt. What goes wrong is in the outcome."""
        try:
            snapshot = await self._prepared(request, key_id)
            wanted = SandboxCreate(
                name=run_id,
                env=request.env,
                persistence="ephemeral",
                idle_timeout_s=None,
                ttl_s=request.timeout_s + MACHINE_SPARE_S,
                **({} if snapshot is None else {"snapshot": snapshot}),
            )
            machine = await self._control.sandboxes.create(marked(wanted, {LABEL: run_id}), api_key_id=key_id)
            try:
                async with self._control.sandboxes.use(machine.id) as guest:
                    return await _performed(guest, f"{_PLACE}/{run_id}", request)
            finally:
                await asyncio.shield(self._control.sandboxes.delete(machine.id, Cause.TASK_OVER))
        except BuildFailed as error:
            return RunOutcome(ok=False, error=f"its packages could not be installed: {error.message}", kind="host")
        except ForkyardError as error:
            return RunOutcome(ok=False, error=error.message, kind="host")
        except Exception:
            log.exception("a run went wrong", run=run_id)
            return RunOutcome(ok=False, error="an unexpected error; the daemon's log has it", kind="host")

    async def _prepared(self, request: RunCreate, key_id: str) -> str | None:
        """A snapshot with the packages it wants; None: it wants none."""
        if not request.node_modules:
            return None
        wanted = " ".join(f"'{name}@{version}'" for name, version in sorted(request.node_modules.items()))
        command = f"mkdir -p {_PLACE} && cd {_PLACE} && npm install --no-audit --no-fund --prefix . {wanted}"
        return await self._builds.built(Spec(steps=[Step.model_validate({"run": command})]), key_id=key_id)

    async def _ended(self, run_id: str, outcome: RunOutcome) -> None:
        await self._store.change_run(run_id, **{**_end_of(outcome), "outcome": outcome.model_dump(mode="json")})


async def _performed(guest: Guest, place: str, request: RunCreate) -> RunOutcome:
    files = {
        "script.mts": request.script,
        "request.json": json.dumps({"payload": request.payload}),
        "program.mjs": _PROGRAM,
    }
    for name, text in files.items():
        await guest.write_file(f"{place}/{name}", _once(text), mode=0o600)
    command = f"cd {place} && node --no-warnings program.mjs; rm -rf {place}"
    spec = ExecSpec(command, timeout_s=request.timeout_s, label="run")
    done = await run(guest, spec, keep_bytes=OUTCOME_BYTES)
    if done.timed_out:
        return RunOutcome(ok=False, error=f"it did not end within {request.timeout_s:g} s", kind="timeout")
    _, found, told = done.tail.rpartition(_END)
    try:
        return RunOutcome.model_validate_json(told) if found else _silent(done.tail)
    except ValidationError:
        return _silent(done.tail)


def _end_of(outcome: RunOutcome) -> dict[str, Any]:
    state = "succeeded" if outcome.ok else "failed"
    return {"state": state, "attempts": 1, "outcome": outcome, "finished_at": datetime.now(UTC)}


def _silent(tail: str) -> RunOutcome:
    return RunOutcome(ok=False, error=f"it ended without a result: {tail[-2000:].strip()}", kind="runtime")


def new_record(
    request: RunCreate, key_id: str, run_at: datetime, *, state: str, schedule_id: str | None = None, tries: int = 1
) -> RunRecord:
    return RunRecord(
        id="run-" + new_id(),
        schedule_id=schedule_id,
        key_id=key_id,
        state=state,
        attempts=0,
        max_attempts=tries,
        request=request.model_dump(mode="json"),
        outcome=None,
        run_at=run_at,
        next_at=None,
        started_at=run_at if state == "running" else None,
        finished_at=None,
    )


def run_info(record: RunRecord) -> RunInfo:
    fields: dict[str, Any] = {name: value for name, value in vars(record).items() if name not in ("request", "key_id")}
    return RunInfo.model_validate(fields)


async def _once(text: str) -> AsyncIterator[bytes]:
    yield text.encode("utf-8", "replace")
