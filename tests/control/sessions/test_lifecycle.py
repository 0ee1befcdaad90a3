from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.sessions.lifecycle import LIVE, TRANSITIONS, Event, next_state
from carrel.errors import Conflict
from carrel.models import State


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_any_history_stays_in_the_table(events: list[Event]) -> None:
    state = State.CREATING
    ended = False
    for event in events:
        try:
            following = next_state(state, event)
        except Conflict as error:
            assert (state, event) not in TRANSITIONS
            assert error.field == "state"
            continue
        assert following is TRANSITIONS[state, event]
        ended = ended or following is State.TERMINATED
        state = following
        assert not ended or state is State.TERMINATED, "nothing comes after the end"


@pytest.mark.parametrize("state", list(State))
def test_everything_can_end(state: State) -> None:
    assert next_state(state, Event.TERMINATE) is State.TERMINATED


def test_the_round_of_a_durable_session() -> None:
    state = State.CREATING
    for event in (Event.STARTED, Event.IDLE, Event.STOP, Event.START, Event.STARTED, Event.FAIL, Event.START):
        state = next_state(state, event)
    assert state is State.CREATING


def test_only_a_creating_session_becomes_running() -> None:
    assert [at for at, event in TRANSITIONS if event is Event.STARTED] == [State.CREATING]
    assert State.STOPPED not in LIVE and State.TERMINATED not in LIVE
