"""Traces at the border of a sandbox: the trace as variables of a command, and the process of a command as a span."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

from carrel.control.operations.caller import Caller, OwnWork
from carrel.models import CommandRequest
from carrel.tracing import TraceContext, current, trace_now

R = TypeVar("R", bound=CommandRequest)
_LONGEST_S = 366 * 86_400.0


def passed_on(caller: Caller | OwnWork) -> TraceContext | None:
    """Return the trace for what a sandbox runs; None if the caller named none: a program may take it as a wish for
    traces.
    """
    if isinstance(caller, OwnWork) or caller.trace is None:
        return None
    return trace_now(caller.trace)


def traced(caller: Caller | OwnWork, request: R) -> R:
    """Return a command with the caller's trace in `TRACEPARENT` and `TRACESTATE`, unless it sets one itself."""
    trace = passed_on(caller)
    if trace is None or "TRACEPARENT" in request.env:
        return request
    return request.model_copy(update={"env": {**request.env, **trace.variables()}})


def process_span(seconds: float, told: Mapping[str, object]) -> None:
    """Record that a process has just ended, which says itself how long it ran."""
    now = current.get()
    if now is not None:
        ended = time.time()
        exit, code = told.get("exit"), told.get("exit_code")
        facts = {"exit": str(exit), "exit_code": code if isinstance(code, int) else None}
        now.record("process", ended - min(max(0.0, seconds), _LONGEST_S), ended, facts)
