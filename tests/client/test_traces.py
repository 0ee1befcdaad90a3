"""The SDK names the trace of the program that uses it, and imports nothing for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from carrel.client import Sandbox

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
NAMED = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"


def test_commands_are_in_the_trace_of_the_program(box: Sandbox) -> None:
    state = TraceState([("vendor", "7")])
    span = NonRecordingSpan(
        SpanContext(TRACE_ID, SPAN_ID, is_remote=False, trace_flags=TraceFlags(1), trace_state=state)
    )
    token = context.attach(trace.set_span_in_context(span))
    try:
        assert box.commands.run("echo $TRACEPARENT $TRACESTATE").stdout == f"{NAMED} vendor=7\n"
        with box.terminal(command="echo $TRACEPARENT") as terminal:
            assert NAMED.encode() in b"".join(terminal)
    finally:
        context.detach(token)
    assert box.commands.run("echo ${TRACEPARENT-none}").stdout == "none\n"


@pytest.mark.parametrize("module", ["carrel", "carrel.client", "carrel.cli"])
def test_nothing_of_opentelemetry_is_imported(module: str) -> None:
    code = f"import sys, {module}; from carrel import Client; print([name for name in sys.modules if 'opentelemetry' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
