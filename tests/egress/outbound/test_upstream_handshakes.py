"""What is said to a proxy, against scripted ones; real proxies are in test_upstreams.py."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Sequence
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import AccessRefused
from carrel.egress.outbound.upstreams import (
    Failed,
    ProxyAddress,
    Unreached,
    connect_by_http,
    connect_by_socks,
    greet_by_http,
    read_proxy_address,
)
from carrel.egress.plan import Upstream
from carrel.errors import InvalidRequest

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=40)


def proxy(url: str) -> ProxyAddress:
    return read_proxy_address(Upstream("u", url))


async def with_proxy(connect: object, url: str, said: Sequence[bytes], host: str = "a.test") -> tuple[bytes, bytes]:
    """What the proxy heard, and what of `said` is left to be read by the target's peer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()

    async def answer() -> None:
        for piece in said:
            await loop.sock_sendall(theirs, piece)
            for _ in range(3):
                await asyncio.sleep(0)

    with ours, theirs:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(answer())
            await connect(ours, proxy(url), host, 443)  # type: ignore[operator]
        rest = b""
        try:
            rest = ours.recv(65536)
        except BlockingIOError:
            pass
        return theirs.recv(65536), rest


@given(user=PRINTABLE, password=PRINTABLE)
def test_credentials_are_what_was_written_with_escapes(user: str, password: str) -> None:
    url = f"{quote(user, safe='')}:{quote(password, safe='')}@proxy.test:3128"
    if ":" not in user:
        found = proxy(f"http://{url}")
        assert base64.b64decode(found.authorization.removeprefix("Basic ")) == f"{user}:{password}".encode()
    found = proxy(f"socks5://{url}/")
    assert (found.user, found.password, found.host, found.port) == (user, password, "proxy.test", 3128)
    assert password not in repr(found) or password in repr(proxy("socks5://proxy.test:3128"))


@given(st.text(max_size=60) | st.text("htpsock5:/@[]%0123abc.?#", max_size=40).map("http://".__add__))
def test_any_text_is_read_or_refused(url: str) -> None:
    try:
        assert proxy(url).port
    except InvalidRequest as error:
        assert error.field == "upstreams"


@pytest.mark.parametrize(
    "url",
    [
        "https://very-secret@h:1",
        "http://u:very-secret@h",
        "http://u:very-secret@h:0",
        "http://u:very-secret@h:70000",
        "http://u:very-secret@:3128",
        "http://u:very-secret@h:1/path",
        "http://u:very-secret@h:1?q=1",
        "http://u:very-secret%0d%0aX@h:1",
        "http://a%3ab:very-secret@h:1",
        "http://u:very-secret%ff@h:1",
        "socks5://very-secret@h:1",
        "socks5://very-secret:" + "x" * 256 + "@h:1",
        "socks4://very-secret@h:1",
        "very-secret",
        "http://[very-secret:1",
    ],
)
def test_what_is_wrong_with_a_url_is_said_without_it(url: str) -> None:
    with pytest.raises(InvalidRequest, match="the upstream 'u'") as raised:
        proxy(url)
    assert "very-secret" not in str(raised.value.problem())
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


HEAD = b"HTTP/1.1 200 Connection established\r\nX: y\r\n\r\n"


@given(cuts=st.lists(st.integers(0, len(HEAD) + 5), max_size=8).map(sorted), interim=st.booleans())
def test_not_a_byte_of_the_target_is_taken(cuts: list[int], interim: bool) -> None:
    data = (b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"") + HEAD + b"hello"
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    heard, rest = asyncio.run(with_proxy(connect_by_http, "http://u:p@h:1", pieces))
    assert rest == b"hello"
    assert heard == (b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\nProxy-Authorization: Basic dTpw\r\n\r\n")


async def test_without_credentials_none_are_sent() -> None:
    heard, _ = await with_proxy(connect_by_http, "http://h:1", [HEAD], host="2001:db8::1")
    assert heard == b"CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\r\n"
    heard, _ = await with_proxy(connect_by_socks, "socks5://h:1", [b"\5\0", b"\5\0\0\1" + bytes(6)])
    assert heard == b"\5\1\0" + b"\5\1\0\3\6a.test\1\xbb"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", AccessRefused),
        (b"HTTP/1.1 407 Nope\r\n\r\n", AccessRefused),
        (b"HTTP/1.1 302 Elsewhere\r\nLocation: http://x/\r\n\r\n", AccessRefused),
        (b"HTTP/1.1 499 Odd\r\n\r\n", AccessRefused),
        (b"HTTP/1.1 799 Odd\r\n\r\n", Failed),
        (b"HTTP/1.1 502 Bad\r\n\r\n", Unreached),
        (b"HTTP/1.0 504 Late\r\n\r\n", Unreached),
        (b"HTTP/9 200\r\n\r\n", Failed),
        (b"HTTP/1.1 101 Switching\r\n\r\n", Failed),
        (b"HTTP/1.1 200 ok\r\nX: " + b"x" * 70_000, Failed),
    ],
)
async def test_what_an_http_proxy_may_say(answer: bytes, kind: type[Exception]) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await with_proxy(connect_by_http, "http://u:very-secret@h:1", [answer])
    (error,) = raised.value.exceptions
    assert isinstance(error, kind)
    assert "very-secret" not in repr(error) + str(error)
    if isinstance(error, AccessRefused):
        assert error.status == 502


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"\4\0", Failed),
        (b"\5\xff", AccessRefused),
        (b"\5\1", AccessRefused),
        (b"\5\2\1\1", AccessRefused),
        (b"\5\2\1\0\5\2\0\1" + bytes(6), AccessRefused),
        (b"\5\2\1\0\5\7\0\1" + bytes(6), AccessRefused),
        (b"\5\0\5\4\0\4" + bytes(18), Unreached),
        (b"\5\0\5\0\0\2" + bytes(18), Failed),
        (b"\5\0\4\0\0\1" + bytes(18), Failed),
    ],
)
async def test_what_a_socks_proxy_may_say(answer: bytes, kind: type[Exception]) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await with_proxy(connect_by_socks, "socks5://u:very-secret@h:1", [answer])
    (error,) = raised.value.exceptions
    assert isinstance(error, kind)
    assert "very-secret" not in repr(error) + str(error)


async def test_any_answer_to_a_greeting_will_do() -> None:
    async def greet(connection: socket.socket, found: ProxyAddress, _host: str, _port: int) -> None:
        await greet_by_http(connection, found)

    heard, _ = await with_proxy(greet, "http://u:very-secret@h:1", [b"HTTP/1.1 407 Say who\r\n\r\n"])
    assert heard == b"OPTIONS * HTTP/1.1\r\nHost: h:1\r\n\r\n"
