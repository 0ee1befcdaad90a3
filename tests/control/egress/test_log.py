from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.sandboxes import until

from carrel.audit import Filter, chain_of
from carrel.control.egress.connection_events import ConnectionEvents
from carrel.control.egress.log import AccessLogWriter, AccessOwner
from carrel.control.plane import ControlPlane
from carrel.egress.access import Access, Target
from carrel.egress.access_log import item_of
from carrel.errors import PlatformError
from carrel.policy.verdict import Verdict

OWNER = AccessOwner("c", "coder")


def access(number: int, host: str = "a.example", **more: Any) -> Access:
    said = Verdict("allow", "it is allowed", "network(outbound:a.example)", "settings.json")
    return Access("sbx-1", "connect", Target(host, 443), verdict=said, number=number, began=100.0, **more)


async def plain(_context: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
    return {name: "[hidden]" if value == "secret.example" else value for name, value in arguments.items()}


async def written(plane: ControlPlane) -> list[tuple[str, str | None, int | None, str | None]]:
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain=chain_of("c"), kind="network"), limit=100)
    return [(str(each.arguments["host"]), each.result, each.bytes_in, each.reason) for each in page.items[::-1]]


async def whose(_sandbox: str) -> AccessOwner:
    raise AssertionError("every owner is known here")


async def test_what_lasts_is_written_twice_and_what_is_short_once(plane: ControlPlane) -> None:
    acked: list[int] = []
    log = AccessLogWriter(plane.audit, plane.metrics, ConnectionEvents(plane.events), plain, acked.append, None, whose)
    log.start()
    short, long = access(1), access(2, "secret.example")
    log.take(1, [item_of(long)], lambda _: OWNER)
    log.take(2, [item_of(short)], lambda _: OWNER)
    short.ended, short.received = 101.0, 7
    log.take(3, [item_of(short)], lambda _: OWNER)
    await until(lambda: acked == [3], what="an acknowledgement")
    assert await written(plane) == [("[hidden]", None, None, None), ("a.example", "ok", 7, None)]
    long.ended, long.result = 102.0, "broken_off"
    log.take(4, [item_of(long)], lambda _: OWNER)
    await until(lambda: acked == [3, 4], what="an acknowledgement")
    assert (await written(plane))[0] == ("[hidden]", "broken_off", 0, None)
    await log.close()
    rows = [item async for item in plane.audit.export([chain_of("c")])]
    assert b"".join(rows).count(b'"kind":"network"') == 2 + 1  # the begin and the end of one, the whole of the other


async def test_the_way_of_what_lasts_is_known_at_its_end(plane: ControlPlane) -> None:
    log = AccessLogWriter(
        plane.audit, plane.metrics, ConnectionEvents(plane.events), plain, lambda _: None, None, whose
    )
    log.start()
    long = access(1, address="192.0.2.1")
    log.take(1, [item_of(long)], lambda _: OWNER)
    await until(lambda: written(plane), what="the begin")
    long.upstream, long.address, long.ended = "eu", None, 101.0
    long.method, long.path = "GET", "secret.example"
    log.take(2, [item_of(long)], lambda _: OWNER)
    await log.close()
    await plane.audit.flush()
    [found] = (await plane.audit.search(Filter(chain=chain_of("c"), kind="network"), limit=9)).items
    assert (found.arguments["address"], found.arguments["upstream"], found.result) == ("192.0.2.1", "eu", "ok")
    assert (found.arguments["method"], found.arguments["path"]) == ("GET", "[hidden]")
    assert (found.context_id, found.agent) == ("c", "coder")
    [sought] = (await plane.audit.search(Filter(chain=chain_of("c"), result="ok", kind="network"), limit=9)).items
    assert sought.arguments == found.arguments


async def test_what_the_proxy_had_open_when_it_died_is_closed_as_unknown(plane: ControlPlane) -> None:
    acked: list[int] = []
    log = AccessLogWriter(plane.audit, plane.metrics, ConnectionEvents(plane.events), plain, acked.append, None, whose)
    log.start()
    log.take(1, [item_of(access(1))], lambda _: OWNER)
    log.lost()
    await until(lambda: acked == [1], what="an acknowledgement")
    log.take(1, [item_of(access(1, "b.example", ended=101.0))], lambda _: OWNER)  # the next one counts anew
    await log.close()
    assert await written(plane) == [
        ("a.example", "unknown", None, "the egress process ended"),
        ("b.example", "ok", 0, None),
    ]


async def test_what_fails_for_a_moment_is_written_all_the_same(plane: ControlPlane) -> None:
    acked: list[int] = []
    failures = [RuntimeError("can't start new thread"), OSError(24, "Too many open files")]

    async def redact(context: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
        if failures:
            raise failures.pop()
        return await plain(context, arguments)

    log = AccessLogWriter(plane.audit, plane.metrics, ConnectionEvents(plane.events), redact, acked.append, None, whose)
    log.start()
    log.take(1, [item_of(access(1, ended=101.0)), item_of(access(2, "b.example", ended=101.0))], lambda _: OWNER)
    log.take(2, [item_of(access(3, "c.example", ended=101.0))], lambda _: OWNER)
    await until(lambda: acked == [2], what="an acknowledgement")
    await log.close()
    assert [host for host, *_ in await written(plane)] == ["a.example", "b.example", "c.example"]


async def test_what_a_killed_proxy_leaves_is_not_taken_for_what_one_before_it_told(plane: ControlPlane) -> None:
    """A proxy that ended in good order leaves no journal: the next one counts anew."""
    log = AccessLogWriter(
        plane.audit, plane.metrics, ConnectionEvents(plane.events), plain, lambda _: None, None, whose
    )
    log.start()
    log.take(1, [item_of(access(1, ended=101.0))], lambda _: OWNER)
    log.lost()
    left = access(1, "b.example", ended=205.0, result="unknown")
    left.began = 200.0
    known = {**item_of(access(1, ended=101.0)), "recovered": True}
    log.take(1, [known], lambda _: OWNER)
    log.lost()
    log.take(1, [{**item_of(left), "recovered": True}], lambda _: OWNER)
    await log.close()
    assert [host for host, *_ in await written(plane)] == ["a.example", "b.example"]


async def test_a_refusal_is_one_record_with_its_reason(plane: ControlPlane) -> None:
    async def nobody(_sandbox: str) -> AccessOwner:
        return AccessOwner()

    log = AccessLogWriter(
        plane.audit, plane.metrics, ConnectionEvents(plane.events), plain, lambda _: None, None, nobody
    )
    log.start()
    refused = access(1, ended=101.0, result="denied_by_policy")
    refused.verdict = Verdict("deny", "no", "r", "s", None, "apr-1")
    log.take(1, [item_of(refused)], lambda _: None)
    await log.close()
    await plane.audit.flush()
    [found] = (await plane.audit.search(Filter(chain=chain_of(None, "sbx-1")), limit=9)).items
    assert (found.decision, found.result, found.reason, found.approval) == ("deny", "denied_by_policy", "no", "apr-1")


async def test_why_something_was_refused_is_told_without_secrets(plane: ControlPlane) -> None:
    await plane.secrets.put("c", "KEY", b"correct-horse-battery")
    log = AccessLogWriter(
        plane.audit,
        plane.metrics,
        ConnectionEvents(plane.events),
        plane.secret_values.clean,
        lambda _: None,
        None,
        whose,
    )
    log.start()
    host = "correct-horse-battery.example"
    refused = access(1, host, ended=101.0, result="denied_by_policy")
    refused.verdict = Verdict("deny", f"{host} is not among the domains of this agent")
    log.take(1, [item_of(refused)], lambda _: OWNER)
    await log.close()
    why = "[secret:KEY].example is not among the domains of this agent"
    assert await written(plane) == [("[secret:KEY].example", "denied_by_policy", 0, why)]


async def test_what_was_under_way_when_the_proxy_was_killed_is_written_however_often_it_takes(
    plane: ControlPlane,
) -> None:
    acked: list[int] = []
    tried = 0

    async def at_the_second(_context: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise PlatformError("the database is away")
        return dict(arguments)

    log = AccessLogWriter(
        plane.audit, plane.metrics, ConnectionEvents(plane.events), at_the_second, acked.append, None, whose
    )
    log.start()
    unknown = {"ended": 101.0, "result": "unknown", "reason": "the proxy was killed", "recovered": True}
    log.take(1, [{**item_of(access(1)), **unknown}], lambda _: OWNER)
    await until(lambda: acked == [1], what="an acknowledgement")
    assert await written(plane) == [("a.example", "unknown", 0, "the proxy was killed")]
    log.take(1, [{**item_of(access(1)), **unknown}], lambda _: OWNER)  # told again: it was written already
    await log.close()
    assert len(await written(plane)) == 1
