"""One client of a server: a process with one connection and one sandbox of its own. Only for the benchmark `workers`.

`python -m bench.worker_client` reads lines: first its orders as JSON, then `run SECONDS` or `reconnect`. It answers
each line with one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TypedDict

from bench.wire import SUCCESS, Wire, request

WRITTEN = b"x" * 1024


class ClientOrders(TypedDict):
    """What to do, and where. `mix`: also read and write files; otherwise only run commands."""

    address: tuple[str, int]
    token: str
    context: str
    mix: bool


class _Client:
    def __init__(self, orders: ClientOrders):
        self._address = (str(orders["address"][0]), int(orders["address"][1]))
        self._wire = Wire(self._address)
        headers = {"authorization": f"Bearer {orders['token']}", "content-type": "application/json"}
        body = json.dumps({"context_id": orders["context"], "network": "none"}).encode()
        made = json.loads(self._wire.call(request("POST", "/v1/sandboxes", body, headers)))
        box = f"/v1/sandboxes/{made['id']}"
        command = request("POST", f"{box}/commands", b'{"command":"true"}', headers)
        write = request("PUT", f"{box}/files/content?path=kept", WRITTEN, headers)
        read = request("GET", f"{box}/files/content?path=kept", b"", headers)
        self._wire.call(write)
        self._turns = [command, command, write, command, read] if orders["mix"] else [command]

    def reconnect(self) -> None:
        """Open another connection, which another worker may accept."""
        self._wire.close()
        self._wire = Wire(self._address)

    def run(self, seconds: float) -> list[float]:
        """Ask again and again; return how long each answer took."""
        took: list[float] = []
        clock = time.perf_counter
        ends = clock() + seconds
        while (began := clock()) < ends:
            message = self._turns[len(took) % len(self._turns)]
            body = self._wire.call(message)
            took.append(clock() - began)
            if message is self._turns[0] and SUCCESS not in body.replace(b": ", b":"):
                raise ValueError(f"a command failed: {body[:500].decode(errors='replace')}")
        return took


def main() -> None:
    """Follow the orders until standard input ends."""
    client: _Client | None = None
    for line in sys.stdin:
        if client is None:
            client = _Client(json.loads(line))
            print("ready", flush=True)
        elif line == "reconnect\n":
            client.reconnect()
            print("ready", flush=True)
        else:
            print(json.dumps(client.run(float(line.split()[1]))), flush=True)


if __name__ == "__main__":
    main()
