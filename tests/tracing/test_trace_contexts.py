"""The headers of callers are hostile: what is passed on is what the W3C allows, and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.tracing import TraceContext, current, span, trace_now, trace_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_trace_is_taken_as_it_is() -> None:
    assert trace_of(GOOD.encode(), b"congo=t61rcWkgMzE,rojo@x=00f067aa0ba902b7") == TraceContext(
        GOOD, "congo=t61rcWkgMzE,rojo@x=00f067aa0ba902b7"
    )
    assert trace_of(f"00-{TRACE}-{SPAN}-00".encode(), None) == TraceContext(f"00-{TRACE}-{SPAN}-00")
    later = trace_of(f"7f-{TRACE}-{SPAN}-03-more".encode(), None)
    assert later == TraceContext(GOOD), "of a later version what this one knows"
    assert later.variables() == {"TRACEPARENT": GOOD}
    assert TraceContext(GOOD, "a=b").headers() == [(b"traceparent", GOOD.encode()), (b"tracestate", b"a=b")]


@pytest.mark.parametrize(
    "given",
    [
        "", "x", GOOD.upper(), GOOD + "-more", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-0g",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 600, f"{GOOD}; rm -rf /", f"00-{TRACE}-{SPAN}-01-é",
    ],
)  # fmt: skip
def test_a_wrong_parent_is_ignored(given: str) -> None:
    assert trace_of(given.encode(), b"a=b") is None


@pytest.mark.parametrize(
    "state",
    ["A=b", "a", "a=b,a=c", "a=b=c", "a=b\tc", "a=\x00", "=b", "a=é", "x=" + "y" * 600, ",".join(f"k{n}=v" for n in range(33))],
)  # fmt: skip
def test_a_wrong_state_is_left_out(state: str) -> None:
    assert trace_of(GOOD.encode(), state.encode()) == TraceContext(GOOD)


@given(st.binary(max_size=120), st.binary(max_size=600))
def test_whatever_is_sent_only_what_is_allowed_is_passed_on(parent: bytes, state: bytes) -> None:
    assert trace_of(parent, state) is None
    found = trace_of(GOOD.encode(), state)
    assert found is not None and found.traceparent == GOOD
    assert re.fullmatch(r"[\x20-\x7e]{0,512}", found.tracestate)


def test_without_a_trace_a_step_is_nothing() -> None:
    assert current.get() is None
    with span("step", sandbox="x") as step:
        assert step is None
    assert trace_now(None) is None
    assert trace_now(TraceContext(GOOD)) == TraceContext(GOOD)
