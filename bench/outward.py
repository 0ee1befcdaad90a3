"""carrel's proxy in a process of its own, as it serves one sandbox that may reach one port of loopback.

`python -m bench.outward PORT` prints the proxy's port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
from collections.abc import Sequence

import uvloop

from carrel.egress.gateway import Gateway
from carrel.egress.ledger import Item, Ledger
from carrel.egress.passage import Passage
from carrel.egress.plan import Plan
from carrel.egress.terms import Address, Refused, Said, Target
from carrel.egress.upstreams import dial_directly
from carrel.policy import settings, sources
from carrel.policy.layers import Layer

MOST = 100_000


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    ledger = Ledger()

    def take(place: int, _items: list[Item]) -> bool:
        loop.call_soon(ledger.acknowledged, place)  # written down by somebody else
        return True

    ledger.listen(take)
    rules = settings.load(json.dumps({"permissions": {"allow": [f"network(outbound:127.0.0.1:{port})"]}}))
    limits = {"max_connections": MOST, "max_connections_per_minute": MOST}
    given = sources.load(json.dumps({"web_access": limits}))
    passage = Passage(
        Plan("bench", None, (Layer("bench", rules, given),)),
        resolve=_resolve,
        dial=dial_directly,
        ask=_ask,
        report=ledger,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    gateway = Gateway(listener, passage)
    gateway.start()
    print(listener.getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())
    await gateway.drain(0)


async def _resolve(name: str) -> Sequence[Address]:
    raise Refused(f"nobody knows {name}", status=502)


async def _ask(_sandbox: str, _target: Target, said: Said) -> Said:
    return Said("deny", said.reason)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # as the real process does
    uvloop.run(_serve(int(sys.argv[1])))
