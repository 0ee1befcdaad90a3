from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.control.supervisor import connection as module
from carrel.control.supervisor.connection import SupervisorConnection, problem_from
from carrel.errors import AlreadyExists, CarrelError, FileMissing, PlatformError, SandboxLost
from carrel.providers.links import LocalLink

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


@asynccontextmanager
async def supervisor(data_dir: str, answer: Answer) -> AsyncIterator[tuple[SupervisorConnection, list[int]]]:
    path = os.path.join(data_dir, "s")
    opened: list[int] = []
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(1)
        tasks.add(asyncio.current_task())
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    client = SupervisorConnection(LocalLink(path))
    try:
        yield client, opened
    finally:
        client.close()
        server.close()
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*[task for task in tasks if task], return_exceptions=True)
        os.unlink(path)


def saying(data: bytes, *, close: bool = False) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_head(reader)
            writer.write(data)
            await writer.drain()
            if close:
                return

    return answer


def http(body: bytes, status: int = 200, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (status, head, len(body)) + body


async def test_connections_are_kept(data_dir: str) -> None:
    async with supervisor(data_dir, saying(http(b'{"a":1}'))) as (client, opened):
        for _ in range(20):
            assert await client.request_json("GET", "/x") == {"a": 1}
        assert len(opened) == 1
        await asyncio.gather(*[client.request_json("GET", "/x") for _ in range(5)])
        assert 1 < len(opened) <= 5


async def test_problem_answers_become_errors(data_dir: str) -> None:
    body = json.dumps({"code": "file_not_found", "detail": "no", "field": "path"}).encode()
    async with supervisor(data_dir, saying(http(body, 404))) as (client, opened):
        for _ in range(3):
            with pytest.raises(FileMissing) as caught:
                await client.request_json("GET", "/x")
            assert caught.value.field == "path"
            with pytest.raises(FileMissing):
                await client.download("/x")
        assert len(opened) == 1, "a problem answer does not cost the connection"


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
        http(b"[1]"),
        http(b"{"),
        http(b"[" * 100_000),
        http(b"x" * 2000),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"ff\r\n" + b"x" * 255 + b"\r\n" * 9,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"t: " + b"x" * 100_000,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        http(b"{}") + http(b"{}"),
        http(b"{}", 302),
        http(b"not json", 500),
        http(b'{"code":5}', 404),
        http(b'{"code":"unauthorized"}', 401),
        http(b'{"code":"denied_by_policy","rule":"x"}', 403),
        b"",
    ],
)
async def test_nonsense_is_a_lost_sandbox(data_dir: str, answer: bytes) -> None:
    async with supervisor(data_dir, saying(answer, close=True)) as (client, _):
        with pytest.raises(SandboxLost):
            await client.request_json("GET", "/x", max_bytes=1000)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_an_answer_or_an_error(data_dir: str, noise: bytes, framed: bool) -> None:
    async def attempt() -> None:
        data = http(noise) if framed else b"HTTP/1.1 200 OK\r\n" + noise
        async with supervisor(data_dir, saying(data, close=True)) as (client, _):
            try:
                assert isinstance(await client.request_json("GET", "/x", deadline=5), dict)
            except CarrelError:
                pass

    asyncio.run(attempt())


async def test_silence_ends_at_the_deadline(data_dir: str) -> None:
    async with supervisor(data_dir, saying(b"")) as (client, _):
        with pytest.raises(SandboxLost, match="in time"):
            await client.request_json("GET", "/x", deadline=0.05)


async def test_a_missing_socket_is_a_lost_sandbox(data_dir: str) -> None:
    with pytest.raises(SandboxLost):
        await SupervisorConnection(LocalLink(os.path.join(data_dir, "absent"))).request_json("GET", "/x")


async def test_closing_wakes_those_who_wait(data_dir: str) -> None:
    async with supervisor(data_dir, saying(b"")) as (client, opened):
        waiting = asyncio.ensure_future(client.request_json("GET", "/x"))
        while not opened:
            await asyncio.sleep(0)
        client.close()
        with pytest.raises(SandboxLost):
            await waiting
        with pytest.raises(SandboxLost):
            await client.request_json("GET", "/x")


async def test_a_cancelled_request_does_not_poison_the_next(data_dir: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await read_head(reader)
            if b"/slow" not in head:
                writer.write(http(b'{"fast":1}'))

    async with supervisor(data_dir, answer) as (client, opened):
        slow = asyncio.ensure_future(client.request_json("GET", "/slow"))
        while not opened:
            await asyncio.sleep(0)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert await client.request_json("GET", "/x") == {"fast": 1}


async def test_download_waits_for_a_slow_reader(data_dir: str) -> None:
    sent = 0
    total = 40 * 1024 * 1024

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async with supervisor(data_dir, answer) as (client, _):
        stream = await client.download("/x")
        assert stream.length == total
        got = 0
        parts = aiter(stream)
        got += len(await anext(parts))
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.05)
        assert sent < total / 4, "what is not read must not pile up"
        async for chunk in parts:
            got += len(chunk)
        assert got == total


async def test_download_that_breaks_off_is_an_error(data_dir: str) -> None:
    data = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    async with supervisor(data_dir, saying(data, close=True)) as (client, _):
        stream = await client.download("/x")
        with pytest.raises(SandboxLost):
            async for _ in stream:
                pass


async def test_upload_waits_and_arrives_whole(data_dir: str) -> None:
    received = 0
    go = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        await read_head(reader)
        await go.wait()
        while size := int(await reader.readline(), 16):
            received += len(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        writer.write(http(b'{"ok":true}'))

    taken = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(400):
            taken += 1
            yield b"y" * 65536

    async with supervisor(data_dir, answer) as (client, _):
        upload = asyncio.ensure_future(client.upload("PUT", "/x", chunks()))
        before = -1
        while before != taken or taken == 0:
            before = taken
            await asyncio.sleep(0.05)
        assert taken < 100, "a sandbox that does not read holds the sender back"
        go.set()
        assert await upload == {"ok": True}
        assert received == 400 * 65536


async def test_upload_refused_early(data_dir: str) -> None:
    body = json.dumps({"code": "file_not_found", "detail": "no"}).encode()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"z" * 10_000
            await asyncio.sleep(0)

    async with supervisor(data_dir, saying(http(body, 404))) as (client, _):
        with pytest.raises(FileMissing):
            await client.upload("PUT", "/x", endless())


def test_what_a_problem_brings_is_bounded() -> None:
    big = json.dumps({"code": "conflict", "detail": "d" * 9000, "extra": {"deep": []}, "n": 4}).encode()
    error = problem_from(409, big)
    assert len(error.detail) <= 4096
    assert error.extra == {"n": 4}
    assert isinstance(problem_from(500, b'{"code":"unheard_of"}'), PlatformError)


async def test_many_at_once_are_refused(data_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    async with supervisor(data_dir, saying(b"")) as (client, _):
        results = await asyncio.gather(
            *[client.request_json("GET", "/x", deadline=0.1) for _ in range(3)], return_exceptions=True
        )
        assert sorted(type(each).__name__ for each in results) == ["LimitExceeded", "SandboxLost", "SandboxLost"]


async def test_a_refusal_before_the_body_was_taken_is_seen(data_dir: str) -> None:
    body = json.dumps({"code": "already_exists", "detail": "no"}).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(http(body, 409))
        writer.close()  # with most of the body unread: the sender's next write fails

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"z" * 65536

    async with supervisor(data_dir, answer) as (client, _):
        for _ in range(10):
            with pytest.raises(AlreadyExists):
                await client.upload("PUT", "/x", chunks())
            with pytest.raises(AlreadyExists):
                await client.request("PUT", "/x", b"z" * 5_000_000)
