"""What only a worker itself knows, of all workers of a server together, whichever was asked: its metrics, and what its
sandboxes use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from carrel.control.nodes.passes import ADMINISTRATOR, ANYONE, HEADER, Forwardable, Passes
from carrel.control.nodes.peers import NotConnected
from carrel.control.nodes.routing import Routing
from carrel.control.nodes.workers import Worker
from carrel.errors import CarrelError, NodeUnreachable
from carrel.models import SandboxInfo, SandboxPage, State
from carrel.models.operations import GET_METRICS

log = logging.getLogger("carrel.api")

ANSWER_S = 2.0
"""How long another worker may take to answer; what it counts is left out then."""
MOST_BYTES = 32 * 1024 * 1024


class WorkerMetrics:
    """Asks the other workers of this server."""

    def __init__(self, routing: Routing, passes: Passes, worker: Worker, *, authenticated: bool):
        self._routing = routing
        self._passes = passes
        self._worker = worker
        self._caller = ADMINISTRATOR if authenticated else ANYONE

    async def of_others(self) -> list[str]:
        """Return the metrics of the other workers as text, without those that do not answer in time."""
        return await self.ask(GET_METRICS.path.encode())

    async def fill(self, target: bytes, infos: Sequence[SandboxInfo]) -> None:
        """Write what the owners know into records of running sandboxes. `target` is the request that lists them."""
        lacking = {info.id: info for info in infos if info.state is State.RUNNING and info.resources is None}
        if not lacking:
            return
        for text in await self.ask(target):
            for known in SandboxPage.model_validate_json(text).items:
                if known.resources is not None and (info := lacking.get(known.id)) is not None:
                    info.resources, info.last_activity_at = known.resources, known.last_activity_at

    async def ask(self, target: bytes) -> list[str]:
        """Return the answers of the other workers to a GET, without those that do not answer in time."""
        others = [name for name in self._worker.names if name != self._worker.name]
        found = await asyncio.gather(*(self._ask(name, target) for name in others))
        return [text for text in found if text is not None]

    async def _ask(self, name: str, target: bytes) -> str | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._text(name, target)
        except (CarrelError, NotConnected, OSError, UnicodeDecodeError) as error:  # a timeout is an `OSError`
            log.warning("what worker %s knows is missing: %s", name, str(error) or type(error).__name__)
            return None

    async def _text(self, name: str, target: bytes) -> str:
        peer = await self._routing.peer(name)
        if peer is None:
            raise NodeUnreachable("it does not answer")
        request = Forwardable("GET", target, [], "none")
        signed = self._passes.make(request, self._caller, peer.record.name, peer.record.boot)
        wire = await peer.wire()
        wire.begin(MOST_BYTES)
        try:
            assert wire.transport is not None
            head = (b"GET ", target, b" HTTP/1.1\r\nhost: ", peer.link.authority, b"\r\n", HEADER, b": ", signed)
            wire.transport.write(b"".join((*head, b"\r\n\r\n")))
            text = await wire.finish(ANSWER_S)
        finally:
            wire.release()
        if wire.status != 200:
            raise NodeUnreachable(f"it answered {wire.status}")
        return text.decode()
