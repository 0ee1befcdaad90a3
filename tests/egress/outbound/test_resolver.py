from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from carrel.egress.access import AccessRefused, Resolve
from carrel.egress.outbound import resolver as module
from carrel.egress.outbound.resolver import MOST_AT_ONCE, Resolver
from carrel.errors import InvalidRequest

Answering = Callable[[str, str, str], bytes | dns.message.Message | list[str] | int | None]
"""What a server says to (name, kind, transport): records, a code, a message, bytes, or nothing at all."""


class Server(asyncio.DatagramProtocol):
    """A real name server on loopback, over UDP and TCP."""

    def __init__(self, answering: Answering):
        self.answering = answering
        self.asked: Counter[tuple[str, str, str]] = Counter()
        self.changed = asyncio.Event()
        self.unanswered: list[tuple[bytes, object]] = []
        self.transport: asyncio.DatagramTransport
        self.at = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, sender: object) -> None:
        answer = self.answer(data, "udp")
        if answer is None:
            self.unanswered.append((data, sender))
        else:
            self.transport.sendto(answer, sender)

    def answer_late(self) -> None:
        """Answer what was not answered."""
        while self.unanswered:
            self.datagram_received(*self.unanswered.pop())

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (size,) = struct.unpack("!H", await reader.readexactly(2))
            answer = self.answer(await reader.readexactly(size), "tcp")
            if answer is not None:
                writer.write(struct.pack("!H", len(answer)) + answer)
                await writer.drain()
        finally:
            writer.close()

    def answer(self, data: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked[name, kind, transport] += 1
        self.changed.set()
        said = self.answering(name, kind, transport)
        if said is None or isinstance(said, bytes):
            return said
        answer = dns.message.make_response(query)
        if isinstance(said, dns.message.Message):
            said.id, said.question = query.id, query.question
            return said.to_wire()
        if isinstance(said, int):
            answer.set_rcode(dns.rcode.Rcode(said))
            return answer.to_wire()
        owner = question.name
        for text in said:
            made, _, value = text.partition(" ")
            answer.answer.append(dns.rrset.from_text(owner, 60, "IN", made, value))
            if made == "CNAME":
                owner = dns.name.from_text(value)
        return answer.to_wire()


@asynccontextmanager
async def serving(answering: Answering) -> AsyncIterator[Server]:
    server = Server(answering)
    loop = asyncio.get_running_loop()
    streams = await asyncio.start_server(server.stream, "127.0.0.1", 0)
    port = streams.sockets[0].getsockname()[1]
    await loop.create_datagram_endpoint(lambda: server, local_addr=("127.0.0.1", port))
    server.at = f"127.0.0.1:{port}"
    try:
        yield server
    finally:
        server.transport.close()
        streams.close()
        await streams.wait_closed()


@asynccontextmanager
async def resolving(*nameservers: str, ttl_s: float = 5.0) -> AsyncIterator[Resolver]:
    resolver = Resolver(nameservers, ttl_s=ttl_s)
    try:
        yield resolver
    finally:
        await resolver.close()


def table(**names: list[str]) -> Answering:
    """Answers by the part of a name before its first dot."""

    def answering(name: str, kind: str, _transport: str) -> list[str] | int:
        known = names.get(name.partition(".")[0])
        return 3 if known is None else [each for each in known if each.partition(" ")[0] in {kind, "CNAME"}]

    return answering


async def refused(resolver: Resolver, name: str) -> AccessRefused:
    with pytest.raises(AccessRefused) as found:
        await resolver(name)
    return found.value


async def test_the_system_is_asked() -> None:
    async with resolving() as resolver:
        found = await resolver("localhost")
        assert ip_address("127.0.0.1") in found
        assert len(set(found)) == len(found)


async def test_the_system_knows_no_such_name() -> None:
    async with resolving() as resolver:
        found = await refused(resolver, "nobody.invalid")
        assert found.status in {502, 504}
        assert found.code in {"unreachable", "timed_out"}


async def test_both_kinds_of_addresses_without_doubles() -> None:
    names = table(
        a=["A 10.0.0.1", "AAAA 2001:db8::1", "A 10.0.0.2", "A 10.0.0.1"], four=["A 10.0.0.4"], six=["AAAA ::6"]
    )
    async with serving(names) as server, resolving(server.at) as resolver:
        assert set(await resolver("a.example")) == {
            ip_address(each) for each in ("10.0.0.1", "10.0.0.2", "2001:db8::1")
        }
        assert len(await resolver("a.example")) == 3
        assert list(await resolver("four.example")) == [ip_address("10.0.0.4")]
        assert list(await resolver("six.example")) == [ip_address("::6")]


async def test_other_names_are_followed() -> None:
    async with serving(table(a=["CNAME b.example.", "A 10.0.0.1"])) as server, resolving(server.at) as resolver:
        assert list(await resolver("a.example")) == [ip_address("10.0.0.1")]


async def test_a_name_without_addresses() -> None:
    async with serving(table(empty=[])) as server, resolving(server.at) as resolver:
        for name in ("empty.example", "nobody.example"):
            found = await refused(resolver, name)
            assert (found.status, found.code) == (502, "unreachable")
            assert name in found.reason


async def test_a_name_that_changes_is_kept_as_long_as_it_is_kept() -> None:
    answers = iter(["A 10.0.0.1", "A 127.0.0.1"])
    known: dict[str, str] = {}

    def answering(_name: str, kind: str, _transport: str) -> list[str]:
        return [next(answers)] if kind == "A" else []

    async with serving(answering) as server, resolving(server.at, ttl_s=600) as resolver:
        known["first"] = str((await resolver("a.example"))[0])
        known["second"] = str((await resolver("a.example"))[0])
        assert known == {"first": "10.0.0.1", "second": "10.0.0.1"}
        assert server.asked["a.example", "A", "udp"] == 1
    answers = iter(["A 10.0.0.1", "A 127.0.0.1"])
    async with serving(answering) as server, resolving(server.at, ttl_s=0) as resolver:
        assert [str((await resolver("a.example"))[0]) for _ in range(2)] == ["10.0.0.1", "127.0.0.1"]


async def test_that_a_name_is_unknown_is_kept_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(table()) as server:
        monkeypatch.setattr(module, "ABSENT_S", 600)
        async with resolving(server.at) as resolver:
            await refused(resolver, "nobody.example")
            await refused(resolver, "nobody.example")
        assert server.asked["nobody.example", "A", "udp"] == 1
        monkeypatch.setattr(module, "ABSENT_S", 0)
        async with resolving(server.at, ttl_s=600) as resolver:
            await refused(resolver, "nobody.example")
            await refused(resolver, "nobody.example")
        assert server.asked["nobody.example", "A", "udp"] == 3


async def test_a_name_is_asked_for_once_however_many_wait() -> None:
    async with serving(table(a=["A 10.0.0.1"])) as server, resolving(server.at, ttl_s=0) as resolver:
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(_ask(resolver, "a.example")) for _ in range(50)]
        assert {task.result() for task in waiting} == {(ip_address("10.0.0.1"),)}
        assert server.asked["a.example", "A", "udp"] == 1


async def test_who_gives_up_takes_nothing_from_the_others() -> None:
    silent = asyncio.Event()

    def answering(_name: str, kind: str, _transport: str) -> list[str] | None:
        return None if not silent.is_set() else ["A 10.0.0.1"] if kind == "A" else []

    async with serving(answering) as server, resolving(server.at) as resolver:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(_ask(resolver, "a.example"))
            await server.changed.wait()
            second = group.create_task(_ask(resolver, "a.example"))
            await asyncio.sleep(0)
            first.cancel()
            silent.set()
            assert await second == (ip_address("10.0.0.1"),)
        assert first.cancelled()


async def test_what_is_cut_short_comes_over_a_stream() -> None:
    def answering(_name: str, kind: str, transport: str) -> dns.message.Message | list[str]:
        if transport == "udp":
            short = dns.message.Message()
            short.flags = dns.flags.QR | dns.flags.TC | dns.flags.RA
            return short
        return [f"A 10.0.{n // 250}.{n % 250}" for n in range(500)] if kind == "A" else []

    async with serving(answering) as server, resolving(server.at) as resolver:
        assert len(await resolver("a.example")) == 500
        assert server.asked["a.example", "A", "tcp"] == 1


@pytest.mark.parametrize("garbage", [b"", b"\0", b"garbage" * 9, bytes(12), bytes(500)])
async def test_garbage_and_silence_end_in_time(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.3)
    async with serving(lambda *_: garbage or None) as server, resolving(server.at) as resolver:
        found = await refused(resolver, "a.example")
        assert found.status in {502, 504}
        assert found.retry


async def test_answers_of_another_question_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.3)

    def answering(name: str, _kind: str, _transport: str) -> bytes:
        other = dns.message.make_response(dns.message.make_query("evil.example", "A"))
        other.answer.append(dns.rrset.from_text(name, 60, "IN", "A", "10.6.6.6"))
        return other.to_wire()

    async with serving(answering) as server, resolving(server.at) as resolver:
        await refused(resolver, "a.example")


async def test_records_of_other_names_are_left_out() -> None:
    def answering(_name: str, kind: str, _transport: str) -> dns.message.Message:
        answer = dns.message.Message()
        answer.flags = dns.flags.QR | dns.flags.RA
        answer.answer.append(dns.rrset.from_text("evil.example.", 60, "IN", kind, "10.6.6.6" if kind == "A" else "::6"))
        return answer

    async with serving(answering) as server, resolving(server.at) as resolver:
        assert (await refused(resolver, "a.example")).status == 502


async def test_the_next_server_is_asked_when_one_fails() -> None:
    async with (
        serving(lambda *_: 2) as failing,
        serving(table(a=["A 10.0.0.1"])) as working,
        resolving(failing.at, working.at) as resolver,
    ):
        assert list(await resolver("a.example")) == [ip_address("10.0.0.1")]
    async with serving(lambda *_: 2) as failing, resolving(failing.at) as resolver:
        found = await refused(resolver, "a.example")
        assert (found.status, found.retry) == (502, True)


async def test_names_are_whole_and_never_searched_for() -> None:
    async with serving(table(a=["A 10.0.0.1"])) as server, resolving(server.at) as resolver:
        await resolver("a")
        await refused(resolver, "nobody")
        assert {name for name, *_ in server.asked} == {"a", "nobody"}


async def test_only_so_many_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.MOST_KEPT == 1000
    monkeypatch.setattr(module, "MOST_KEPT", 50)

    def answering(_name: str, kind: str, _transport: str) -> list[str]:
        return ["A 10.0.0.1"] if kind == "A" else []

    async with serving(answering) as server, resolving(server.at, ttl_s=600) as resolver:
        names = [f"n{number}.example" for number in range(51)]
        for start in range(0, len(names), 10):
            await asyncio.gather(*map(resolver, names[start : start + 10]))
        await resolver(names[-1])
        await resolver(names[0])
        assert server.asked[names[-1], "A", "udp"] == 1
        assert server.asked[names[0], "A", "udp"] == 2


async def test_only_so_many_names_are_looked_up_at_once() -> None:
    async with serving(lambda *_: None) as server, resolving(server.at) as resolver:
        waiting = [asyncio.create_task(_ask(resolver, f"n{number}.example")) for number in range(MOST_AT_ONCE)]
        await asyncio.sleep(0)
        found = await refused(resolver, "one-more.example")
        assert (found.status, found.code, found.retry) == (503, "limit_exceeded", True)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_one_of_many_waits_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 60)  # a turn comes whenever the others are done, also on a busy machine
    speaking = asyncio.Event()

    def answering(name: str, kind: str, _transport: str) -> list[str] | None:
        return (["A 10.0.0.1"] if kind == "A" else []) if speaking.is_set() or name.startswith("other") else None

    async with serving(answering) as server, resolving(server.at) as resolver:
        one, other = resolver.share(2), resolver.share(2)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(_ask(one, f"n{number}.example")) for number in range(5)]
            while len({name for name, *_ in server.asked}) < 2:
                await server.changed.wait()
                server.changed.clear()
                await asyncio.sleep(0)
            assert await _ask(other, "other.example") == (ip_address("10.0.0.1"),)
            assert {name for name, *_ in server.asked} == {"n0.example", "n1.example", "other.example"}
            speaking.set()
            server.answer_late()
        assert [task.result() for task in waiting] == [(ip_address("10.0.0.1"),)] * 5


async def test_who_waits_too_long_for_a_turn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lambda *_: None) as server, resolving(server.at) as resolver:
        one = resolver.share(1)
        first = asyncio.create_task(_ask(one, "a.example"))
        await server.changed.wait()
        monkeypatch.setattr(module, "DEADLINE_S", 0.1)
        with pytest.raises(AccessRefused) as found:
            await one("b.example")
        assert found.value.code == "limit_exceeded"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_closing_ends_what_is_being_looked_up() -> None:
    async with serving(lambda *_: None) as server:
        resolver = Resolver([server.at])
        waiting = asyncio.create_task(_ask(resolver, "a.example"))
        await server.changed.wait()
        await resolver.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting


SEARCHED = """
import fcntl, os, socket, struct, threading
import dns.message
from carrel.egress.outbound.resolver import use_exact_names
with socket.socket() as up:
    fcntl.ioctl(up, 0x8914, struct.pack("16sH14x", b"lo", 1))
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
asked = set()
def serve():
    while True:
        data, sender = server.recvfrom(4096)
        query = dns.message.from_wire(data)
        asked.add(query.question[0].name.to_text())
        answer = dns.message.make_response(query)
        answer.set_rcode(3)
        server.sendto(answer.to_wire(), sender)
threading.Thread(target=serve, daemon=True).start()
if os.environ.get("WHOLE"):
    use_exact_names()
for name in (b"api.a.example", b"known.example"):
    try:
        print("found", socket.getaddrinfo(name, 80)[0][4][0])
    except socket.gaierror:
        pass
print(*sorted(asked))
"""


@pytest.mark.parametrize(
    ("whole", "asked"),
    [("", "api.a.example. api.a.example.office.example."), ("1", "api.a.example.")],
)
def test_the_system_looks_for_no_other_names(whole: str, asked: str, tmp_path: Path) -> None:
    """With a search list that is tried first, as on a node of a cluster, in namespaces of our own."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nsearch office.example\noptions ndots:5\n")
    (tmp_path / "hosts").write_text("10.0.0.1 known.example\n")
    mounts = " && ".join(f"mount --bind {tmp_path / name} /etc/{name}" for name in ("resolv.conf", "hosts"))
    command = f'{mounts} && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-rmn", "sh", "-c", command, sys.executable, SEARCHED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": os.environ["PATH"], "WHOLE": whole},
    )
    assert done.stdout.splitlines() == ["found 10.0.0.1", asked]


@pytest.mark.parametrize(
    "server", ["", "a.example", "https://1.1.1.1/dns-query", "1.1.1.1:0", "1.1.1.1:x", "1.1", "[::1"]
)
def test_name_servers_are_addresses(server: str) -> None:
    with pytest.raises(InvalidRequest):
        Resolver([server])


@pytest.mark.parametrize("server", ["1.1.1.1", "1.1.1.1:5353", "::1", "2001:db8::1", "[::1]", "[::1]:5353"])
def test_name_servers_in_every_spelling(server: str) -> None:
    Resolver([server])


async def _ask(resolver: Resolve, name: str) -> object:
    return tuple(await resolver(name))
