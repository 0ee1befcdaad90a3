"""Requests over connections that are open already, in tunnels or not: counted, decided and written down by themselves."""

from __future__ import annotations

import asyncio

from tests.support import loops
from tests.support.gateway_ground import NAMES, greet
from tests.support.wayout import OPEN, PATIENCE_S, Person, plan, server, wayout

from carrel.policy.verdict import Verdict


@loops.the_fast_one
async def test_inside_a_tunnel_requests_count_and_a_person_is_asked_once() -> None:
    person = Person(Verdict("allow", "a person allowed it", approval="a1"))
    async with server(greet) as port:
        web = {"max_connections_per_minute": 4, "allowed_ports": [port]}
        async with wayout(plan([OPEN], web=web), NAMES, person) as out:
            reader, writer = await out.tunnel(f"a.test:{port}")
            for number in range(5):
                writer.write(b"GET /%d HTTP/1.1\r\nHost: a.test\r\n\r\n" % number)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 " if number < 4 else b"HTTP/1.1 429 ")
                if number < 4:
                    await reader.readuntil(b"you are at a.test:%d" % port)
            writer.close()
            done = await out.records.settled(5)
            assert [each.path for each in done if each.protocol == "http" and each.result == "ok"] == ["/1", "/2", "/3"]
            [tunnel] = [each for each in done if each.protocol == "connect"]
            assert (tunnel.method, tunnel.path) == ("GET", "/0"), "what it was opened for"
            assert {each.verdict.approval for each in done[:3]} == {"a1"}
            assert len(person.asked) == 1


async def test_connections_that_are_used_again_count_too() -> None:
    waiting, go = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting
        while head := await reader.readuntil(b"\r\n\r\n"):
            if b"/slow" in head:
                waiting += 1
                await go.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

    async with server(serve) as port:
        web = {"max_connections": 2, "allowed_ports": [port]}
        async with wayout(plan([f"a.test:{port}", OPEN], web=web), {"a.test": [OPEN]}) as out:
            clients = []
            for _ in range(6):
                reader, writer = await out.dial()
                writer.write(b"GET http://a.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\n\r\n" % (port, port))
                async with asyncio.timeout(PATIENCE_S):
                    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
                clients.append((reader, writer))
            for _, writer in clients:
                writer.write(b"GET http://a.test:%d/slow HTTP/1.1\r\nHost: a.test:%d\r\n\r\n" % (port, port))
            answers = [asyncio.ensure_future(reader.readuntil(b"\r\n")) for reader, _ in clients]
            async with asyncio.timeout(PATIENCE_S):
                while sum(each.done() for each in answers) + waiting < 6:
                    await asyncio.sleep(0.01)
            go.set()
            told = sorted([await each for each in answers])
            assert [each[9:12] for each in told] == [b"200"] * 2 + [b"429"] * 4
            for _, writer in clients:
                writer.close()
