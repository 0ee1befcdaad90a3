"""carrel's proxy as it runs beside a server, for one sandbox that may connect to one port of loopback.

`python -m bench.outward PORT` starts the egress process, receives its log as a control plane does, prints the port of
the sandbox's proxy, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from contextlib import suppress

import uvloop

from carrel.control.egress.client import EgressClient
from carrel.egress.plan import EgressPlan
from carrel.policy.documents import settings, sources
from carrel.policy.rules.layers import Layer
from carrel.primitives.channel import ChannelClosed, Message
from carrel.primitives.keyed_lock import KeyedLocks

MOST = 100_000


async def _serve(port: int, directory: str) -> None:
    loop = asyncio.get_running_loop()

    def take(message: Message) -> None:
        if message["op"] == "log":
            with suppress(ChannelClosed):
                client.send("ack", upto=message["upto"])

    client = EgressClient(
        directory,
        ["--cache", os.path.join(directory, "cache")],
        on_message=take,
        on_down=lambda: None,
        locks=KeyedLocks().of,
        last=True,
    )
    rules = settings.load(json.dumps({"permissions": {"allow": [f"network(outbound:127.0.0.1:{port})"]}}))
    limits = {"max_connections": MOST, "max_connections_per_minute": MOST}
    given = sources.load(json.dumps({"web_access": limits}))
    plan = EgressPlan("bench", None, (Layer("bench", rules, given),)).to_memory_file()
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
            await client.connect()
            await client.request("attach", (plan, listener.fileno()), sandbox="bench")
            print(listener.getsockname()[1], flush=True)
        ended = asyncio.Event()
        loop.add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()
        loop.remove_reader(sys.stdin.fileno())
    finally:
        os.close(plan)
        await client.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="carrel-b-") as directory:
        uvloop.run(_serve(int(sys.argv[1]), directory))
