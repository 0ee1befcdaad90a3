"""Traces: the trace that a caller names, and the steps of a request as spans. Imports nothing of OpenTelemetry, which
`otel` does if the setting says so.

The current span is a context variable: every request of a task belongs to it, and nothing else depends on it. Without
one, `span` does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple, Protocol

MAX_STATE = 512
"""The longest `tracestate` that is passed on, as the W3C asks for at least."""
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")
_KEY = r"[a-z0-9][a-z0-9_\-*/]{0,240}(@[a-z][a-z0-9_\-*/]{0,13})?"
_MEMBER = re.compile(rf"{_KEY}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MOST_MEMBERS = 32

Value = str | int | float | bool


class TraceContext(NamedTuple):
    """The place of a request in a trace, as the W3C writes it into two headers."""

    traceparent: str
    tracestate: str = ""

    def variables(self) -> dict[str, str]:
        """Return it as environment variables of a process."""
        return {name.upper(): value for name, value in self._asdict().items() if value}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return it as headers of a request."""
        return [(name.encode(), value.encode()) for name, value in self._asdict().items() if value]


def trace_of(traceparent: bytes | None, tracestate: bytes | None) -> TraceContext | None:
    """Return the trace that a caller names; None if it names none, or writes it wrongly: such a header is ignored, as
    the W3C asks. A wrong `tracestate` is left out.
    """
    found = None if traceparent is None or len(traceparent) > MAX_STATE else _PARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    parent = b"-".join((b"00", trace_id, span_id, b"01" if int(flags, 16) & 1 else b"00")).decode()
    return TraceContext(parent, _state_of(tracestate or b""))


def _state_of(given: bytes) -> str:
    if len(given) > MAX_STATE or not given.isascii():
        return ""
    members = [member.strip(" \t") for member in given.decode().split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    if len(members) > _MOST_MEMBERS or len(keys) < len(members) or not all(map(_MEMBER.fullmatch, members)):
        return ""
    return ",".join(members)


class Span(Protocol):
    """A span that has begun."""

    @property
    def trace(self) -> TraceContext:
        """Its place, for whoever is asked to do a part of it."""

    @property
    def ended(self) -> bool:
        """Whether it is over."""

    def rename(self, name: str) -> None:
        """Give it another name: what a request asks for is known late."""

    def set(self, **facts: Value | None) -> None:
        """Add facts. Those that are None are left out; texts are cut. The caller has removed secrets."""

    def child(self, name: str, facts: Mapping[str, Value | None]) -> Span:
        """Begin a part of it."""

    def record(self, name: str, began: float, ended: float, facts: Mapping[str, Value | None]) -> None:
        """Add a part that is over, by the times (seconds since 1970). It may outlive this span."""

    def end(self, error: BaseException | None = None) -> None:
        """End it."""


class Tracing(Protocol):
    """Begins traces and sends them. `otel.OpenTelemetry` has and explains them."""

    def request(self, name: str, trace: TraceContext | None, facts: Mapping[str, Value | None]) -> Span:
        """Begin the span of a request, in the trace that its caller names or in a new one."""

    def connection(self, sandbox: str, began: float, ended: float, facts: Mapping[str, Value | None]) -> None:
        """Record an outbound connection of a sandbox."""

    async def close(self) -> None:
        """Send what is left, and end."""


current: ContextVar[Span | None] = ContextVar("carrel_span", default=None)
"""The span that this task works for."""


class SpanBlock:
    """A block of code as a span. Without a current span it does nothing."""

    __slots__ = ("_facts", "_name", "_outer", "_span")

    def __init__(self, name: str, outer: Span, facts: Mapping[str, Value | None]):
        self._name = name
        self._outer = outer
        self._facts = facts

    def __enter__(self) -> Span:
        self._span = self._outer.child(self._name, self._facts)
        current.set(self._span)
        return self._span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        current.set(self._outer)
        self._span.end(error)


class _Nothing:
    """A step of no trace."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()


def span(name: str, **facts: Value | None) -> AbstractContextManager[Span | None]:
    """Return a block that is a part of the current span; if there is none, or it is over, a block that does nothing."""
    outer = current.get()
    return _NOTHING if outer is None or outer.ended else SpanBlock(name, outer, facts)


def trace_now(given: TraceContext | None) -> TraceContext | None:
    """Return what to pass on to whoever does a part of this task: the current span, or what the caller gave."""
    now = current.get()
    return given if now is None else now.trace
