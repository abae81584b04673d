"""The table of states: what can follow what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forkyard.lifecycle import ENDED, LIVE, TRANSITIONS, State, allowed


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)


def test_a_deleted_sandbox_never_changes_again() -> None:
    assert TRANSITIONS[State.DELETED] == frozenset()


def test_deleted_is_reachable_from_every_other_state() -> None:
    for start in State:
        seen, todo = {start}, [start]
        while todo:
            for following in TRANSITIONS[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        assert State.DELETED in seen


def test_no_state_leads_to_itself_or_back_to_creating() -> None:
    for source, targets in TRANSITIONS.items():
        assert source not in targets
        assert State.CREATING not in targets


@given(st.lists(st.sampled_from(State), max_size=20))
def test_what_is_being_deleted_never_lives_again(wishes: list[State]) -> None:
    state, going = State.CREATING, False
    for wish in wishes:
        if allowed(state, wish):
            state = wish
            going = going or state in (State.DELETING, State.DELETED)
            assert not (going and state not in (State.DELETING, State.DELETED))


def test_only_a_start_or_a_rollback_brings_back_what_failed() -> None:
    assert TRANSITIONS[State.FAILED] == {State.STARTING, State.RESUMING, State.DELETING}


def test_what_is_live_is_neither_asleep_nor_ended() -> None:
    assert LIVE.isdisjoint(ENDED | {State.PAUSED, State.STOPPED, State.DELETING})
