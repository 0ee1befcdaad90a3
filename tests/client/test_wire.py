"""Requests and answers, against sockets that answer what a test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.support.ports import nobody

from carrel.client._async.wire import AsyncWire
from carrel.client._sync.wire import FAILED, LATE, LOST, NOT_REACHED, Patience, Wire

PATIENCE: Patience = {"connect": 5.0, "read": 5.0, "write": 5.0, "pool": 5.0}
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-One: a\r\n\r\nhi"


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that takes one connection for each answer, and keeps what was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    got = b""
                    while not _whole(got):
                        more = connection.recv(65536)
                        if not more:
                            break
                        got += more
                    asked.append(got)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        except BaseException:  # nobody comes any more: a thread must not be left in `accept` of a number that is free
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            thread.join()


def _whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return False
    if b"transfer-encoding" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    return len(body) >= int(length or 0)


def test_a_request_and_its_answer() -> None:
    with answering(OK) as (url, asked):
        wire = Wire(url + "/below", {"user-agent": "t"}, local=True)
        reply = wire.send("POST", "/x?path=a%20b", {"one": "1"}, b"body", PATIENCE)
        assert (reply.status, reply.read(), reply.headers["x-one"]) == (200, b"hi", "a")
        wire.close()
    head = asked[0].lower()
    assert head.startswith(b"post /below/x?path=a%20b http/1.1\r\nhost: 127.0.0.1:")
    assert b"user-agent: t\r\none: 1\r\ncontent-length: 4\r\n\r\nbody" in head


@pytest.mark.parametrize(
    ("method", "content", "wanted"),
    [
        ("GET", None, b"\r\n\r\n"),
        ("DELETE", None, b"content-length: 0\r\n\r\n"),
        ("PUT", [b"ab", b"c"], b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"),
    ],
)
def test_how_a_body_is_told(method: str, content: list[bytes] | None, wanted: bytes) -> None:
    with answering(OK) as (url, asked):
        wire = Wire(url, {}, local=True)
        wire.send(method, "/", {}, content, PATIENCE).read()
        wire.close()
    assert asked[0].lower().endswith(wanted)
    assert (content is None and method == "GET") == (b"content-length" not in asked[0] and b"chunked" not in asked[0])


def test_what_cannot_stand_in_a_target_is_encoded() -> None:
    with answering(OK) as (url, asked):
        wire = Wire(url, {}, local=True)
        wire.send("GET", "/ü x\r\nevil: 1", {}, None, PATIENCE).read()
        wire.close()
    assert asked[0].startswith(b"GET /%C3%BC%20x%0D%0Aevil:%201 HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"], ids=["none", "odd", "cut"]
)
def test_a_connection_that_breaks(answer: bytes) -> None:
    with answering(answer) as (url, _):
        wire = Wire(url, {}, local=True)
        with pytest.raises(LOST):
            wire.send("GET", "/", {}, None, PATIENCE).read()
        wire.close()


def test_nobody_there_and_nobody_answering() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        wire = Wire(url, {}, local=True)
        with pytest.raises(LATE):
            wire.send("GET", "/", {}, None, {**PATIENCE, "read": 0.1})
        wire.close()
    with nobody() as port, pytest.raises(NOT_REACHED):
        wire = Wire(f"http://127.0.0.1:{port}", {}, local=True)
        wire.send("GET", "/", {}, None, PATIENCE)
    assert all(issubclass(each, FAILED) for each in (*LOST, *LATE, *NOT_REACHED))
    wire.close()


def test_a_server_elsewhere_is_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(OK) as (url, asked):
        monkeypatch.setenv("http_proxy", url.replace("http://", "http://me:secret@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        wire = Wire("http://carrel.example:7070", {}, local=False)
        assert wire.send("GET", "/x", {}, None, PATIENCE).read() == b"hi"
        wire.close()
    assert asked[0].startswith(b"GET http://carrel.example:7070/x HTTP/1.1\r\n")
    assert b"Basic bWU6c2VjcmV0" in asked[0]


async def test_the_same_when_awaited() -> None:
    with answering(OK, OK) as (url, _):
        wire = AsyncWire(url, {}, local=True)
        reply = await wire.send("GET", "/", {}, None, PATIENCE)
        assert b"".join([piece async for piece in reply.aiter_raw()]) == b"hi"
        await reply.aclose()
        await wire.close()
        wire = AsyncWire(url, {}, local=True)
        assert await (await wire.send("POST", "/", {}, b"", PATIENCE)).aread() == b"hi"
        await wire.close()
