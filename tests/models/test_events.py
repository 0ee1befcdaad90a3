from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.models.events import MAX_BODY, MEANINGS, EventFilter, EventKind, StoredEvent, body_of, kinds_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6000),
    lambda inner: st.lists(inner, max_size=80) | st.dictionaries(st.text(max_size=300), inner, max_size=80),
    max_leaves=60,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=12))
def test_a_body_is_bounded_ascii_json(values: dict[str, object]) -> None:
    body = body_of(values)
    assert len(body) <= MAX_BODY
    assert body.isascii()
    assert "\0" not in body
    assert isinstance(json.loads(body), dict)


def test_a_long_body_is_cut_and_says_so() -> None:
    cut = json.loads(body_of({"command": "x" * 10_000, "record": 7, "nothing": None}))
    assert (cut["record"], cut["cut"]) == (7, True)
    assert cut["command"].startswith("xxx")
    assert "nothing" not in cut


def test_kinds_and_families() -> None:
    assert kinds_of([]) is None
    assert kinds_of(["command", "log"]) == {EventKind.COMMAND_STARTED, EventKind.COMMAND_ENDED, EventKind.LOG}
    with pytest.raises(InvalidRequest):
        kinds_of(["command."])
    assert set(MEANINGS) == set(EventKind)


@given(st.text(alphabet="ab:", max_size=4), st.none() | st.text(alphabet="ab:", max_size=4))
def test_a_namespace_never_shows_what_is_outside(namespace: str, context: str | None) -> None:
    event = StoredEvent(1, 1.0, "log", context, None, "n", "{}")
    shown = EventFilter(namespace=namespace).matches(event)
    assert shown == (context is not None and (context.partition(":")[0] if ":" in context else "default") == namespace)
