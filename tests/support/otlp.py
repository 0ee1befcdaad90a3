"""A receiver of traces for tests: OTLP over HTTP, with real protobuf, on a loopback port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Seen:
    """A span that arrived."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    state: str
    began: float
    ended: float
    failed: bool
    facts: dict[str, Any]
    service: dict[str, Any]


def _facts(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in attributes}


class Collector:
    """Receives traces from its making until `close`."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.raw = b""
        """Everything that arrived."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def settings(self) -> dict[str, str]:
        """The variables of a server that sends its traces here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "CARREL_TRACING_ENABLED": "true",
            "CARREL_EGRESS_ASK_WAIT_S": "1",  # nobody answers
        }

    def take(self, body: bytes) -> None:
        self.raw += body
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    seen = Seen(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.trace_state,
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        span.status.code == 2,
                        _facts(span.attributes),
                        _facts(resource.resource.attributes),
                    )
                    self.spans.append(seen)

    def trace(self, trace_id: str, *names: str) -> dict[str, Seen]:
        """Wait until a trace has spans of these names; return its spans by name."""

        def found() -> dict[str, Seen] | None:
            spans = {each.name: each for each in [*self.spans] if each.trace_id == trace_id}
            return spans if set(names) <= set(spans) else None

        return self.until(found, f"the spans {names}")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}; there are {sorted({each.name for each in self.spans})}"
            time.sleep(0.02)
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
