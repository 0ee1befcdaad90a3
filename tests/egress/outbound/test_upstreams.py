"""Connections straight to checked addresses, and through a real Squid and a real SOCKS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from ipaddress import IPv4Address, IPv6Address
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import uvloop
from tests.support.ports import held, in_common, nobody
from tests.support.squid import Squid
from tests.support.upstreams_ground import (
    HERE,
    PASSWORD,
    USER,
    Origin,
    Socks,
    access,
    healthy,
    serving,
    silent_address,
    talks,
    target,
    through,
    until,
)

from carrel.egress.access import AccessRefused, Address
from carrel.egress.outbound.upstreams import Health, Upstreams, dial_directly
from carrel.egress.plan import Upstream
from carrel.errors import InvalidRequest


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    found = Origin()
    async with serving(found) as found.port:
        yield found


@pytest.fixture(scope="module")
def squid() -> Iterator[Squid]:
    squid = Squid(USER, PASSWORD)
    yield squid
    squid.close()


# directly


async def test_the_first_address_that_answers_is_taken(origin: Origin) -> None:
    seen = access()
    addresses: list[Address] = [IPv4Address("127.0.0.9"), IPv6Address("::1"), HERE]
    assert await talks(await dial_directly(target("a.test", origin.port), addresses, seen))
    assert (seen.address, seen.upstream) == ("127.0.0.1", None)


async def test_an_address_that_is_silent_is_not_waited_for(origin: Origin) -> None:
    with in_common("127.0.0.8", "127.0.0.2") as (first, second), silent_address(first) as port:
        async with serving(origin, second):
            seen = access()
            addresses = [IPv4Address("127.0.0.8"), IPv4Address("127.0.0.2")]
            assert await talks(await dial_directly(target("a.test", port), addresses, seen))
    assert seen.address == "127.0.0.2"


async def test_two_that_answer_leave_one_connection() -> None:
    with in_common("127.0.0.1", "127.0.0.2") as (first, second):
        async with serving(Origin(), first) as port, serving(Origin(), second):
            connection = await dial_directly(target("a.test", port), [HERE, IPv4Address("127.0.0.2")], access())
            assert await talks(connection)


async def test_nobody_there_is_said_in_words() -> None:
    for addresses in ([HERE], [HERE, IPv4Address("127.0.0.2")]):
        refused = pytest.raises(AccessRefused, match=r"a\.test:\d+ cannot be reached: connection refused")
        with in_common("127.0.0.1", "127.0.0.2") as (none, _), refused as raised:
            await dial_directly(target("a.test", none.getsockname()[1]), addresses, access())
        assert (raised.value.status, raised.value.code) == (502, "unreachable")


async def test_silence_ends() -> None:
    with held("127.0.0.8") as silent, silent_address(silent) as port:
        for addresses in ([IPv4Address("127.0.0.8")], [IPv4Address("127.0.0.8")] * 2):
            with pytest.raises(AccessRefused, match="does not answer") as raised:
                await dial_directly(target("a.test", port), addresses, access(), timeout_s=0.4)
            assert (raised.value.status, raised.value.code) == (504, "timed_out")


async def test_no_address_is_no_connection() -> None:
    with pytest.raises(AccessRefused):
        await dial_directly(target("a.test", 80), [], access())


# Squid


async def test_squid_leads_on_with_credentials(squid: Squid, origin: Origin) -> None:
    async with healthy() as health:
        seen = access()
        dial = Upstreams([through(squid)], health)
        assert await talks(await dial(target("a.test", origin.port), [HERE], seen))
        assert (seen.address, seen.upstream) == ("127.0.0.1", "office")


async def test_squid_is_given_the_name_when_it_looks_names_up_itself(squid: Squid, origin: Origin) -> None:
    async with healthy() as health:
        seen = access()
        dial = Upstreams([through(squid, names=True)], health)
        # The address is one where nobody is: only the name can have led there.
        where = target("localhost", origin.port)
        assert await talks(await dial(where, [IPv4Address("127.0.0.77")], seen))
        assert (seen.address, seen.upstream) == (None, "office")
        with pytest.raises(AccessRefused, match="'office' says 503"):
            await Upstreams([through(squid)], health)(where, [IPv4Address("127.0.0.77")], access())


async def test_what_squid_refuses_is_told_and_not_tried_elsewhere(squid: Squid, origin: Origin) -> None:
    async with serving(other := Socks()) as port, healthy() as health:
        second = Upstream("second", f"socks5://127.0.0.1:{port}")
        dial = Upstreams([through(squid), second], health)
        with pytest.raises(AccessRefused, match="'office' refused the connection: 403 Forbidden") as raised:
            await dial(target("a.test", origin.port), [IPv4Address("127.0.0.3")], access())
        assert (raised.value.status, raised.value.code) == (502, "upstream_refused")
        assert health.works(through(squid))
        dial = Upstreams([through(squid, password="wrong-one"), second], health)
        with pytest.raises(AccessRefused, match="'office' refused the connection: 407") as raised:
            await dial(target("a.test", origin.port), [HERE], access())
        assert "credentials" in str(raised.value.verdict.hint)
        assert "wrong-one" not in repr(raised.value.as_dict())
    assert not other.asked
    assert not origin.visits


async def test_a_target_that_squid_cannot_reach_does_not_take_squid_down(squid: Squid) -> None:
    async with healthy() as health:
        with nobody() as port, pytest.raises(AccessRefused, match="'office' says 503 Service Unavailable") as raised:
            await Upstreams([through(squid)], health)(target("a.test", port), [HERE], access())
        assert (raised.value.status, raised.value.code) == (502, "unreachable")
        assert health.works(through(squid))


async def test_the_next_address_is_tried_by_the_same_upstream(squid: Squid, origin: Origin) -> None:
    async with healthy() as health:
        seen = access()
        dial = Upstreams([through(squid)], health)
        assert await talks(await dial(target("a.test", origin.port), [IPv4Address("127.0.0.77"), HERE], seen))
        assert seen.address == "127.0.0.1"


async def test_squid_that_dies_is_left_for_the_next(origin: Origin) -> None:
    squid = Squid(USER, PASSWORD)
    try:
        async with serving(socks := Socks()) as port, healthy(every_s=0.05) as health:
            dial = Upstreams([through(squid), Upstream("second", f"socks5://127.0.0.1:{port}")], health)
            where = target("a.test", origin.port)
            assert await talks(await dial(where, [HERE], first := access()))
            assert first.upstream == "office"
            await health._check(through(squid))
            assert health.works(through(squid))
            squid.kill()
            await until(lambda: not health.works(through(squid)))  # found by a check alone
            assert await talks(await dial(where, [HERE], second := access()))
            assert second.upstream == "second"
            assert len(socks.asked) == 1
    finally:
        squid.close()


# SOCKS5


async def test_socks_with_user_and_password(origin: Origin) -> None:
    async with serving(socks := Socks(USER.encode(), PASSWORD.encode())) as port, healthy() as health:
        url = f"socks5://{USER}:{quote(PASSWORD, safe='')}@localhost:{port}"
        dial = Upstreams([Upstream("s", url)], health)
        assert await talks(await dial(target("a.test", origin.port), [HERE], seen := access()))
        assert (seen.address, seen.upstream) == ("127.0.0.1", "s")
        for user in (f"{USER}:wrong-one@", ""):
            dial = Upstreams([Upstream("s", f"socks5://{user}127.0.0.1:{port}")], health)
            with pytest.raises(AccessRefused, match="'s' refused the connection: ") as raised:
                await dial(target("a.test", origin.port), [HERE], access())
            assert raised.value.code == "upstream_refused"
            assert "wrong-one" not in repr(raised.value.as_dict())
    assert socks.asked == [("127.0.0.1", origin.port)]


async def test_socks_is_given_names_or_addresses() -> None:
    origin, later = Origin(), Origin()
    async with AsyncExitStack() as stack:
        first, second = stack.enter_context(in_common("127.0.0.1", "::1"))
        origin.port = await stack.enter_async_context(serving(origin, first))
        port = await stack.enter_async_context(serving(socks := Socks(names={"a.test": "127.0.0.1"})))
        health = await stack.enter_async_context(healthy())
        by_name = Upstreams([Upstream("s", f"socks5h://127.0.0.1:{port}", remote_names=True)], health)
        assert await talks(await by_name(target("a.test", origin.port), [], seen := access()))
        assert seen.address is None
        assert await talks(await by_name(target("127.0.0.1", origin.port), [HERE], seen := access()))
        assert seen.address == "127.0.0.1"
        by_address = Upstreams([Upstream("s", f"socks5://127.0.0.1:{port}")], health)
        with pytest.raises(AccessRefused, match="no address"):
            await by_address(target("a.test", origin.port), [], access())
        v6 = IPv6Address("::1")
        async with serving(later, second):
            assert await talks(await by_address(target("a.test", origin.port), [v6], seen := access()))
        assert seen.address == "::1"
    assert socks.asked == [("a.test", origin.port), ("127.0.0.1", origin.port), ("::1", origin.port)]


@pytest.mark.parametrize(("reply", "code"), [(1, "unreachable"), (4, "unreachable"), (2, "upstream_refused")])
async def test_socks_that_says_no(origin: Origin, reply: int, code: str) -> None:
    async with serving(socks := Socks(reply=reply)) as port, healthy() as health:
        upstream = Upstream("s", f"socks5://127.0.0.1:{port}")
        with pytest.raises(AccessRefused) as raised:
            await Upstreams([upstream], health)(target("a.test", origin.port), [HERE], access())
        assert (raised.value.status, raised.value.code) == (502, code)
        assert health.works(upstream)
    assert len(socks.asked) == 1


# health


@pytest.fixture
def left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not work is not tried again within a test, however long that takes."""
    monkeypatch.setattr("carrel.egress.outbound.upstreams._FIRST_WAIT_S", 60.0)


@pytest.mark.usefixtures("left_alone")
async def test_when_all_are_down_nothing_goes_out_directly(origin: Origin) -> None:
    with nobody() as first, nobody() as second:
        upstreams = [
            Upstream("one", f"http://u:very-secret@127.0.0.1:{first}"),
            Upstream("two", f"socks5://u:very-secret@127.0.0.1:{second}"),
        ]
        async with healthy() as health:
            for _ in range(2):  # found out, and remembered
                with pytest.raises(AccessRefused, match="no upstream proxy works: 'one', 'two'") as raised:
                    await Upstreams(upstreams, health)(target("a.test", origin.port), [HERE], access())
                said = raised.value
                assert (said.status, said.code, said.retry) == (502, "upstream_unavailable", True)
                assert "very-secret" not in repr(said.as_dict())
                assert "very-secret" not in repr(upstreams)
                assert not any(map(health.works, upstreams))
    assert not origin.visits


async def test_who_has_no_upstreams_goes_directly(origin: Origin) -> None:
    dial = Upstreams([], Health(), timeout_s=5)
    assert await talks(await dial(target("a.test", origin.port), [HERE], seen := access()))
    assert (seen.address, seen.upstream) == ("127.0.0.1", None)


async def test_others_are_gone_through_after_a_change(origin: Origin) -> None:
    async with serving(socks := Socks()) as port, healthy() as health:
        dial = Upstreams([], health)
        dial.change([Upstream("s", f"socks5://127.0.0.1:{port}")])
        assert await talks(await dial(target("a.test", origin.port), [HERE], seen := access()))
        assert (seen.upstream, len(socks.asked)) == ("s", 1)
        with pytest.raises(InvalidRequest):
            dial.change([Upstream("odd", "ftp://h:1")])
        assert await talks(await dial(target("a.test", origin.port), [HERE], seen := access()))
        assert seen.upstream == "s"


@pytest.mark.usefixtures("left_alone")
async def test_one_that_comes_back_is_used_again(origin: Origin) -> None:
    async with AsyncExitStack() as stack:
        later = stack.enter_context(held())
        other = await stack.enter_async_context(serving(second := Socks()))
        health = await stack.enter_async_context(healthy(every_s=0.05))
        ports = {"one": later.getsockname()[1], "two": other}
        upstreams = [Upstream(name, f"socks5://127.0.0.1:{port}") for name, port in ports.items()]
        dial = Upstreams(upstreams, health)
        assert await talks(await dial(target("a.test", origin.port), [HERE], seen := access()))
        assert seen.upstream == "two"
        assert not health.works(upstreams[0])
        async with serving(first := Socks(), later):
            await until(lambda: health.works(upstreams[0]))
            assert await talks(await dial(target("a.test", origin.port), [HERE], seen := access()))
            assert seen.upstream == "one"
    assert (len(first.asked), len(second.asked)) == (1, 1)


async def test_each_failure_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5000.0
    monkeypatch.setattr("carrel.egress.outbound.upstreams.time", SimpleNamespace(monotonic=lambda: now))
    health, upstream = Health(), Upstream("one", "http://127.0.0.1:1")
    health.failed(upstream)
    state = health._states[upstream]
    waits = []
    for _ in range(10):
        health.failed(upstream)  # at the same time as the one before: counts once
        state.again -= 1000
        assert health.works(upstream)
        health.failed(upstream)
        waits.append(state.again - now)
    assert waits[:6] == [2, 4, 8, 16, 32, 60]
    assert max(waits) == 60
    health.worked(upstream)
    assert health.works(upstream)


@pytest.mark.parametrize("scheme", ["http", "socks5"])
@pytest.mark.parametrize(
    "said", [b"", b"SSH-2.0-x\r\n\r\n", b"\x04\x00" + b"HTTP/1.1\r\n" * 4000], ids=["", "odd", "long"]
)
@pytest.mark.usefixtures("left_alone")
async def test_one_that_makes_no_sense_is_left_for_the_next_and_looked_at(
    monkeypatch: pytest.MonkeyPatch, origin: Origin, scheme: str, said: bytes
) -> None:
    monkeypatch.setattr("carrel.egress.outbound.upstreams._REACH_S", 2.0)

    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read(1)
        if not said:
            await reader.read()  # silent until the other side goes

    async with serving(odd) as port, serving(Socks()) as other, healthy(every_s=60) as health:
        upstreams = [Upstream("one", f"{scheme}://127.0.0.1:{port}"), Upstream("two", f"socks5://127.0.0.1:{other}")]
        dial = Upstreams(upstreams, health, timeout_s=2.0)
        assert await talks(await dial(target("a.test", origin.port), [HERE], seen := access()))
        assert seen.upstream == "two"
        await until(lambda: not health.works(upstreams[0]))


@pytest.mark.parametrize("host", ["a..test", f"{'x' * 64}.test"])
async def test_one_whose_name_nobody_can_have_is_left_for_the_next_and_ends_no_looks(origin: Origin, host: str) -> None:
    async with serving(Socks()) as port, healthy() as health:
        upstreams = [Upstream("one", f"http://{host}:3128"), Upstream("two", f"socks5://127.0.0.1:{port}")]
        assert await talks(await Upstreams(upstreams, health)(target("a.test", origin.port), [HERE], seen := access()))
        assert seen.upstream == "two"
        await health._check(upstreams[0])
        assert not health.works(upstreams[0])


async def test_upstreams_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch, origin: Origin) -> None:
    monkeypatch.setattr("carrel.egress.outbound.upstreams._WANTED_S", 0.0)
    async with serving(Socks()) as port, healthy(every_s=0.02) as health:
        dial = Upstreams([Upstream("s", f"socks5://127.0.0.1:{port}")], health)
        assert await talks(await dial(target("a.test", origin.port), [HERE], access()))
        await until(lambda: not health._states)


async def test_a_dial_that_is_given_up_leaves_nothing(origin: Origin) -> None:
    waiting = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        waiting.set()
        await reader.read()

    async with serving(mute) as port, healthy() as health:
        dial = Upstreams([Upstream("s", f"http://127.0.0.1:{port}")], health)
        task = asyncio.ensure_future(dial(target("a.test", origin.port), [HERE], access()))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_url_that_cannot_be_read_is_refused_when_it_is_given() -> None:
    async def make() -> None:
        Upstreams([Upstream("s", "ftp://u:very-secret@h:1")], Health())

    with pytest.raises(InvalidRequest, match="'s'"):
        asyncio.run(make())


@pytest.fixture(scope="module")
def fast_loops() -> None:
    """The first loop of this kind makes pipes that its library keeps for good."""
    uvloop.new_event_loop().close()


@pytest.mark.usefixtures("fast_loops", "left_alone")
def test_the_same_on_the_loop_of_the_proxy(squid: Squid) -> None:
    async def all_of_it() -> None:
        async with serving(origin := Origin()) as origin.port:
            await test_the_first_address_that_answers_is_taken(origin)
            await test_an_address_that_is_silent_is_not_waited_for(origin)
            await test_two_that_answer_leave_one_connection()
            await test_nobody_there_is_said_in_words()
            await test_silence_ends()
            await test_squid_leads_on_with_credentials(squid, origin)
            await test_socks_with_user_and_password(origin)
            await test_one_that_comes_back_is_used_again(origin)
            await test_a_dial_that_is_given_up_leaves_nothing(origin)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_it())
