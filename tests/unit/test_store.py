"""The store: one conditional UPDATE changes a state, and its event is never missing."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkyard.errors import HostFailure, IdempotencyConflict, NoCapacity, StateConflict
from forkyard.lifecycle import TRANSITIONS, Cause, State, allowed
from forkyard.models import Shape
from forkyard.store import sql
from forkyard.store.migrate import migrate
from forkyard.store.records import IdempotencyClaim, Load, NewSandbox, Place, SandboxRecord
from forkyard.store.sql import Store
from forkyard.store.tables import metadata

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "forkyard.db")
    yield store
    await store.close()


def new(sandbox_id: str, **labels: str) -> NewSandbox:
    return NewSandbox(sandbox_id, Shape(), labels=labels)


async def _to(store: Store, sandbox_id: str, from_: State, to: State, cause: Cause = Cause.READY) -> bool:
    return await store.transition(sandbox_id, 1, from_, to, cause) is not None


# ── migrations ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_migrating_an_empty_database_gives_exactly_the_tables_of_the_code(tmp_path: Path) -> None:
    database = tmp_path / "forkyard.db"
    migrate(database)
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        names = {index["name"] for table in metadata.tables for index in sa.inspect(connection).get_indexes(table)}
        assert names >= {index.name for table in metadata.tables.values() for index in table.indexes}
    engine.dispose()


def test_migrating_twice_changes_nothing(tmp_path: Path) -> None:
    database = tmp_path / "forkyard.db"
    migrate(database)
    before = database.read_bytes()
    migrate(database)
    assert database.read_bytes() == before


def test_a_database_of_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    database = tmp_path / "forkyard.db"
    migrate(database)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(HostFailure, match="newer Forkyard"):
        migrate(database)


async def test_a_database_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", "forkyard.store:migrations")
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'forkyard.db'}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.exec_driver_sql(
            "INSERT INTO sandboxes (id, state, cause, incarnation, vcpus, memory_mib, disk_gib, labels, env,"
            " created_at, updated_at) VALUES ('old', 'running', 'ready', 1, 1, 512, 8, '{}', '{}', '2026-01-01', '2026-01-01')"
        )
    engine.dispose()
    store = await Store.open(tmp_path / "forkyard.db")
    record = await store.sandbox("old")
    assert record is not None
    assert (record.persistence, record.priority, record.idle_timeout_s, record.parent_id) == ("sticky", 5, None, None)
    await store.close()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "forkyard.db").write_bytes(b"this is a text, not a database" * 100)
    with pytest.raises(HostFailure, match="cannot be opened"):
        await Store.open(tmp_path / "forkyard.db")


async def test_nobody_else_can_read_the_database(store: Store, tmp_path: Path) -> None:
    await store.add_sandbox(new("a"))
    for file in tmp_path.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file


async def test_a_commit_is_durable(store: Store) -> None:
    def pragmas(connection: sa.Connection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names]

    assert await store._write(pragmas) == ["wal", 2, 1]


# ── transitions ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_sandbox_is_creating_and_has_an_event(store: Store) -> None:
    record = await store.add_sandbox(NewSandbox("a", Shape(memory_mib=1024), "box", {"k": "v"}, {"CI": "1"}))
    assert record == await store.sandbox("a")
    assert (record.state, record.cause, record.shape.memory_mib) == (State.CREATING, Cause.REQUESTED, 1024)
    [event] = await store.list_events()
    assert (event.kind, event.sandbox_id, event.cause) == ("sandbox.creating", "a", Cause.REQUESTED)


async def test_a_transition_records_cause_detail_template_and_event(store: Store) -> None:
    await store.add_sandbox(new("a"))
    assert await store.transition(
        "a", 1, State.CREATING, State.RUNNING, Cause.READY, "fine", template="t1", data={"ms": 150}
    )
    record = await store.sandbox("a")
    assert record is not None
    assert (record.state, record.cause, record.cause_detail, record.template, record.ended_at) == (
        State.RUNNING,
        Cause.READY,
        "fine",
        "t1",
        None,
    )
    event = (await store.list_events())[-1]
    assert (event.kind, event.cause, event.detail, event.data) == ("sandbox.running", Cause.READY, "fine", {"ms": 150})


async def test_a_transition_of_another_incarnation_changes_nothing(store: Store) -> None:
    await store.add_sandbox(new("a"))
    assert not await store.transition("a", 2, State.CREATING, State.RUNNING, Cause.READY)
    assert len(await store.list_events()) == 1


async def test_a_transition_the_table_does_not_know_is_refused(store: Store) -> None:
    await store.add_sandbox(new("a"))
    with pytest.raises(StateConflict, match="from creating to deleted"):
        await _to(store, "a", State.CREATING, State.DELETED)


async def test_a_transition_of_an_unknown_sandbox_is_false(store: Store) -> None:
    assert not await _to(store, "nobody", State.CREATING, State.RUNNING)


async def test_of_many_racing_transitions_exactly_one_wins(store: Store) -> None:
    await store.add_sandbox(new("a"))
    targets = [State.RUNNING, State.DELETING, State.FAILED] * 5
    won = await asyncio.gather(*(_to(store, "a", State.CREATING, target) for target in targets))
    assert won.count(True) == 1
    record = await store.sandbox("a")
    assert record is not None
    assert record.state is targets[won.index(True)]
    assert [event.kind for event in await store.list_events()] == ["sandbox.creating", f"sandbox.{record.state}"]


async def test_the_next_incarnation_comes_with_the_transition_that_makes_it(store: Store) -> None:
    await store.add_sandbox(new("a"))
    await _to(store, "a", State.CREATING, State.RUNNING)
    await _to(store, "a", State.RUNNING, State.RESUMING)
    assert await store.transition(
        "a",
        1,
        State.RESUMING,
        State.RUNNING,
        Cause.WOKEN,
        next_incarnation=2,
        shape=Shape(vcpus=2),
        snapshot_id="sc-1",
    )
    record = await store.sandbox("a")
    assert record is not None
    assert (record.incarnation, record.shape.vcpus, record.snapshot_id) == (2, 2, "sc-1")
    assert not await store.transition("a", 1, State.RUNNING, State.FAILED, Cause.VM_CRASHED), (
        "a late word of the old one"
    )


async def test_a_failed_sandbox_that_is_started_has_not_ended(store: Store) -> None:
    await store.add_sandbox(new("a"))
    await _to(store, "a", State.CREATING, State.FAILED)
    await _to(store, "a", State.FAILED, State.STARTING)
    record = await store.sandbox("a")
    assert record is not None
    assert record.ended_at is None


async def test_who_is_not_admitted_leaves_no_row_and_no_event(store: Store) -> None:
    seen: list[Load] = []

    def admit(load: Load) -> None:
        seen.append(load)
        if load.key_running >= 1:
            raise NoCapacity("full")

    mine = [replace(new(name), key_id="k") for name in ("a", "b")]
    added = await store.add_sandboxes(mine, admit=admit)
    assert [type(item) for item in added] == [SandboxRecord, NoCapacity]
    with pytest.raises(NoCapacity):
        await store.add_sandbox(mine[1], admit=admit)
    assert await store.sandbox("b") is None
    assert len(await store.list_events()) == 1
    assert (seen[1].memory_mib, seen[1].key_running, seen[1].key_memory_mib, seen[1].key_creates) == (512, 1, 512, 1)
    await _to(store, "a", State.CREATING, State.RUNNING)
    await _to(store, "a", State.RUNNING, State.PAUSING)
    await _to(store, "a", State.PAUSING, State.PAUSED)
    assert await store.transition("a", 1, State.PAUSED, State.RESUMING, Cause.WOKEN, admit=seen.append)
    assert (seen[-1].memory_mib, seen[-1].key_running) == (0, 0), "itself is not counted"


async def test_a_sandbox_ends_once(store: Store) -> None:
    await store.add_sandbox(new("a"))
    await _to(store, "a", State.CREATING, State.FAILED)
    failed = await store.sandbox("a")
    await _to(store, "a", State.FAILED, State.DELETING)
    await _to(store, "a", State.DELETING, State.DELETED)
    deleted = await store.sandbox("a")
    assert failed is not None
    assert deleted is not None
    assert deleted.ended_at == failed.ended_at is not None


_wish = st.tuples(st.sampled_from(State), st.sampled_from(State), st.integers(1, 2))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wishes=st.lists(_wish, max_size=12))
def test_any_sequence_of_transitions_follows_the_table(wishes: list[tuple[State, State, int]], tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "property.db").unlink(missing_ok=True)
        store = await Store.open(tmp_path / "property.db")
        await store.add_sandbox(new("a"))
        state, expected = State.CREATING, ["sandbox.creating"]
        for from_, to, incarnation in wishes:
            try:
                moved = await store.transition("a", incarnation, from_, to, Cause.READY)
            except StateConflict:
                assert not allowed(from_, to)
                continue
            assert (moved is not None) == (from_ is state and incarnation == 1)
            if moved is not None:
                assert moved == await store.sandbox("a")
                assert to in TRANSITIONS[state]
                state = to
                expected.append(f"sandbox.{to}")
        record = await store.sandbox("a")
        assert record is not None
        assert record.state is state
        assert [event.kind for event in await store.list_events()] == expected
        await store.close()

    asyncio.run(run())


async def test_a_caller_that_is_cancelled_leaves_a_whole_transaction(store: Store) -> None:
    news = store.news
    task = asyncio.create_task(store.add_sandbox(new("a")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(news.wait(), 5)
    assert await store.sandbox("a") is not None
    assert len(await store.list_events()) == 1


# ── idempotency ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_claimed_key_returns_the_sandbox_it_made(store: Store) -> None:
    claim = IdempotencyClaim("key", "retry-1", "hash")
    await store.add_sandbox(new("a"), claim)
    again = await store.add_sandbox(new("b"), claim)
    assert again.id == "a"
    assert await store.sandbox("b") is None


async def test_a_claimed_key_with_another_request_is_a_conflict(store: Store) -> None:
    await store.add_sandbox(new("a"), IdempotencyClaim("key", "retry-1", "hash"))
    with pytest.raises(IdempotencyConflict, match="sandbox a"):
        await store.add_sandbox(new("b"), IdempotencyClaim("key", "retry-1", "other"))


async def test_idempotency_keys_of_two_api_keys_are_apart(store: Store) -> None:
    await store.add_sandbox(new("a"), IdempotencyClaim("key", "retry-1", "hash"))
    other = await store.add_sandbox(new("b"), IdempotencyClaim("another", "retry-1", "other"))
    assert other.id == "b"


@pytest.mark.parametrize(("to", "freed"), [(State.RUNNING, False), (State.FAILED, True), (State.DELETING, True)])
async def test_a_create_that_came_to_nothing_frees_its_key(store: Store, to: State, freed: bool) -> None:
    claim = IdempotencyClaim("key", "retry-1", "hash")
    await store.add_sandbox(new("a"), claim)
    await _to(store, "a", State.CREATING, to)
    again = await store.add_sandbox(new("b"), claim)
    assert again.id == ("b" if freed else "a")


async def test_a_claim_expires(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = IdempotencyClaim("key", "retry-1", "hash")
    await store.add_sandbox(new("a"), claim)
    later = sql._now() + sql.IDEMPOTENCY_LIFETIME + timedelta(seconds=1)
    monkeypatch.setattr(sql, "_now", lambda: later)
    assert (await store.add_sandbox(new("b"), claim)).id == "b"


# ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_list_is_newest_first_and_pages_do_not_shift_when_sandboxes_are_added(store: Store) -> None:
    for number in range(6):
        await store.add_sandbox(new(f"s{number}"))
    first = await store.list_sandboxes(limit=3)
    await store.add_sandbox(new("s6"))
    last = first[-1]
    second = await store.list_sandboxes(limit=10, before=Place(last.created_at, last.id))
    assert [record.id for record in first + second] == ["s5", "s4", "s3", "s2", "s1", "s0"]


async def test_sandboxes_made_in_the_same_instant_are_neither_lost_nor_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    instant = sql._now()
    monkeypatch.setattr(sql, "_now", lambda: instant)
    for number in range(5):
        await store.add_sandbox(new(f"s{number}"))
    seen: list[str] = []
    place = None
    while page := await store.list_sandboxes(limit=2, before=place):
        seen += [record.id for record in page]
        place = Place(page[-1].created_at, page[-1].id)
    assert sorted(seen) == [f"s{number}" for number in range(5)]


@pytest.mark.parametrize("key", ["team", "a.b", "a/b-c_d", "x.y.z", "0"])
async def test_labels_filter_by_equality_of_all(store: Store, key: str) -> None:
    await store.add_sandbox(NewSandbox("a", Shape(), labels={key: "1", "other": "x"}))
    await store.add_sandbox(NewSandbox("b", Shape(), labels={key: "2", "other": "x"}))
    await store.add_sandbox(NewSandbox("c", Shape()))
    assert [record.id for record in await store.list_sandboxes(labels={key: "1"})] == ["a"]
    assert [record.id for record in await store.list_sandboxes(labels={"other": "x"})] == ["b", "a"]
    assert await store.list_sandboxes(labels={key: "1", "other": "y"}) == []


async def test_a_label_value_that_looks_like_a_number_stays_text(store: Store) -> None:
    await store.add_sandbox(new("a", build="007"))
    assert [record.id for record in await store.list_sandboxes(labels={"build": "007"})] == ["a"]
    assert await store.list_sandboxes(labels={"build": "7"}) == []


async def test_states_filter(store: Store) -> None:
    await store.add_sandbox(new("a"))
    await store.add_sandbox(new("b"))
    await _to(store, "b", State.CREATING, State.RUNNING)
    assert [record.id for record in await store.list_sandboxes(states=[State.RUNNING])] == ["b"]
    assert await store.count_sandboxes(State.RUNNING) == 1


# ── events and keys ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_commit_wakes_whoever_waits_for_news(store: Store) -> None:
    news = store.news
    await store.add_event("daemon.started")
    await asyncio.wait_for(news.wait(), 5)
    assert store.news is not news


async def test_events_are_read_after_an_id_and_for_one_sandbox(store: Store) -> None:
    await store.add_sandbox(new("a"))
    await store.add_sandbox(new("b"))
    await _to(store, "a", State.CREATING, State.RUNNING)
    everything = await store.list_events()
    assert [event.id for event in everything] == sorted(event.id for event in everything)
    assert await store.list_events(after=everything[0].id) == everything[1:]
    assert [event.kind for event in await store.list_events(sandbox_id="a")] == ["sandbox.creating", "sandbox.running"]
    assert await store.last_event_id() == everything[-1].id


async def test_the_newest_events_are_found_from_the_end(store: Store) -> None:
    await store.add_sandbox(new("a"))
    for number in range(5):
        await store.add_event("test.tick", data={"n": number})
    after = await store.event_before_newest(2)
    assert [event.data["n"] for event in await store.list_events(after=after)] == [3, 4]
    assert await store.event_before_newest(100) == 0
    assert await store.event_before_newest(1, sandbox_id="a") == 0


async def test_the_last_key_cannot_be_removed(store: Store) -> None:
    await store.add_key("k1", "one", "h1", "fy_1")
    assert not await store.remove_key("k1")
    await store.add_key("k2", "two", "h2", "fy_2")
    assert await store.remove_key("k1")
    assert await store.key_by_hash("h1") is None
    assert [key.id for key in await store.list_keys()] == ["k2"]


async def test_what_is_written_is_there_after_reopening(tmp_path: Path) -> None:
    first = await Store.open(tmp_path / "forkyard.db")
    written = await first.add_sandbox(new("a"))
    await first.close()
    second = await Store.open(tmp_path / "forkyard.db")
    assert await second.sandbox("a") == written
    await second.close()


async def test_who_came_in_by_a_password_may_stay_until_its_api_key_is_gone(store: Store) -> None:
    await store.add_key("k1", "one", "h1", "fy_1")
    await store.add_key("k2", "two", "h2", "fy_2")
    await store.add_sandbox(new("s1"))
    now = datetime.now(UTC)
    for name, expires_at in (("old", now - timedelta(days=1)), ("good", now + timedelta(hours=1))):
        await store.add_ssh_password(name, "s1", "k1", expires_at)
    for name, opens in (("old", False), ("good", True)):
        assert await store.ssh_password(name, "s1") is opens
        assert await store.ssh_password(name, "s1", inside=True)
        assert not await store.ssh_password(name, "s2", inside=True)
    await store.remove_key("k1")
    assert not await store.ssh_password("good", "s1", inside=True)
