from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carrel.audit import Filter, chain_of
from carrel.control.egress_log import AccessLog
from carrel.control.plane import ControlPlane
from carrel.egress.ledger import item_of
from carrel.egress.terms import Access, Said, Target
from sandboxes import until


def access(number: int, host: str = "a.example", **more: Any) -> Access:
    said = Said("allow", "it is allowed", "network(outbound:a.example)", "settings.json")
    return Access("sbx-1", "connect", Target(host, 443), said=said, number=number, began=100.0, **more)


async def plain(_context: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
    return {name: "[hidden]" if value == "secret.example" else value for name, value in arguments.items()}


async def written(plane: ControlPlane) -> list[tuple[str, str | None, int | None, str | None]]:
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain=chain_of("c"), kind="network"), limit=100)
    return [(str(each.arguments["host"]), each.result, each.bytes_in, each.reason) for each in page.items[::-1]]


async def test_what_lasts_is_written_twice_and_what_is_short_once(plane: ControlPlane) -> None:
    acked: list[int] = []
    log = AccessLog(plane.audit, plane.metrics, plain, acked.append)
    log.start()
    short, long = access(1), access(2, "secret.example")
    log.take(1, [item_of(long)], lambda _: "c")
    log.take(2, [item_of(short)], lambda _: "c")
    short.ended, short.received = 101.0, 7
    log.take(3, [item_of(short)], lambda _: "c")
    await until(lambda: acked == [3], what="an acknowledgement")
    assert await written(plane) == [("[hidden]", None, None, None), ("a.example", "ok", 7, None)]
    long.ended, long.result = 102.0, "broken_off"
    log.take(4, [item_of(long)], lambda _: "c")
    await until(lambda: acked == [3, 4], what="an acknowledgement")
    assert (await written(plane))[0] == ("[hidden]", "broken_off", 0, None)
    await log.close()
    rows = [item async for item in plane.audit.export([chain_of("c")])]
    assert b"".join(rows).count(b'"kind":"network"') == 2 + 1  # the begin and the end of one, the whole of the other


async def test_the_way_of_what_lasts_is_known_at_its_end(plane: ControlPlane) -> None:
    log = AccessLog(plane.audit, plane.metrics, plain, lambda _: None)
    log.start()
    long = access(1, address="192.0.2.1")
    log.take(1, [item_of(long)], lambda _: "c")
    await until(lambda: written(plane), what="the begin")
    long.upstream, long.address, long.ended = "eu", None, 101.0
    log.take(2, [item_of(long)], lambda _: "c")
    await log.close()
    await plane.audit.flush()
    [found] = (await plane.audit.search(Filter(chain=chain_of("c"), kind="network"), limit=9)).items
    assert (found.arguments["address"], found.arguments["upstream"], found.result) == ("192.0.2.1", "eu", "ok")
    [sought] = (await plane.audit.search(Filter(chain=chain_of("c"), result="ok", kind="network"), limit=9)).items
    assert sought.arguments == found.arguments


async def test_what_the_proxy_had_open_when_it_died_is_closed_as_unknown(plane: ControlPlane) -> None:
    acked: list[int] = []
    log = AccessLog(plane.audit, plane.metrics, plain, acked.append)
    log.start()
    log.take(1, [item_of(access(1))], lambda _: "c")
    log.lost()
    await until(lambda: acked == [1], what="an acknowledgement")
    log.take(1, [item_of(access(1, "b.example", ended=101.0))], lambda _: "c")  # the next one counts anew
    await log.close()
    assert await written(plane) == [
        ("a.example", "unknown", None, "the egress process ended"),
        ("b.example", "ok", 0, None),
    ]


async def test_a_refusal_is_one_record_with_its_reason(plane: ControlPlane) -> None:
    log = AccessLog(plane.audit, plane.metrics, plain, lambda _: None)
    log.start()
    refused = access(1, ended=101.0, result="denied_by_policy")
    refused.said = Said("deny", "no", "r", "s", None, "apr-1")
    log.take(1, [item_of(refused)], lambda _: None)
    await log.close()
    await plane.audit.flush()
    [found] = (await plane.audit.search(Filter(chain=chain_of(None, "sbx-1")), limit=9)).items
    assert (found.decision, found.result, found.reason, found.approval) == ("deny", "denied_by_policy", "no", "apr-1")
