"""Finding out what an MCP server of a context offers, in a sandbox of its own that lasts for that long.

It has a copy of the workspace as it is now, and the policy, the way out, the secrets and the limits of the context: the
server finds what it would find there, and what it breaks is thrown away. A server that lies, hangs, floods or dies is
told of in words. However many ask, one looks; and however many servers a context has, one of them is asked at a time,
so that those who hang keep nobody else waiting.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from weakref import WeakValueDictionary

from carrel.control.mcp.links import begin
from carrel.control.mcp.request_checks import LONGEST_REASON, Json, NoAnswer, Refused, launch, words
from carrel.control.python.calls import Redactors
from carrel.control.sessions.owners import DISCOVERS, LABEL
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.workspaces import Workspaces, cap_bytes
from carrel.errors import CarrelError
from carrel.metrics import OK, Metrics, outcome_of
from carrel.models import SandboxRequest
from carrel.store import SessionRecord
from carrel.store.mcp_servers import McpServerRecord, McpServerStore

log = logging.getLogger("carrel.mcp")

PARALLEL = 4
PREFIX = "mcp-"
"""How the pictures of workspaces begin that are taken for this. They last only until they are copied."""

Found = tuple[Json | None, str | None]


class McpDiscovery:
    """Asks servers what they offer, and keeps the answers."""

    def __init__(
        self,
        store: McpServerStore,
        sessions: Sessions,
        workspaces: Workspaces,
        metrics: Metrics,
        redactor: Redactors,
        *,
        start_s: float,
        timeout_s: float,
    ):
        self._store = store
        self._sessions = sessions
        self._workspaces = workspaces
        self._metrics = metrics
        self._redactor = redactor
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._gate = asyncio.Semaphore(PARALLEL)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: dict[tuple[str, str, str], asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Remove what a server before this one left half done."""
        driver = self._workspaces.driver
        for name in await asyncio.to_thread(driver.snapshots):
            if name.startswith(PREFIX):
                await asyncio.to_thread(driver.delete_snapshot, name)

    async def close(self) -> None:
        """Break off what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self, session: SessionRecord, server: McpServerRecord) -> None:
        """Ask a server of a context, and keep what it offers or why it could not be asked. Whoever stops waiting does
        not stop it.
        """
        key = (server.context_id, server.name, server.generation)
        task = self._running.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._look(session, server))
            self._running[key] = task
            task.add_done_callback(lambda _task: self._running.pop(key, None))
        await asyncio.shield(task)

    async def _look(self, session: SessionRecord, server: McpServerRecord) -> None:
        turn = self._turns.setdefault(server.context_id, asyncio.Lock())
        async with turn, self._gate:
            now = await self._store.declared(server.context_id, server.name)
            if now is None or now.generation != server.generation:
                return  # it was changed while it waited: nobody would keep the answer
            began = time.monotonic()
            outcome = OK
            try:
                found, why = await self._ask(session, server)
            except CarrelError as error:
                outcome = outcome_of(error)
                found, why = None, error.detail
            self._metrics.mcp_discovered(outcome, time.monotonic() - began)
        await self.keep(server, found, why)

    async def keep(self, server: McpServerRecord, found: Json | None, why: str | None) -> None:
        """Write down what a server offers, or why that is not known. Without secrets: it may be shown where they are
        not known any more, or never were, as in a fork.
        """
        redactor = await self._redactor(server.context_id or None)
        if found is not None:
            found = await asyncio.to_thread(redactor.value, found)
        if why is not None:
            why = redactor.text(words(why, LONGEST_REASON))
        await self._store.discovered(server.context_id, server.name, server.generation, found, why, time.time())

    async def _ask(self, session: SessionRecord, server: McpServerRecord) -> Found:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._within(session, server)
        except TimeoutError:
            return None, f"it could not be asked within {self._timeout_s:g} seconds"

    async def _within(self, session: SessionRecord, server: McpServerRecord) -> Found:
        self._sessions.require_here(session)
        request = SandboxRequest(
            template=session.template,
            provider=session.provider,
            trust=session.trust,
            network=session.network,
            limits=session.limits,
            env=dict(session.env),
            labels={LABEL: DISCOVERS},
        )
        made = await self._sessions.start_own(request, server.context_id, lambda own: self._copy(session, own))
        try:
            return await self._spoken(made.id, server)
        finally:
            await asyncio.shield(self._end(made.id))

    async def _spoken(self, sandbox_id: str, server: McpServerRecord) -> Found:
        box = await self._sessions.find(sandbox_id)
        conversation = await begin(box, server.name, launch(server, server.environment), self._start_s)
        try:
            return await conversation.offers(self._timeout_s)
        except Refused as error:
            return None, f"it refused to say what it offers: {error.message}"
        except NoAnswer:
            return None, "it does not say what it offers"
        finally:
            await conversation.close()

    async def _copy(self, session: SessionRecord, own: SessionRecord) -> None:
        """Give the sandbox the files that the context has now. A thread cannot be broken off: whoever is has to wait
        for it, or it would make what was tidied up already.
        """
        copying = asyncio.ensure_future(asyncio.to_thread(self._copied, session, own))
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.gather(copying, return_exceptions=True)
            raise

    def _copied(self, session: SessionRecord, own: SessionRecord) -> None:
        driver, source = self._workspaces.driver, self._workspaces.volume(session)
        if not driver.exists(source):
            return
        picture = f"{PREFIX}{secrets.token_hex(8)}"
        try:
            driver.snapshot(source, picture)
            driver.fork(picture, self._workspaces.volume(own), cap_bytes(own))
        finally:
            driver.delete_snapshot(picture)

    async def _end(self, sandbox_id: str) -> None:
        try:
            await self._sessions.end_own(sandbox_id)
        except CarrelError as error:
            log.warning("sandbox %s, which asked an MCP server, could not be ended: %s", sandbox_id, error)
