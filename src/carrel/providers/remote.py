"""The server's side of a supervisor on another machine until it has an owner (see `carrel.supervisor.remote`).

A provider uses it so:

    # the supervisor was started with the credentials `identities.for_slot(pool)`
    address = RemoteAddress(host, port, identities.id_of_slot(pool))
    owned = await give_facts(address, identities, launch.id, facts_of(launch, …), ended)
    handle = {"provider": self.name, "id": …, "socket": str(owned)}

and its method `link` returns `RemoteLink(RemoteAddress.parse(handle["socket"]), identities.client_context)`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from carrel.errors import PlatformError
from carrel.primitives import tasks
from carrel.providers.control_directory import MOST_FACTS, START_DEADLINE_S
from carrel.providers.links import RemoteAddress, RemoteLink
from carrel.spiffe.sandboxes import SandboxIdentities

_LONGEST_REPORT = 4096
_LENGTH = 4
_PAUSE_S = 0.05


async def give_facts(
    slot: RemoteAddress, identities: SandboxIdentities, sandbox: str, facts: Mapping[str, Any], ended: Awaitable[str]
) -> RemoteAddress:
    """Make a waiting supervisor that of a sandbox, and return its address with its new ID. It becomes the agent, and no
    code of an agent has run before. One that does not listen yet is waited for. `ended` tells why it has ended, if it
    ends before. Raises `PlatformError`.
    """
    credentials = await asyncio.to_thread(identities.for_sandbox, sandbox)
    text = json.dumps({"facts": dict(facts), "credentials": asdict(credentials)}).encode()
    if len(text) > MOST_FACTS:
        raise PlatformError("the request to start a sandbox is too large", hint="pass a smaller environment")
    report = _Report(len(text).to_bytes(_LENGTH, "big") + text)
    try:
        said = await _first(_told(RemoteLink(slot, identities.client_context), report), ended)
    except TimeoutError:
        said = f"it did not answer in {START_DEADLINE_S:.0f} s"
    except OSError as error:
        said = f"no connection to {slot.host}:{slot.port}: {error}"
    finally:
        report.close()
    if said != "ready":
        raise PlatformError(
            f"the supervisor did not start: {said.removeprefix('failed: ')[:1000] or 'it ended at once'}"
        )
    return replace(slot, id=identities.id_of(sandbox))


async def _told(link: RemoteLink, report: _Report) -> str:
    async with asyncio.timeout(START_DEADLINE_S):
        while True:
            try:
                await link.connect(lambda: report)
            except ConnectionRefusedError:
                await asyncio.sleep(_PAUSE_S)
            else:
                report.send()
                return await report.said


async def _first(told: Coroutine[None, None, str], ended: Awaitable[str]) -> str:
    """Return the report, or what is known of the end of the supervisor, whichever comes first."""
    both = asyncio.ensure_future(told), asyncio.ensure_future(ended)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return both[0].result() if both[0].done() else f"failed: {both[1].result()}"
    finally:
        await tasks.cancel(both)


class _Report(asyncio.Protocol):
    """A connection that sends one message, and takes what the supervisor says until it closes."""

    def __init__(self, message: bytes):
        self._message = message
        self._transport: asyncio.Transport | None = None
        self._answer = bytearray()
        self.said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # with TLS, that of uvloop does not derive from it

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if len(self._answer) > _LONGEST_REPORT:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.said.done():
            self.said.set_result(self._answer[:_LONGEST_REPORT].decode(errors="replace"))

    def send(self) -> None:
        """Send the message: the peer is known now."""
        assert self._transport is not None
        self._transport.write(self._message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
