"""The workspace of a run: client, context and approver. Never part of a checkpoint."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from carrel.client import AsyncClient, AsyncCommand, AsyncSandbox
from carrel.errors import CarrelError, InvalidRequest

AT_HAND_S = 2.0


@dataclass(frozen=True, eq=False)
class Workspace:
    """The `context=` of a run of the graph. It stays in the process, so its tokens never reach the database.

        await graph.ainvoke(given, config, context=Workspace(AsyncClient()))

    `client` acts with the caller's token. `context_id` is the context whose sandbox the tools use, by default the
    `thread_id` of the run. `approver` is a client whose token may approve: with it the answer to an interrupt decides
    the approval; without it somebody decides it with `carrel approve`.
    """

    client: AsyncClient
    context_id: str | None = None
    approver: AsyncClient | None = None
    template: str | None = None
    _running: dict[str, AsyncCommand] = field(default_factory=dict, init=False, repr=False)
    _starting: set[asyncio.Task[AsyncCommand]] = field(default_factory=set, init=False, repr=False)
    _at_hand: list[tuple[float, AsyncSandbox]] = field(default_factory=list, init=False, repr=False)

    def context(self, thread_id: str | None) -> str:
        """Return the context of a thread."""
        name = self.context_id or thread_id
        if not name:
            raise InvalidRequest(
                "the run has no context",
                field="thread_id",
                hint='pass {"configurable": {"thread_id": …}}, or a Workspace with a context_id',
            )
        return name

    def reuse_soon(self, box: AsyncSandbox) -> None:
        """Reuse a sandbox for the next seconds instead of asking the server for it again."""
        self._at_hand[:] = [(time.monotonic() + AT_HAND_S, box)]

    async def sandbox(self, context_id: str) -> AsyncSandbox:
        """Return the running sandbox of a context; create or resume it if needed."""
        for until, box in self._at_hand:
            if box.context_id == context_id and time.monotonic() < until:
                return box
        return await self.client.sandbox(context_id, template=self.template)

    def client_of_its_own(self) -> AsyncClient:
        """Make another client with the same token, for another event loop. The caller closes it."""
        return AsyncClient(self.client.url, self.client._connection.address.token)

    async def started(self, start: Callable[[], Awaitable[AsyncCommand]]) -> AsyncCommand:
        """Start a command. If the run is cancelled meanwhile, the start still completes: the server has the request."""

        async def begin() -> AsyncCommand:
            return await start()

        starting = asyncio.get_running_loop().create_task(begin())
        self._starting.add(starting)
        starting.add_done_callback(self._begun)
        return await asyncio.shield(starting)

    def _begun(self, starting: asyncio.Task[AsyncCommand]) -> None:
        self._starting.discard(starting)
        if not starting.cancelled():
            starting.exception()  # mark it as retrieved: the caller has received it

    async def settled(self) -> list[AsyncCommand]:
        """Wait for commands whose start is on its way, and return them."""
        found = await asyncio.gather(*self._starting, return_exceptions=True)
        return [each for each in found if isinstance(each, AsyncCommand)]

    def follow(self, command: AsyncCommand) -> None:
        """Remember a command while it runs."""
        self._running[command.id] = command

    def unfollow(self, command: AsyncCommand) -> None:
        """Drop a command that has ended."""
        self._running.pop(command.id, None)

    async def kill(self) -> None:
        """Kill the commands of this run with everything they started. For a run that is cancelled for good."""
        for command in [*self._running.values(), *await self.settled()]:
            try:
                await command.kill()
            except CarrelError:  # the sandbox may be gone, and the command with it
                continue


def own_id(thread_id: str | None, *parts: str | None) -> str:
    """Return the id of the command of one tool call; it is the same on every try, in every process."""
    return commands_of(thread_id) + _digest(*parts)[:24]


def commands_of(thread_id: str | None) -> str:
    """Return the prefix of the ids of a thread's commands, by which a killed process's commands are found."""
    return f"k{_digest(thread_id)[:16]}"


def _digest(*parts: str | None) -> str:
    return hashlib.sha256("\0".join(part or "" for part in parts).encode("utf-8", "surrogatepass")).hexdigest()
