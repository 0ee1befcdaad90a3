"""A client against peers that answer raw bytes: what the wire can do, and the errors it becomes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.client import AsyncClient, Client
from carrel.client._sync.connection import Connection, _target, encoded, problem_of
from carrel.client.locate import Address
from carrel.errors import (
    BY_CODE,
    CarrelError,
    InvalidRequest,
    NotFound,
    PlatformError,
    ServerUnreachable,
    Unauthorized,
)
from carrel.models import HostReport

REPORT = b'{"kernel":"k","user":"u","checks":[],"providers":[]}'
Used = Callable[[Client], object]


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status.encode(), len(body), body)


def against(answers: list[bytes], use: Used, timeout: float = 5) -> list[bytes]:
    """Use a client against a peer that gives each connection one raw answer; an empty one is a hang-up."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for each in answers:
                try:
                    peer, _ = listener.accept()
                except OSError:  # nobody comes any more
                    return
                with peer:
                    heard.append(peer.recv(65536))
                    peer.sendall(each)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "t", timeout=timeout) as client:
                use(client)
        finally:  # a thread left in `accept` would go on with whatever gets the listener's number next
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    return heard


def test_the_token_is_sent() -> None:
    heard = against([answer(REPORT)], lambda client: client.host())
    assert b"authorization: Bearer t\r\n" in heard[0].replace(b"Authorization", b"authorization")


def test_something_that_is_not_carrel_is_a_platform_error() -> None:
    for page in (b"<html></html>", b"{}", b"[]", b"", b"\xff"):
        with pytest.raises(PlatformError, match="not a HostReport"):
            against([answer(page)], lambda client: client.host())


def test_a_get_on_a_connection_that_the_server_dropped_is_sent_again_and_a_post_is_not() -> None:
    assert len(against([b"", answer(REPORT)], lambda client: client.host())) == 2
    with pytest.raises(ServerUnreachable):
        against([b""], lambda client: client.sandbox())


def test_an_answer_cut_short_is_no_answer() -> None:
    cut = answer(REPORT).replace(b"content-length: ", b"content-length: 1")
    with pytest.raises(ServerUnreachable, match="broke"):
        against([cut, cut], lambda client: client.host())


def test_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, "t", timeout=0.2) as client, pytest.raises(ServerUnreachable, match="in time"):
            client.host()


def test_problems_become_their_errors() -> None:
    body = json.dumps(NotFound("no such thing", field="id", hint="look").problem()).encode()
    with pytest.raises(NotFound) as caught:
        against([answer(body, "404 Not Found")], lambda client: client.host())
    assert (caught.value.field, caught.value.hint) == ("id", "look")
    with pytest.raises(PlatformError, match="502"):
        against([answer(b"<html>Bad Gateway", "502 Bad Gateway")], lambda client: client.host())


@given(st.integers(300, 599), st.binary(max_size=40) | st.sampled_from([b'{"code": []}', b'{"code": "self"}']))
def test_any_refusal_is_an_error_of_the_tree(status: int, body: bytes) -> None:
    assert type(problem_of(status, body)) in BY_CODE.values()


@given(st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=5) | st.integers(), max_size=5))
def test_bodies_leave_out_what_was_not_given(body: dict[str, object]) -> None:
    assert json.loads(encoded(body)) == {key: value for key, value in body.items() if value is not None}


def test_a_body_that_is_no_json() -> None:
    with pytest.raises(InvalidRequest):
        encoded({"a": object()})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest):
        encoded({"a": loop})


@given(st.binary(min_size=1, max_size=20))
def test_names_travel_as_their_bytes(name: bytes) -> None:
    target = _target("/files", {"path": name.decode("utf-8", "surrogateescape"), "limit": None})
    assert unquote_to_bytes(target.partition("path=")[2]) == name
    assert _target("/files", {"limit": None}) == _target("/files", None) == "/files"


def test_patience() -> None:
    connection = Connection(Address("http://127.0.0.1:1", "t"), 5)
    try:
        assert connection.patience(None)["read"] is None
        assert connection.patience(60)["read"] == 90
        assert connection.patience(60)["connect"] == 5
    finally:
        connection.close()


async def test_the_same_when_awaited(address: str) -> None:
    async with AsyncClient(address, "carrel_wrong") as client:
        with pytest.raises(Unauthorized):
            await client._connection.get(HostReport, "/v1/host")
    async with AsyncClient("http://127.0.0.1:9", "t") as client:
        with pytest.raises(CarrelError, match="carrel serve"):
            await client.host()
