"""A cell takes what a context says of it, whatever that is."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from carrel.supervisor.output import ByteBudget, CommandOutput
from carrel.supervisor.python.cell import Cell

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
near = st.fixed_dictionaries(
    {
        "status": st.sampled_from(["ok", "error", "interrupted", "died"]) | values,
        "error": st.none() | st.fixed_dictionaries({"name": values, "value": values, "traceback": values}) | values,
        "dropped": st.integers() | values,
        "results": st.lists(st.fixed_dictionaries({"kind": values, "data": st.dictionaries(st.text(), values)}))
        | values,
    }
)


def cell() -> Cell:
    loop = asyncio.new_event_loop()
    try:
        return Cell("1", "1", ["png"], None, CommandOutput(100, ByteBudget(1000)), loop.create_future())
    finally:
        loop.close()


@given(st.binary() | (near | values).map(lambda told: json.dumps(told).encode()))
def test_nothing_it_says_breaks_it(message: bytes) -> None:
    made = cell()
    made.take(message, len(message))
    shown = made.result("a")
    assert shown["status"] in {"ok", "error", "interrupted"}
    assert all(isinstance(form, str) for each in shown["results"] for form in each["data"].values())
    assert shown["error"] is None or set(shown["error"]) == {"name", "value", "traceback"}
    json.dumps(shown).encode()


def test_what_has_the_right_form_is_taken() -> None:
    made = cell()
    told = {"status": "ok", "error": None, "dropped": 3, "results": [{"kind": "result", "data": {"text/plain": "1"}}]}
    made.take(json.dumps(told).encode(), 50)
    assert (made.status, made.results, made.results_size, made.results_dropped) == ("ok", told["results"], 50, 3)
    made.end()
    assert not made.running and made.info()["exit_code"] == 0 and made.result("a")["truncated"]
    made.take(b"no", 2)
    assert (made.status, made.results_dropped) == ("error", 2)
