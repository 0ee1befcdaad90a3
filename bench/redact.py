"""The speed of redaction: 100 known values, chunks of 64 KiB, and one secret in about every megabyte.

Measured in this process, on one core. Logs are the usual case. The other texts cost more: escapes, which must be
decoded before the comparison, and base64. There is no peer.
"""

from __future__ import annotations

import base64
import json
import random
import time

from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, rounds
from carrel.redaction import Redactor, StreamRedactor

ROUNDS = 15
SIZE = 8 << 20
CHUNK = 64 << 10
SECRETS = 100


async def run(progress: Progress) -> Report:
    """Measure."""
    draw = random.Random(20)
    values = {f"SECRET_{number}": base64.b64encode(draw.randbytes(30)) for number in range(SECRETS)}
    redactor = Redactor(values)
    plain = _logs(draw, SIZE)
    contenders: dict[str, Contender] = {
        "logs": _turn(redactor, _salted(draw, plain, list(values.values()))),
        "logs, no secret in them": _turn(redactor, plain),
        "logs, no secret known": _turn(Redactor(), plain),
        "logs in JSON in JSON": _turn(
            redactor, json.dumps(json.dumps(_logs(draw, SIZE).decode().split("\n"))).encode()
        ),
        "base64": _turn(redactor, base64.encodebytes(draw.randbytes(SIZE * 3 // 4))),
    }
    samples = await rounds(contenders, ROUNDS, warm_up=1, progress=progress)
    began = time.perf_counter()
    Redactor(values)
    built = (time.perf_counter() - began) * 1e3
    table = Table(f"redaction, {SECRETS} secrets, {CHUNK >> 10} KiB chunks, {ROUNDS} rounds", ("", "MB/s", "slowest"))
    for name, speeds in samples.items():
        table.add(name, median(speeds), min(speeds))
    table.add("made ready, ms", built, None)
    return Report(
        {
            "redact_mb_per_s": median(samples["logs"]),
            "redact_escaped_mb_per_s": median(samples["logs in JSON in JSON"]),
            "redact_ready_ms": built,
        },
        [table],
    )


def _logs(draw: random.Random, size: int) -> bytes:
    lines = [
        b"2026-11-15T12:33:08.%03dZ INFO  app.worker[%d] GET /api/v1/items/%d?page=2 200 in %d.3ms trace=%s\n"
        b"2026-11-15T12:33:08.%03dZ DEBUG app.store: SELECT id, name FROM items WHERE owner = $1 -- %d rows\n"
        % (
            draw.randrange(1000),
            draw.randrange(100_000),
            draw.randrange(10**7),
            draw.randrange(900),
            draw.randbytes(16).hex().encode(),
            draw.randrange(1000),
            draw.randrange(5000),
        )
        for _ in range(20_000)
    ]
    text = b"".join(lines)
    return (text * (size // len(text) + 1))[:size]


def _salted(draw: random.Random, text: bytes, values: list[bytes]) -> bytes:
    parts = [
        text[at : at + (1 << 20)] + b"login with " + draw.choice(values) + b"\n" for at in range(0, len(text), 1 << 20)
    ]
    return b"".join(parts)


def _turn(redactor: Redactor, text: bytes) -> Contender:
    chunks = [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]
    expected = len(redactor.data(text))

    async def turn() -> float:
        began = time.perf_counter()
        given = _through(redactor.stream(), chunks)
        took = time.perf_counter() - began
        if given != expected:
            raise BenchFailed(f"{given} bytes came out instead of {expected}")
        return len(text) / took / 1e6

    return turn


def _through(stream: StreamRedactor, chunks: list[bytes]) -> int:
    return sum(len(stream.feed(chunk)) for chunk in chunks) + len(stream.finish())
