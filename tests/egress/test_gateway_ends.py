"""How the gateway bears limits, failures and ends: nobody else is harmed, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import struct
from contextlib import suppress

import pytest
from tests.support import loops
from tests.support.gateway_ground import NAMES, Echo, curl, greet, rules
from tests.support.ports import nobody
from tests.support.wayout import OPEN, Person, hello, plan, server, wayout

from carrel.egress.access import Address
from carrel.egress.listener import gateway as gateway_module
from carrel.policy.verdict import Verdict


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
    monkeypatch.setattr(gateway_module, "HEAD_S", 3.0)
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
            assert (access.result, access.verdict.verdict) == ("limit_exceeded", "deny")
            answer = await out.say(f"CONNECT a.test:{port} HTTP/1.1\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 429 ")


@loops.the_fast_one
async def test_a_target_that_is_not_there() -> None:
    with nobody(OPEN) as port:
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
        out.outbound._resolve = broken
        with caplog.at_level(logging.ERROR):
            for head in (f"CONNECT b.test:{port} HTTP/1.1\r\n\r\n", f"GET http://b.test:{port}/ HTTP/1.0\r\n\r\n"):
                answer = await out.say(head.encode())
                assert answer.startswith(b"HTTP/1.1 500 ")
                assert b"ZeroDivision" not in answer
        assert "s1" in caplog.text
        assert not writer.is_closing()
        assert out.outbound.budget.open == 1
        writer.close()


@loops.the_fast_one
async def test_a_new_policy_cuts_a_tunnel() -> None:
    async with server(Echo()) as port, wayout(plan(rules(port)), NAMES) as out:
        kept, cut = await out.tunnel(f"a.test:{port}"), await out.tunnel(f"b.test:{port}")
        for (reader, writer), name in ((kept, "a.test"), (cut, "b.test")):
            writer.write(hello(name))
            assert await reader.readexactly(5)
        out.outbound.change(plan(rules(port), ["b.test"]))
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
            person.says = Verdict("allow", "yes", approval="a7")
            code, said = await curl("-x", out.url, f"http://new.test:{port}/")
            assert (code, said) == (0, f"you are at new.test:{port}")
            assert (await out.records.settled(2))[1].verdict.approval == "a7"


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
        assert out.outbound.budget.open == 0
