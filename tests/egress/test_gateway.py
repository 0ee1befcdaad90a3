"""The gateway against real servers: what is allowed goes through, and nothing else reaches anybody."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import ssl
import struct
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

import loops
from carrel.egress import gateway as gateway_module
from carrel.egress.terms import Access, Address, Said, Target
from wayout import CLOSED, OPEN, Person, hello, plan, server, tls_for, wayout

TLS, CERTIFICATE = tls_for("a.test", "b.test")
NAMES = {"a.test": [OPEN], "b.test": [OPEN], "bad.test": [CLOSED], "in.test": [OPEN]}


class Echo:
    """A server that sends back what it gets, and remembers it."""

    def __init__(self) -> None:
        self.got = b""
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(65536):
            self.got += data
            writer.write(data)
            await writer.drain()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A small HTTP server."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        body = b"you are at " + head.partition(b"\r\nHost: ")[2].partition(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()


async def curl(*arguments: str) -> tuple[int, str]:
    """The exit code of curl and what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "20", *arguments, stdout=-1, stderr=-2, env=environment
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def rules(port: int) -> list[str]:
    return [f"{name}:{port}" for name in NAMES] + [OPEN]


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
        done = await out.records.settled(7)
        assert {each.result for each in done} == {"ok"}
        assert [each.protocol for each in done] == ["http"] * 2 + ["connect", "socks5", "socks5"] + ["connect"] * 2
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
        assert b"content-type: application/json" in head.lower()
        assert b"connection: close" in head.lower()
        refusal = json.loads(body)
        assert (refusal["code"], refusal["operation"]) == ("denied_by_policy", "network")
        assert refusal["rule"] == "network(outbound:a.test)"
        _, said = await curl("-x", f"socks5h://127.0.0.1:{out.port}", "http://a.test/")
        assert "SOCKS5" in said
        done = await out.records.settled(4)
        assert {(each.said.verdict, each.result) for each in done} == {("deny", "denied_by_policy")}


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
            assert access.said.verdict == "deny" or access.result == "bad_request"
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
        assert "says nothing" in access.said.reason
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
        assert access.said.verdict == "deny"


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
        assert (access.protocol, access.said.verdict) == ("socks5", "deny")


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
    """A `passage.Inspect` that takes what the client sent."""

    def __init__(self) -> None:
        self.got = b""
        self.target: Target | None = None

    async def __call__(
        self, client: socket.socket, upstream: socket.socket, target: Target, passage: object, tunnel: Access
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
        async with wayout(given, NAMES) as out:
            reader, writer = await out.tunnel(f"in.test:{port}")
            writer.write(first)
            assert (await reader.read())[:1] == b"\x15"
            writer.close()


# limits, failures, ends


@loops.the_fast_one
async def test_too_many_connections_are_told_so() -> None:
    async with server(Echo()) as port, wayout(plan(rules(port), web={"max_connections": 2}), NAMES) as out:
        held = [await out.tunnel(f"a.test:{port}") for _ in range(2)]
        answer = await out.say(f"CONNECT a.test:{port} HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "limit_exceeded"
        for _, writer in held:
            writer.close()
        await out.records.settled(3)
        _, writer = await out.tunnel(f"a.test:{port}")
        writer.close()


@loops.the_fast_one
async def test_who_sends_no_head_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "HEAD_S", 0.5)
    async with server(greet) as port, wayout(plan(rules(port), web={"max_connections": 1}), NAMES) as out:
        slow = [await out.dial() for _ in range(100)]
        for _, writer in slow:
            writer.write(b"GET http://a.test/ HTTP/1.1\r\n")
        code, said = await curl("-x", out.url, f"http://a.test:{port}/")
        assert (code, said) == (0, f"you are at a.test:{port}")
        for reader, writer in slow:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


@loops.the_fast_one
async def test_a_head_without_end() -> None:
    async with wayout(plan()) as out:
        answer = await out.say(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert answer.startswith(b"HTTP/1.1 431 ")


@loops.the_fast_one
async def test_a_download_ends_at_its_limit() -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        while True:
            writer.write(bytes(1 << 18))
            await writer.drain()

    async with server(pour) as port:
        given = plan(rules(port), web={"max_download_mb": 3, "opaque_domains": ["a.test"]})
        async with wayout(given, NAMES) as out:
            reader, writer = await out.tunnel(f"a.test:{port}")
            writer.write(b"x")
            got = 0
            try:
                while data := await reader.read(1 << 20):
                    got += len(data)
            except ConnectionResetError:
                pass
            assert got <= 3 << 20
            writer.close()
            [access] = await out.records.settled(1)
            assert (access.result, access.said.verdict) == ("limit_exceeded", "deny")
            answer = await out.say(f"CONNECT a.test:{port} HTTP/1.1\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 429 ")


@loops.the_fast_one
async def test_a_target_that_is_not_there() -> None:
    async with server(greet) as port:
        pass
    async with wayout(plan(rules(port)), NAMES) as out:
        answer = await out.say(f"CONNECT a.test:{port} HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 502 ")
        answer = await out.say(b"\x05\x01\x00", b"\x05\x01\x00\x03\x06a.test" + port.to_bytes(2, "big"))
        assert answer[2:4] == b"\x05\x04"


@loops.the_fast_one
async def test_a_failure_of_ours_is_told_and_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(name: str) -> list[Address]:
        raise ZeroDivisionError(name)

    async with server(Echo()) as port, wayout(plan(rules(port)), NAMES) as out:
        _, writer = await out.tunnel(f"a.test:{port}")
        out.passage._resolve = broken
        with caplog.at_level(logging.ERROR):
            for head in (f"CONNECT b.test:{port} HTTP/1.1\r\n\r\n", f"GET http://b.test:{port}/ HTTP/1.0\r\n\r\n"):
                answer = await out.say(head.encode())
                assert answer.startswith(b"HTTP/1.1 500 ")
                assert b"ZeroDivision" not in answer
        assert "s1" in caplog.text
        assert not writer.is_closing()
        assert out.passage.budget.open == 1
        writer.close()


@loops.the_fast_one
async def test_a_new_policy_cuts_a_tunnel() -> None:
    async with server(Echo()) as port, wayout(plan(rules(port)), NAMES) as out:
        kept, cut = await out.tunnel(f"a.test:{port}"), await out.tunnel(f"b.test:{port}")
        for (reader, writer), name in ((kept, "a.test"), (cut, "b.test")):
            writer.write(hello(name))
            assert await reader.readexactly(5)
        out.passage.change(plan(rules(port), ["b.test"]))
        reader, writer = cut
        try:
            while await reader.read(65536):
                pass
        except ConnectionResetError:
            pass
        [access] = await out.records.settled(1)
        assert (str(access.target), access.result) == (f"b.test:{port}", "denied_by_policy")
        writer.close()
        kept[1].close()


@loops.the_fast_one
async def test_a_person_decides_while_the_client_waits() -> None:
    person = Person()
    async with server(greet) as port:
        given = plan([OPEN], web={"allowed_ports": [port]})
        async with wayout(given, {"new.test": [OPEN]}, person) as out:
            _, said = await curl("-i", "-x", out.url, f"http://new.test:{port}/")
            assert "a person said no" in said
            person.says = Said("allow", "yes", approval="a7")
            code, said = await curl("-x", out.url, f"http://new.test:{port}/")
            assert (code, said) == (0, f"you are at new.test:{port}")
            assert (await out.records.settled(2))[1].said.approval == "a7"


@loops.each
async def test_draining_lets_what_runs_finish_and_takes_nothing_new() -> None:
    async with server(Echo()) as port, wayout(plan(rules(port)), NAMES) as out:
        reader, writer = await out.tunnel(f"a.test:{port}")
        writer.write(hello("a.test"))
        await reader.readexactly(10)
        draining = asyncio.ensure_future(out.gateway.drain(20))
        await asyncio.sleep(0)
        writer.write(b"x" * 1000)
        await reader.readexactly(1000)
        assert not draining.done()
        writer.close()
        await asyncio.wait_for(draining, 20)
        with pytest.raises(OSError):
            await out.dial()


@loops.the_fast_one
async def test_when_descriptors_run_out_it_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    async with server(greet) as port, wayout(plan(rules(port)), NAMES) as out:
        client = socket.create_connection(("127.0.0.1", out.port))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(client.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            client.sendall(f"GET http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n".encode())
            async with asyncio.timeout(20):
                while out.gateway._retry is None:
                    await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.setblocking(False)
        answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1000), 20)
        assert answer.startswith(b"HTTP/1.1 200 ")
        client.close()


@loops.the_fast_one
async def test_many_ends_of_every_kind_leave_no_descriptor() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async with server(greet) as port, wayout(plan(rules(port)), NAMES) as out:
        before = descriptors()

        async def one(number: int) -> None:
            reader, writer = await out.dial()
            head = f"CONNECT a.test:{port} HTTP/1.1\r\n\r\n"
            if number % 5 == 1:
                head = "CONNECT bad.test:80 HTTP/1.1\r\n\r\n"
            elif number % 5 == 2:
                head = f"GET http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"
            elif number % 5 == 3:
                head = "\x05"
            writer.write(head.encode())
            if number % 3:
                await reader.read(100)
            if number % 2:
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()

        for start in range(0, 200, 50):
            await asyncio.wait_for(
                asyncio.gather(*(one(n) for n in range(start, start + 50) if n % 5 != 3 or n % 3 == 0)), 60
            )
        async with asyncio.timeout(30):
            while out.gateway._tasks:
                await asyncio.sleep(0.01)
            while descriptors() > before:
                await asyncio.sleep(0.01)
        assert out.passage.budget.open == 0
