"""The gateway against real servers: what is allowed goes through, and nothing else reaches anybody."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from tests.support import loops
from tests.support.gateway_ground import NAMES, Echo, curl, greet, rules
from tests.support.wayout import CLOSED, OPEN, hello, plan, server, tls_for, wayout

from carrel.egress.access import Access, Target
from carrel.egress.listener import gateway as gateway_module

TLS, CERTIFICATE = tls_for("a.test", "b.test")


@pytest.fixture
def trust(tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    path.write_text(CERTIFICATE)
    return str(path)


# what people use


@loops.each
async def test_curl_by_every_protocol(trust: str) -> None:
    async with (
        server(greet) as port,
        server(greet, tls=TLS) as secure,
        wayout(plan(rules(port) + rules(secure)), NAMES) as out,
    ):
        socks = f"socks5h://127.0.0.1:{out.port}"
        for proxy in (out.url, socks):
            code, said = await curl("-x", proxy, f"http://a.test:{port}/", f"http://a.test:{port}/")
            assert (code, said) == (0, f"you are at a.test:{port}" * 2)
            code, said = await curl("-x", proxy, "--cacert", trust, f"https://a.test:{secure}/")
            assert (code, said) == (0, f"you are at a.test:{secure}")
        code, said = await curl("-p", "-x", out.url, f"http://a.test:{port}/", f"http://b.test:{port}/")
        assert (code, said) == (0, f"you are at a.test:{port}you are at b.test:{port}")
        done = await out.records.settled(8)
        assert {each.result for each in done} == {"ok"}
        assert [each.protocol for each in done[:3]] == ["http", "http", "connect"]
        others = ["socks5", "http", "socks5", "connect", "connect"]  # the second request in a tunnel is by itself
        assert sorted(each.protocol for each in done[3:]) == sorted(others)
        assert all(each.address == OPEN and each.sent > 0 and each.received > 0 for each in done)


@loops.the_fast_one
async def test_httpx_over_tls(trust: str) -> None:
    async with (
        server(greet, tls=TLS) as port,
        wayout(plan(rules(port)), NAMES) as out,
        httpx.AsyncClient(proxy=out.url, verify=ssl.create_default_context(cafile=trust)) as client,
    ):
        answers = await asyncio.gather(*(client.get(f"https://{name}.test:{port}/") for name in "abab"))
        assert {each.text for each in answers} == {f"you are at a.test:{port}", f"you are at b.test:{port}"}


@loops.the_fast_one
async def test_refusals_are_readable() -> None:
    async with wayout(plan(deny=["a.test"]), NAMES) as out:
        for arguments in (["http://a.test/"], ["-p", "http://a.test/"]):
            _, said = await curl("-i", "-x", out.url, *arguments)
            assert "HTTP/1.1 403 Forbidden (" in said
        answer = await out.say(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-type: application/problem+json" in head.lower()
        assert b"connection: close" in head.lower()
        refusal = json.loads(body)
        assert (refusal["code"], refusal["operation"]) == ("denied_by_policy", "network")
        assert refusal["rule"] == "network(outbound:a.test)"
        page = await out.say(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"a.test:443: connecting to a.test:443 is denied for this agent" in page
        _, said = await curl("-x", f"socks5h://127.0.0.1:{out.port}", "http://a.test/")
        assert "SOCKS5" in said
        done = await out.records.settled(4)
        assert {(each.verdict.verdict, each.result) for each in done} == {("deny", "denied_by_policy")}


@loops.the_fast_one
async def test_this_port_says_what_it_is() -> None:
    async with wayout(plan()) as out:
        answer = await out.say(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"carrel" in answer


# tunnels


@loops.each
@pytest.mark.parametrize(
    ("first", "passes"),
    [
        (hello("a.test"), True),
        (hello("b.test"), False),
        (hello("sub.a.test"), False),
        (hello(None), False),
        (b"SSH-2.0-OpenSSH\r\n", False),
        (b"\x00\x01\x02\x03", False),
        (b"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n", False),
        (b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", False),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", False),
        (b"EHLO me\r\n\r\n", False),
        (b"get / HTTP/1.1\r\nHost: a.test\r\n\r\n", False),
        (b"CONNECT b.test:443 HTTP/1.1\r\nHost: b.test:443\r\n\r\n", False),
    ],
)
async def test_a_tunnel_says_inside_whom_it_is_for(first: bytes, passes: bool) -> None:
    echo = Echo()
    async with server(echo) as port, wayout(plan(rules(port)), NAMES) as out:
        reader, writer = await out.tunnel(f"a.test:{port}")
        writer.write(first)
        if passes:
            assert await reader.readexactly(len(first)) == first
            assert echo.got == first
        else:
            answer = await reader.read()
            assert echo.got == b""
            if first[:1] == b"\x16":
                assert answer[:6] == b"\x15\x03\x03\x00\x02\x02"
            [access] = await out.records.settled(1)
            assert access.result in ("denied_by_policy", "bad_request")
            assert access.verdict.verdict == "deny" or access.result == "bad_request"
        writer.close()


@loops.the_fast_one
async def test_a_hello_that_comes_in_pieces_or_with_the_connect() -> None:
    echo, first = Echo(), hello("a.test")
    async with server(echo) as port, wayout(plan(rules(port)), NAMES) as out:
        reader, writer = await out.tunnel(f"a.test:{port}")
        for at in range(0, len(first), 40):
            writer.write(first[at : at + 40])
            await asyncio.sleep(0.001)
        assert await reader.readexactly(len(first)) == first
        writer.close()
        reader, writer = await out.dial()
        writer.write(f"CONNECT a.test:{port} HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n".encode() + first)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(first)) == first
        writer.close()


@loops.the_fast_one
async def test_an_address_has_no_name_in_tls() -> None:
    echo = Echo()
    async with server(echo) as port, wayout(plan([f"{OPEN}:{port}"]), NAMES) as out:
        reader, writer = await out.tunnel(f"{OPEN}:{port}")
        writer.write(hello(None))
        assert await reader.readexactly(5)
        writer.close()
        before = echo.got
        reader, writer = await out.tunnel(f"{OPEN}:{port}")
        writer.write(hello("a.test"))
        await reader.read()
        assert echo.got == before
        writer.close()


@loops.the_fast_one
async def test_an_opaque_host_may_say_anything_and_may_speak_first() -> None:
    async def speaks_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 welcome\r\n")
        writer.write(await reader.readline())

    async with server(speaks_first) as port:
        given = plan(rules(port), web={"opaque_domains": ["a.test"]})
        async with wayout(given, NAMES) as out:
            reader, writer = await out.tunnel(f"a.test:{port}")
            assert await reader.readline() == b"220 welcome\r\n"
            writer.write(b"\x00anything\n")
            assert await reader.read() == b"\x00anything\n"
            writer.close()


@loops.the_fast_one
async def test_who_says_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "SILENT_S", 0.05)
    echo = Echo()
    async with server(echo) as port, wayout(plan(rules(port)), NAMES) as out:
        reader, writer = await out.tunnel(f"a.test:{port}")
        await reader.read()
        [access] = await out.records.settled(1)
        assert "says nothing" in access.verdict.reason
        writer.close()


@loops.the_fast_one
@pytest.mark.parametrize(
    "head",
    [
        "CONNECT a.test HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "CONNECT a.test:0 HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "CONNECT a.test:99999 HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "CONNECT user@a.test:{port} HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "CONNECT a.test:{port} HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n",
        "CONNECT a.test:{port}@b.test:{port} HTTP/1.1\r\n\r\n",
        "CONNECT a%2etest:{port} HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "CONNECT 0177.0.0.2:{port} HTTP/1.1\r\n\r\n",
        "CONNECT 0x7f000002:{port} HTTP/1.1\r\n\r\n",
        "CONNECT 2130706434:{port} HTTP/1.1\r\n\r\n",
        "CONNECT 127.2:{port} HTTP/1.1\r\n\r\n",
        "CONNECT [::ffff:127.0.0.3]:{port} HTTP/1.1\r\n\r\n",
        "CONNECT [fe80::1%25eth0]:{port} HTTP/1.1\r\n\r\n",
        "CONNECT bad.test:{port} HTTP/1.1\r\n\r\n",
        "CONNECT a.test:22 HTTP/1.1\r\n\r\n",
        "CONNECT a.test:25 HTTP/1.1\r\n\r\n",
        "CONNECT http://a.test:{port} HTTP/1.1\r\n\r\n",
        "CONNECT a.test:{port} HTTP/1.1\r\nContent-Length: 10\r\n\r\n0123456789",
        "CONNECT a.test:{port}\r\nX: y HTTP/1.1\r\n\r\n",
        "CONNECT a.test:{port} HTTP/1.1\nHost: a.test\n\n\r\n\r\n",
        "connect a.test:{port} HTTP/1.1\r\n\r\n",
        "\x04\x01\x00\x50\x7f\x00\x00\x02\x00\r\n\r\n",
        "junk\r\n\r\n",
    ],
)
async def test_odd_connects_reach_nobody(head: str) -> None:
    echo = Echo()
    async with server(echo) as port, server(echo, CLOSED), wayout(plan(rules(port)), NAMES) as out:
        answer = await out.say(head.format(port=port).encode("latin-1"))
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), answer
        assert echo.connections == 0
        [access] = await out.records.settled(1)
        assert access.verdict.verdict == "deny"


@loops.the_fast_one
@pytest.mark.parametrize("spelling", ["A.TEST", "a.test."])
async def test_other_spellings_of_an_allowed_name_mean_it(spelling: str) -> None:
    async with server(Echo()) as port, wayout(plan(rules(port)), NAMES) as out:
        reader, writer = await out.tunnel(f"{spelling}:{port}")
        writer.write(hello("a.test"))
        assert await reader.readexactly(3)
        writer.close()


@loops.the_fast_one
async def test_the_proxy_does_not_go_through_itself() -> None:
    async with wayout(plan(["127.0.0.0/8"], web={"allowed_ports": [1, 65535]})) as out:
        where = f"127.0.0.1:{out.port}"
        for given in (f"CONNECT {where} HTTP/1.1\r\n\r\n", f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\n\r\n"):
            answer = await out.say(given.encode())
            assert answer.startswith(b"HTTP/1.1 403 ")


# SOCKS


@loops.the_fast_one
@pytest.mark.parametrize(
    ("order", "code"),
    [
        (b"\x05\x02\x00\x01\x7f\x00\x00\x02\x00\x50", 7),
        (b"\x05\x03\x00\x01\x7f\x00\x00\x02\x00\x50", 7),
        (b"\x05\x01\x00\x09\x7f\x00\x00\x02\x00\x50", 8),
        (b"\x05\x01\x00\x01\x7f\x00\x00\x03\x00\x50", 2),
        (b"\x05\x01\x00\x04" + bytes(10) + b"\xff\xff\x7f\x00\x00\x03\x00\x50", 2),
        (b"\x05\x01\x00\x01\xa9\xfe\xa9\xfe\x00\x50", 2),
        (b"\x05\x01\x00\x03\x08bad.test\x00\x50", 2),
        (b"\x05\x01\x00\x03\x0a0x7f000002\x00\x50", 1),
    ],
)
async def test_socks_refuses_with_the_right_number(order: bytes, code: int) -> None:
    async with wayout(plan([*rules(80), "bad.test"]), NAMES) as out:
        answer = await out.say(b"\x05\x01\x00", order)
        assert answer[:2] == b"\x05\x00"
        assert answer[2:4] == bytes((5, code))
        [access] = await out.records.settled(1)
        assert (access.protocol, access.verdict.verdict) == ("socks5", "deny")


@loops.the_fast_one
async def test_socks_without_authentication_only() -> None:
    async with wayout(plan()) as out:
        assert await out.say(b"\x05\x01\x02") == b"\x05\xff"


@loops.the_fast_one
async def test_socks_tunnels_are_checked_inside_too() -> None:
    echo = Echo()
    async with server(echo) as port, wayout(plan(rules(port)), NAMES) as out:
        order = b"\x05\x01\x00\x03\x06a.test" + port.to_bytes(2, "big")
        answer = await out.say(b"\x05\x01\x00" + order + hello("b.test"))
        assert answer[:4] == b"\x05\x00\x05\x00"
        assert answer[12:] == bytes((21, 3, 3, 0, 2, 2, 112))
        assert echo.got == b""


# inspected hosts


class Opened:
    """An `Inspect` that takes what the client sent."""

    def __init__(self) -> None:
        self.got = b""
        self.target: Target | None = None

    async def __call__(
        self, client: socket.socket, upstream: socket.socket, target: Target, outbound: object, tunnel: Access
    ) -> None:
        self.target = target
        self.got = client.recv(65536)


@loops.the_fast_one
async def test_an_inspected_host_is_handed_over_with_every_byte() -> None:
    opened, first = Opened(), hello("in.test")
    async with server(Echo()) as port:
        given = plan(rules(port), web={"inspected_domains": ["in.test"], "opaque_domains": ["in.test"]})
        async with wayout(given, NAMES, inspect=opened) as out:
            reader, writer = await out.tunnel(f"in.test:{port}")
            writer.write(first)
            await reader.read()
            assert opened.got == first
            assert str(opened.target) == f"in.test:{port}"
            [access] = await out.records.settled(1)
            assert (access.inspected, access.result) == (True, "ok")
            writer.close()
