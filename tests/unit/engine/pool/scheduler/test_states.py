"""The two state machines of the connector's scheduler: what holds for every state and event of their tables."""

from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import IntegrityError
from userkv.engine.pool.scheduler.lookup_state import LOOKUP_TRANSITIONS, LookupEvent, LookupState
from userkv.engine.pool.scheduler.save_state import SAVE_TRANSITIONS, SaveEvent, SaveState
from userkv.engine.pool.scheduler.transitions import Transitions

MACHINES = {
    "save": (SAVE_TRANSITIONS, SaveState, SaveEvent, SaveState.LOOKING_UP),
    "lookup": (LOOKUP_TRANSITIONS, LookupState, LookupEvent, LookupState.NOT_ASKED),
}
OUTCOMES = {SaveState.COMMITTED, SaveState.UNNEEDED, SaveState.FAILED, SaveState.DROPPED}


def reachable(transitions: Transitions[Any, Any], start: Enum) -> set[Enum]:
    """All states that some sequence of events leads to."""
    seen, new = {start}, [start]
    while new:
        for state in transitions.table[new.pop()].values():
            if state not in seen:
                seen.add(state)
                new.append(state)
    return seen


@pytest.mark.parametrize("name", MACHINES)
class TestEveryMachine:
    """What holds for both tables."""

    def test_every_state_is_listed_and_reachable(self, name: str) -> None:
        transitions, states, _, start = MACHINES[name]
        assert set(transitions.table) == set(states)
        assert reachable(transitions, start) == set(states)

    def test_every_event_happens_in_some_state(self, name: str) -> None:
        transitions, _, events, _ = MACHINES[name]
        assert {event for row in transitions.table.values() for event in row} == set(events)

    def test_an_event_that_a_state_does_not_list_raises(self, name: str) -> None:
        transitions, states, events, _ = MACHINES[name]
        illegal = [(state, event) for state in states for event in events if event not in transitions.table[state]]
        assert illegal
        for state, event in illegal:
            with pytest.raises(IntegrityError, match=f"{event}.*{state}"):
                transitions.next(state, event)


def test_a_save_can_end_from_every_state() -> None:
    for state in SaveState:
        assert reachable(SAVE_TRANSITIONS, state) & OUTCOMES


def test_only_the_four_outcomes_are_final() -> None:
    for state, row in SAVE_TRANSITIONS.table.items():
        assert state.is_over == (state in OUTCOMES) == (set(row.values()) == {state})


def test_a_save_may_be_cancelled_in_every_state() -> None:
    """New weights do not ask where a save stands. Only a commit that is under way may still succeed."""
    for state in SaveState:
        cancelled = SAVE_TRANSITIONS.next(state, SaveEvent.CANCELLED)
        succeeds = SaveState.COMMITTED in reachable(SAVE_TRANSITIONS, cancelled)
        assert succeeds == (state in (SaveState.COMMITTING, SaveState.COMMITTED))


def test_only_a_commit_makes_a_save_committed() -> None:
    sources = {state for state, row in SAVE_TRANSITIONS.table.items() if SaveState.COMMITTED in row.values()}
    assert sources - OUTCOMES == {SaveState.COMMITTING}


@given(events=st.lists(st.sampled_from(SaveEvent), max_size=20))
def test_nothing_is_committed_before_all_ranks_wrote_and_the_step_was_confirmed(events: list[SaveEvent]) -> None:
    state, happened = SaveState.LOOKING_UP, []
    for event in events:
        if event in SAVE_TRANSITIONS.table[state]:
            state = SAVE_TRANSITIONS.next(state, event)
            happened.append(event)
        if state is SaveState.COMMITTING:
            assert SaveEvent.RANKS_DONE in happened
            assert SaveEvent.SHIPPED in happened or SaveEvent.STEP_CONFIRMED in happened
            assert not {SaveEvent.RANK_FAILED, SaveEvent.RANK_DROPPED} & set(happened)


@pytest.mark.parametrize("bad", [SaveEvent.RANK_FAILED, SaveEvent.RANK_DROPPED, SaveEvent.CANCELLED])
@pytest.mark.parametrize("state", [SaveState.WRITING, SaveState.WRITING_UNCONFIRMED])
def test_a_save_that_fails_while_ranks_write_waits_for_all_of_them(state: SaveState, bad: SaveEvent) -> None:
    failing = SAVE_TRANSITIONS.next(state, bad)
    assert failing.is_written_by_ranks
    assert failing.leaves_extents
    over = SAVE_TRANSITIONS.next(failing, SaveEvent.RANKS_DONE)
    assert over is (SaveState.DROPPED if bad is SaveEvent.RANK_DROPPED else SaveState.FAILED)


def test_states_that_leave_extents_are_those_that_wrote_and_did_not_ask_for_a_commit() -> None:
    for state, row in SAVE_TRANSITIONS.table.items():
        ends_badly = {SaveState.FAILED, SaveState.DROPPED} & set(row.values()) and not state.is_over
        if ends_badly and not state.waits_for_step and state is not SaveState.COMMITTING:
            assert state.leaves_extents
        else:
            assert not state.leaves_extents


def test_a_load_is_started_once_and_only_from_an_answer() -> None:
    sources = {state for state, row in LOOKUP_TRANSITIONS.table.items() if LookupEvent.LOAD in row}
    assert sources == {LookupState.ANSWERED}
    loading = reachable(LOOKUP_TRANSITIONS, LookupState.LOADING)
    assert loading == {LookupState.LOADING, LookupState.LOADED, LookupState.LOAD_FAILED}
    assert {state for state in LookupState if not state.may_load} == loading


def test_new_weights_void_every_answer() -> None:
    for state in LookupState:
        assert LOOKUP_TRANSITIONS.next(state, LookupEvent.VOID) is (LookupState.NOT_ASKED if state.may_load else state)
