"""What traces cost a command: a server without them, the same with a trace that its caller names, and a server that
sends all to a collector.

The collector is a thread that throws everything away. No peer does the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench import ground
from bench.measure import Progress, Report, Table, median, ratio, rounds, timed
from bench.wire import SUCCESS, Wire
from carrel.client import Client
from carrel.tracing import span

ROUNDS = 500
STEPS = 100_000
OFF, NAMED, ON = "no traces", "no traces, the caller names one", "traces to a collector"


class _Drop(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Take a batch."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def _collector() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Drop)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def run(progress: Progress) -> Report:
    """Measure."""
    with _collector() as url:
        settings = {"CARREL_TRACING_ENABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": url}
        async with ground.server() as off, ground.server(settings) as on:
            with Client(off.url, off.token) as one, Client(on.url, on.token) as other:
                wires = Wire(off.address), Wire(off.address), Wire(on.address)
                plain = off.run_true(one.sandbox("bench-traces").id)
                traced = on.run_true(other.sandbox("bench-traces").id)
                trace = f"traceparent: 00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01\r\n".encode()
                named = plain.replace(b"\r\n", b"\r\n" + trace, 1)
                try:
                    samples = await rounds(
                        {
                            OFF: timed(lambda: wires[0].call(plain), lambda body: SUCCESS in body),
                            NAMED: timed(lambda: wires[1].call(named), lambda body: SUCCESS in body),
                            ON: timed(lambda: wires[2].call(traced), lambda body: SUCCESS in body),
                        },
                        ROUNDS,
                        warm_up=30,
                        progress=progress,
                    )
                finally:
                    for wire in wires:
                        wire.close()
    step_us = _step() * 1e6
    table = Table(f"`true` through the API, {ROUNDS} rounds", ("", "median ms", "× without"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, ratio(taken, samples[OFF]))
    table.add("a step without a trace, µs", step_us, "")
    figures = {
        "trace_off_ms": median(samples[OFF]) * 1e3,
        "trace_named_vs_off": ratio(samples[NAMED], samples[OFF]),
        "trace_on_vs_off": ratio(samples[ON], samples[OFF]),
        "trace_step_off_us": step_us,
    }
    return Report(figures, [table])


def _step() -> float:
    """Return how long a step takes when there is no trace."""
    began = time.perf_counter()
    for _ in range(STEPS):
        with span("step", kind="shell"):
            pass
    return (time.perf_counter() - began) / STEPS
