"""The lifecycle of a session as a table: a state and an event give the next state, or a refusal. Pure: no I/O, no
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from carrel.errors import Conflict
from carrel.models import State
from carrel.models.sandboxes import UNTIL_LABEL


class Event(StrEnum):
    """An event in the lifecycle of a session."""

    START = "start"
    STARTED = "started"
    FAIL = "fail"
    IDLE = "idle"
    STOP = "stop"
    TERMINATE = "terminate"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CREATING, Event.STARTED): State.RUNNING,
    (State.CREATING, Event.STOP): State.STOPPED,
    (State.RUNNING, Event.IDLE): State.IDLE_STOPPING,
    (State.RUNNING, Event.STOP): State.STOPPED,
    (State.RUNNING, Event.START): State.CREATING,
    (State.IDLE_STOPPING, Event.STOP): State.STOPPED,
    (State.STOPPED, Event.START): State.CREATING,
    (State.STOPPED, Event.STOP): State.STOPPED,
    (State.ERROR, Event.START): State.CREATING,
    (State.ERROR, Event.STOP): State.STOPPED,
    **{(state, Event.FAIL): State.ERROR for state in State if state is not State.TERMINATED},
    **{(state, Event.TERMINATE): State.TERMINATED for state in State},
}
"""Every other transition is refused. A running session starts again when its sandbox has died."""

LIVE = frozenset({State.CREATING, State.RUNNING, State.IDLE_STOPPING})
"""States in which a sandbox may exist."""


def next_state(state: State, event: Event) -> State:
    """Return the state after `event`; `Conflict` when it cannot happen in `state`."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        possible = sorted(str(each) for at, each in TRANSITIONS if at is state)
        raise Conflict(
            f"a session that is {state} cannot {event}", field="state", hint=f"possible now: {', '.join(possible)}"
        )
    return following


TIME_OVER = "the time that its caller named is over"


def until_of(labels: Mapping[str, str]) -> tuple[float, str] | None:
    """Return when a sandbox ends by its label, and what it does then; None without such a label."""
    moment, _, ending = labels.get(UNTIL_LABEL, "").partition(" ")
    try:
        return (float(moment), ending) if ending in {"stop", "terminate"} else None
    except ValueError:
        return None
