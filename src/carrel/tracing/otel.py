"""Sends traces to an OpenTelemetry collector. The only module that imports OpenTelemetry, and only with the setting.

Where they go and how many are kept say the variables of OpenTelemetry (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_TRACES_SAMPLER`, …). A collector that is away delays nobody: at most some thousand spans wait, further ones are
dropped. Attributes are few, short and without secrets; an error is shown by its code.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from carrel.errors import InvalidRequest
from carrel.extras import using
from carrel.metrics import outcome_of
from carrel.primitives.cache import Cache
from carrel.tracing import Span, TraceContext, Value

with using("otel"):
    from opentelemetry import trace as api
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

MAX_TEXT = 256
MAX_COMMAND = 1000
COMMAND = "command"
"""The fact that is left out unless the operator wants it."""
CLOSE_S = 5.0
_NAMES = {"method": "http.request.method", "route": "http.route", "status": "http.response.status_code"}
_MOST_SANDBOXES, _MOST_OPERATIONS = 4096, 8
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_W3C = TraceContextTextMapPropagator()

log = logging.getLogger("carrel.tracing")


@dataclass(slots=True)
class _Work:
    """A command in the foreground that runs or ran in a sandbox: the place of its span, and its times."""

    place: Context
    began: float
    until: float = math.inf


class OpenTelemetry:
    """The traces of one server."""

    def __init__(self, node: str, version: str, *, commands: bool):
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", _PROTOCOL):
            if (asked := os.environ.get(name)) not in {None, "", "http/protobuf"}:
                raise InvalidRequest(
                    f"traces cannot be sent by '{asked}'", field=name, hint="use http/protobuf, or leave it out"
                )
        own = {SERVICE_VERSION: version, SERVICE_INSTANCE_ID: node}
        if not os.environ.get("OTEL_SERVICE_NAME") and SERVICE_NAME not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            own[SERVICE_NAME] = "carrel"
        self.provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter()
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("carrel", version)
        self.commands = commands
        self._work: Cache[str, deque[_Work]] = Cache(_MOST_SANDBOXES)

    def request(self, name: str, trace: TraceContext | None, facts: Mapping[str, Value | None]) -> Span:
        """See `Tracing`."""
        carrier = {} if trace is None else {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        parent = _W3C.extract(carrier)
        return _OtelSpan(self, self.tracer.start_span(name, parent, kind=api.SpanKind.SERVER), facts)

    def connection(self, sandbox: str, began: float, ended: float, facts: Mapping[str, Value | None]) -> None:
        """See `Tracing`. It is a part of the command that ran in the sandbox when it began, if only one did."""
        work = [each for each in self._work.get(sandbox) or () if each.began <= began <= each.until]
        parent = work[0].place if len(work) == 1 else None
        self.over("connection", parent, began, ended, {"sandbox": sandbox, **facts}, api.SpanKind.CLIENT)

    def over(
        self,
        name: str,
        parent: Context | None,
        began: float,
        ended: float,
        facts: Mapping[str, Value | None],
        kind: api.SpanKind = api.SpanKind.INTERNAL,
    ) -> None:
        """Record a span that is over."""
        start = int(min(began, ended) * 1e9)
        found = self.tracer.start_span(name, parent or Context(), kind=kind, start_time=start)
        found.set_attributes(self.shown(facts))
        if facts.get("outcome", "ok") != "ok":
            found.set_status(api.StatusCode.ERROR)
        found.end(int(ended * 1e9))

    def works(self, sandbox: str, inner: api.Span) -> _Work:
        """Remember a command, for the connections that it may open. Not its span, which may be large."""
        known = self._work.get(sandbox)
        if known is None:
            self._work.put(sandbox, known := deque(maxlen=_MOST_OPERATIONS))
        place = api.set_span_in_context(api.NonRecordingSpan(inner.get_span_context()))
        known.append(work := _Work(place, time.time()))
        return work

    def shown(self, facts: Mapping[str, Value | None]) -> dict[str, Value]:
        """Return facts as attributes."""
        found: dict[str, Value] = {}
        for name, value in facts.items():
            if value is None or (name == COMMAND and not self.commands):
                continue
            most = MAX_COMMAND if name == COMMAND else MAX_TEXT
            found[_NAMES.get(name, f"carrel.{name}")] = value[:most] if isinstance(value, str) else value
        return found

    async def close(self) -> None:
        """See `Tracing`. A collector that does not answer is waited for only briefly."""

        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            self.provider.shutdown()  # sends what waits
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        # The end of the process does not wait for this thread: an export may hang.
        threading.Thread(target=run, name="carrel-traces", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await done.wait()
        except TimeoutError:
            log.warning("the last traces could not be sent")
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _OtelSpan:
    """See `Span`."""

    __slots__ = ("_ended", "_traces", "_work", "inner")

    def __init__(self, traces: OpenTelemetry, inner: api.Span, facts: Mapping[str, Value | None]):
        self._traces = traces
        self.inner = inner
        self._ended = False
        self._work: _Work | None = None
        if facts.get("kind") == "shell" and isinstance(sandbox := facts.get("sandbox"), str):
            self._work = traces.works(sandbox, inner)
        if inner.is_recording():
            inner.set_attributes(traces.shown(facts))

    @property
    def trace(self) -> TraceContext:
        """See `Span`."""
        context = self.inner.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
        return TraceContext(parent, context.trace_state.to_header())

    @property
    def ended(self) -> bool:
        """See `Span`."""
        return self._ended

    def set(self, **facts: Value | None) -> None:
        """See `Span`."""
        if self.inner.is_recording():
            self.inner.set_attributes(self._traces.shown(facts))

    def rename(self, name: str) -> None:
        """See `Span`."""
        self.inner.update_name(name)

    def child(self, name: str, facts: Mapping[str, Value | None]) -> Span:
        """See `Span`."""
        inner = self._traces.tracer.start_span(name, api.set_span_in_context(self.inner))
        return _OtelSpan(self._traces, inner, facts)

    def record(self, name: str, began: float, ended: float, facts: Mapping[str, Value | None]) -> None:
        """See `Span`."""
        self._traces.over(name, api.set_span_in_context(self.inner), began, ended, facts)

    def end(self, error: BaseException | None = None) -> None:
        """See `Span`."""
        if error is not None and self.inner.is_recording():
            self.inner.set_attribute("error.type", outcome_of(error))
            self.inner.set_status(api.StatusCode.ERROR)
        self._ended = True
        if self._work is not None:
            self._work.until = time.time()
        self.inner.end()
