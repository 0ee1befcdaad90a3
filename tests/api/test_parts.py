from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from carrel.api.parts import ClosingStream, as_json, event_stream, raw_query, wants_sse
from carrel.control.supervisor.frames import StreamChunk
from carrel.errors import NotRunning
from carrel.models import FileInfo


def request(query: bytes = b"", accept: str = "*/*") -> Request:
    return Request({"type": "http", "query_string": query, "headers": [(b"accept", accept.encode())]})


@given(st.binary(min_size=1, max_size=20))
def test_any_bytes_of_a_query_come_back(name: bytes) -> None:
    query = b"a=1&path=" + b"".join(b"%%%02x" % byte for byte in name)
    text = raw_query(request(query), "path")
    assert text is not None
    assert text.encode("utf-8", "surrogateescape") == name
    assert raw_query(request(query), "other") is None


def test_names_that_are_not_utf8_are_answered() -> None:
    info = FileInfo(path="\udcff", kind="file", size=0, mode="644", modified_at="2026-01-01T00:00:00Z")
    assert json.loads(bytes(as_json(info, 201).body))["path"] == "\udcff"


def test_events_are_for_those_who_ask() -> None:
    assert wants_sse(request(accept="text/html, text/event-stream;q=0.9"))
    assert not wants_sse(request())


class Chunks:
    """A stream of output that knows whether it was closed."""

    def __init__(self, *chunks: StreamChunk):
        self._chunks = iter(chunks)
        self.closed = False

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        return self

    async def __anext__(self) -> StreamChunk:
        for chunk in self._chunks:
            return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize("kind", ["application/x-ndjson", "text/event-stream"])
async def test_a_stream_of_events(kind: str) -> None:
    parts = [b"a\xc3", b"\xa9", b"\xff"]
    chunks = Chunks(
        StreamChunk("open", b""), *(StreamChunk("stdout", part) for part in parts), StreamChunk("end", b'{"id": "c"}')
    )
    app = FastAPI()

    @app.get("/")
    async def output(request: Request) -> object:
        return await event_stream(request, chunks, offset=10, headers={"x-kept": "1"})

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers={"accept": kind}) as client:
        answer = await client.get("/")
    assert answer.headers["content-type"].startswith(kind)
    assert (answer.headers["x-kept"], answer.headers["cache-control"]) == ("1", "no-store")
    cut = "\n\n" if kind == "text/event-stream" else "\n"
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split(cut) if line]
    assert "".join(event.get("text", "") for event in events) == "aé"
    assert events[-2]["base64"] == "/w=="
    assert events[-1] == {"stream": "end", "offset": 14, "result": {"id": "c"}}
    assert chunks.closed


async def test_a_stream_that_cannot_be_opened_still_has_a_status() -> None:
    async def broken() -> AsyncIterator[StreamChunk]:
        raise NotRunning("it has ended")
        yield StreamChunk("open", b"")

    with pytest.raises(NotRunning):
        await event_stream(request(), broken())


async def test_a_stream_whose_caller_goes_away_tidies_up() -> None:
    sent, tidied = asyncio.Event(), []

    async def lines() -> AsyncIterator[bytes]:
        try:
            yield b"first"
            sent.set()
            await asyncio.Event().wait()
        finally:
            for turn in range(5):
                await asyncio.sleep(0)
                tidied.append(turn)

    async def receive() -> dict[str, str]:
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        return

    await ClosingStream(lines())({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert tidied == list(range(5))


async def test_a_stream_that_breaks_says_why() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b"first"
        raise NotRunning("it has ended")

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_message: object) -> None:
        return

    with pytest.raises(NotRunning):
        await ClosingStream(lines())({"type": "http"}, receive, send)
