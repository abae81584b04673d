"""Runs, and schedules that begin them: on record, at most once, made up for after a restart."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from forkyard.builds import schedules as schedules_module
from forkyard.models.runs import RunCreate, RunInfo, RunOutcome, ScheduleCreate, ScheduleUpdate
from forkyard.store.runs import RunRecord

from .sdk_daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    assert shutil.which("node"), "scripts are run by Node.js"
    with running_daemon() as daemon:
        yield daemon


def do(daemon: Daemon, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, daemon._loop).result(timeout=60)


async def ended(daemon: Daemon, schedule_id: str) -> RunInfo:
    for _ in range(600):
        found, _ = await daemon.schedules.runs(schedule_id)
        if found and found[0].state in ("succeeded", "failed"):
            return found[0]
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to an end")


async def due(daemon: Daemon, schedule_id: str) -> None:
    """As if its time had come."""
    past = datetime.now(UTC) - timedelta(hours=3)
    await daemon._store.change_schedule(schedule_id, next_at=past)
    daemon.schedules._news.set()


def test_a_script_returns_what_its_default_export_does(daemon: Daemon) -> None:
    request = RunCreate(script="export default ({ n }) => { console.error('hm'); return n + 1 }", payload={"n": 1})
    made = do(daemon, daemon.runs.create(request))
    assert made.state == "succeeded"
    assert made.outcome.result == 2
    assert [(one.type, one.message) for one in made.outcome.logs] == [("error", "hm")]


def test_a_script_that_takes_too_long_is_ended(daemon: Daemon) -> None:
    made = do(
        daemon,
        daemon.runs.create(
            RunCreate(script="export default () => new Promise(() => setTimeout(() => 0, 1e6))", timeout_s=1)
        ),
    )
    assert (made.state, made.outcome.kind) == ("failed", "timeout")


def test_a_script_that_ends_its_process_has_no_result(daemon: Daemon) -> None:
    made = do(daemon, daemon.runs.create(RunCreate(script="process.exit(3)")))
    assert (made.state, made.outcome.kind) == ("failed", "runtime")


def test_no_machine_of_a_run_is_left(daemon: Daemon) -> None:
    do(daemon, daemon.runs.create(RunCreate(script="export default 1")))
    assert not do(daemon, daemon._control.sandboxes.list()).items


def test_a_schedule_begins_a_run_once_and_moves_on(daemon: Daemon) -> None:
    request = ScheduleCreate(cron="0 0 1 1 *", run=RunCreate(script="export default (p) => p.a", payload={"a": 5}))
    made = do(daemon, daemon.schedules.create(request))
    do(daemon, due(daemon, made.id))
    run = do(daemon, ended(daemon, made.id))
    assert (run.state, run.attempts, run.outcome.result) == ("succeeded", 1, 5)
    after = do(daemon, daemon.schedules.get(made.id))
    assert after.next_at > datetime.now(UTC)
    assert do(daemon, daemon.schedules.runs(made.id))[1] == 1, "times that passed are made up for once"
    do(daemon, daemon.schedules.delete(made.id))


def test_a_run_that_fails_is_tried_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules_module, "BACKOFF_S", 0.05)
    request = ScheduleCreate(cron="0 0 1 1 *", retries=1, run=RunCreate(script="throw new Error('no')"))
    made = do(daemon, daemon.schedules.create(request))
    do(daemon, due(daemon, made.id))
    run = do(daemon, ended(daemon, made.id))
    assert (run.state, run.attempts, run.max_attempts) == ("failed", 2, 2)
    assert "no" in run.outcome.error
    do(daemon, daemon.schedules.delete(made.id))


def test_a_run_that_ends_while_the_store_is_read_is_not_begun_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ScheduleCreate(cron="0 0 1 1 *", run=RunCreate(script="export default 1"))
    made = do(daemon, daemon.schedules.create(request))
    read, queued, performed = daemon._store.list_runs, [], []
    perform = daemon.runs.perform

    async def slow_read(**which: Any) -> list[RunRecord]:
        found = await read(**which)
        if which.get("states") != ["queued", "retry"]:
            return found
        queued.extend(one for one in found if one.schedule_id == made.id)
        return [*queued[:1], *(one for one in found if one not in queued)]  # as it was when it was first read

    async def counted(run_id: str, *rest: Any) -> RunOutcome:
        performed.append(run_id)
        return await perform(run_id, *rest)

    monkeypatch.setattr(daemon._store, "list_runs", slow_read)
    monkeypatch.setattr(daemon.runs, "perform", counted)
    do(daemon, due(daemon, made.id))
    do(daemon, ended(daemon, made.id))

    async def looked_again() -> None:
        await daemon.schedules._look(datetime.now(UTC))
        while daemon.schedules._under_way:
            await asyncio.wait([one.task for one in daemon.schedules._under_way.values()])

    do(daemon, looked_again())
    assert len(performed) == 1
    assert do(daemon, daemon.schedules.runs(made.id))[0][0].attempts == 1
    do(daemon, daemon.schedules.delete(made.id))


def test_a_schedule_that_is_off_begins_nothing(daemon: Daemon) -> None:
    made = do(
        daemon, daemon.schedules.create(ScheduleCreate(cron="* * * * *", run=RunCreate(script="export default 1")))
    )
    changed = do(daemon, daemon.schedules.update(made.id, ScheduleUpdate(active=False)))
    assert (changed.active, changed.next_at) == (False, None)
    do(daemon, due(daemon, made.id))
    do(daemon, asyncio.sleep(0.3))
    assert do(daemon, daemon.schedules.runs(made.id))[1] == 0
    do(daemon, daemon.schedules.delete(made.id))


def test_what_a_dead_daemon_had_begun_is_tried_again_if_it_may(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules_module, "BACKOFF_S", 0.05)
    request = ScheduleCreate(cron="0 0 1 1 *", retries=1, run=RunCreate(script="export default 7"))
    made = do(daemon, daemon.schedules.create(request))

    async def killed_in_the_middle() -> None:
        await daemon.schedules.stop()
        record = schedules_module.new_record(
            request.run, "", datetime.now(UTC), state="running", schedule_id=made.id, tries=2
        )
        await daemon._store.add_run(record)
        daemon.schedules = schedules_module.Schedules(daemon._control, daemon.runs)
        await daemon.schedules.start()

    do(daemon, killed_in_the_middle())
    run = do(daemon, ended(daemon, made.id))
    assert (run.state, run.attempts, run.outcome.result) == ("succeeded", 2, 7)
    do(daemon, daemon.schedules.delete(made.id))


def test_with_a_schedule_goes_what_it_has_begun(daemon: Daemon) -> None:
    script = "export default () => new Promise(() => setTimeout(() => 0, 1e6))"
    made = do(daemon, daemon.schedules.create(ScheduleCreate(cron="0 0 1 1 *", run=RunCreate(script=script))))
    do(daemon, due(daemon, made.id))

    async def begun() -> None:
        async with asyncio.timeout(30):
            while not any(one.state == "running" for one in (await daemon._control.sandboxes.list()).items):
                await asyncio.sleep(0.05)

    do(daemon, begun())
    do(daemon, daemon.schedules.delete(made.id))
    assert not do(daemon, daemon._control.sandboxes.list()).items


def test_a_run_that_goes_wrong_by_itself_has_failed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(daemon.runs, "_prepared", broken)
    made = do(daemon, daemon.runs.create(RunCreate(script="export default 1")))
    assert (made.state, made.outcome.kind) == ("failed", "host")
