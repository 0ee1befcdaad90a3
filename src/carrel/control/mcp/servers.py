"""Operations on the MCP servers of contexts: add, list, start, stop, remove, read the catalogue, call. Each passes
admission.

Policy decides a call as `mcp(server:tool)`, where the server is the one that was asked and never what a catalogue
claims. Reading a catalogue starts nothing. A call resumes a stopped sandbox.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from carrel.control.governance.redaction import in_thread_if_large
from carrel.control.mcp.catalogue import (
    McpDiscovery,
    catalogue_info,
    given_size,
    is_tool_name,
    platform_info,
    redacted_log,
    server_info,
)
from carrel.control.mcp.declarations import McpDeclarations, McpInstaller, declared, launch, policy_arguments
from carrel.control.mcp.links import (
    REFUSED,
    TIMED_OUT,
    McpLinks,
    NoAnswer,
    RequestRefused,
    refusal_answer,
    timeout_answer,
)
from carrel.control.mcp.platform import PlatformServer, PlatformServers
from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.control.operations.traces import passed_on
from carrel.control.python.calls import Redactors
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.sessions import Sessions
from carrel.control.supervisor.client import McpProcess
from carrel.control.supervisor.connection import Json
from carrel.errors import CarrelError, Conflict, InvalidRequest, LimitExceeded, NotFound, NotRunning, SandboxLost
from carrel.metrics import OK, Metrics, outcome_of
from carrel.models import (
    MCP_TIMEOUT_S,
    MOST_MCP_SERVERS,
    McpCatalogue,
    McpLog,
    McpRequest,
    McpResult,
    McpServerInfo,
    McpServerList,
    McpServerRequest,
    SandboxRequest,
    State,
)
from carrel.models import operations as op
from carrel.primitives.cache import Cache
from carrel.store import SessionRecord
from carrel.store.mcp_servers import McpServerRecord, McpServerStore

if TYPE_CHECKING:
    from mcp.shared.dispatcher import ProgressFnT

    from carrel.control.mcp.session import Speaker

PLATFORM = ""
"""The context under which the store keeps the servers of the operator."""
OFFERED_S = 2.0
"""How long `offered` uses a catalogue before it reads it again."""
MOST_OFFERED = 64
LOG_KEPT = 256 * 1024
"""Bytes of a server's log that its supervisor keeps."""
T = TypeVar("T")
Ask = Callable[["Speaker"], Awaitable[Json]]


class McpServers:
    """The operations of callers on MCP servers."""

    def __init__(
        self,
        store: McpServerStore,
        declarations: McpDeclarations,
        sessions: Sessions,
        operations: Operations,
        installing: McpInstaller,
        discovery: McpDiscovery,
        links: McpLinks,
        platform: PlatformServers,
        redactor: Redactors,
        metrics: Metrics,
    ):
        self._store = store
        self._declarations = declarations
        self._sessions = sessions
        self._operations = operations
        self._installing = installing
        self._discovery = discovery
        self._links = links
        self._platform = platform
        self._redactor = redactor
        self._metrics = metrics
        self._offered: Cache[tuple[str, str], tuple[McpCatalogue, str | None]] = Cache(MOST_OFFERED, OFFERED_S)

    # declaring

    async def add(self, caller: Caller, name: str, server: str, request: McpServerRequest) -> McpServerInfo:
        """Declare a server, or declare it again: install its packages, and ask it for its catalogue."""
        session, context = await self._durable(name)
        if server in self._platform:
            raise Conflict(f"the operator runs an MCP server '{server}'", field="server", hint="choose another name")
        arguments = policy_arguments(server, request)
        async with self._operations.admit(caller, op.ADD_MCP_SERVER, arguments, session.id, context):
            _room(len([each for each in await self._store.list(context) if each.name != server]))
            environment = await self._installing.python(session, request)
            program = None
            if request.npm is not None:
                async with self._in_use(caller, session) as box:
                    program = await self._installing.npm(box, server, request)
            now = time.time()
            record = McpServerRecord(
                context_id=context,
                name=server,
                declaration=request.model_dump(mode="json", exclude_defaults=True),
                generation=secrets.token_hex(12),
                created_at=now,
                updated_at=now,
                enabled=request.enabled,
                environment=environment,
                program=program,
            )
            record = await self._store.put(record, _room)
            self._declarations.changed(context, server)
            await self._end_process(session, server, forget=True)
            if record.enabled:
                await self._discovery.look(session, record)
            return await self._info(session, await self._known(context, server))

    async def remove(self, caller: Caller, name: str, server: str) -> None:
        """End a server and forget it. Its npm packages are deleted if its sandbox runs."""
        session, context = await self._durable(name)
        async with self._operations.admit(caller, op.REMOVE_MCP_SERVER, {"server": server}, session.id, context):
            record = await self._known(context, server)
            await self._store.delete(context, server)
            self._declarations.changed(context, server)
            await self._end_process(session, server, forget=True)
            box = self._running_now(session)
            if declared(record).npm is not None and box is not None:
                await self._installing.remove(box, server)

    async def start(self, caller: Caller, name: str, server: str) -> McpServerInfo:
        """Enable a server and start it."""
        session, context = await self._durable(name)
        async with self._operations.admit(caller, op.ENABLE_MCP_SERVER, {"server": server}, session.id, context):
            record = await self._known(context, server)
            async with self._in_use(caller, session) as box:
                await self._conversation(caller, box, record, starting=True)
            await self._store.enable(context, server, enabled=True)
            self._declarations.changed(context, server)
            return await self._info(session, await self._known(context, server))

    async def stop(self, caller: Caller, name: str, server: str) -> McpServerInfo:
        """End a server, and disable it until it is started again."""
        session, context = await self._durable(name)
        async with self._operations.admit(caller, op.STOP_MCP_SERVER, {"server": server}, session.id, context):
            await self._known(context, server)
            await self._store.enable(context, server, enabled=False)
            self._declarations.changed(context, server)
            await self._end_process(session, server)
            return await self._info(session, await self._known(context, server))

    # looking

    async def list(self, caller: Caller, name: str) -> McpServerList:
        """List the servers of a context and of the operator by name, with the state of their processes."""
        session, context = await self._durable(name)
        async with self._operations.admit(caller, op.LIST_MCP_SERVERS, {}, session.id, context):
            processes, redactor = await self._processes(session), await self._redactor(context)
            own = [each for each in await self._store.list(context) if each.name not in self._platform]
            found = [server_info(context, each, processes.get(each.name), redactor) for each in own]
            outside = {name: await self._store.get(PLATFORM, name) for name in self._platform.names()}
            found += [platform_info(context, name, record, redactor) for name, record in outside.items()]
            return McpServerList(items=sorted(found, key=lambda each: each.name))

    async def get(self, caller: Caller, name: str, server: str) -> McpServerInfo:
        session, context = await self._durable(name)
        async with self._operations.admit(caller, op.GET_MCP_SERVER, {"server": server}, session.id, context):
            if server in self._platform:
                record = await self._store.get(PLATFORM, server)
                return platform_info(context, server, record, await self._redactor(context))
            return await self._info(session, await self._known(context, server))

    async def log(self, caller: Caller, name: str, server: str, *, offset: int = 0, limit: int = 64 * 1024) -> McpLog:
        """Return the standard error of a server in the sandbox that runs now."""
        session, context = await self._durable(name)
        arguments = {"server": server, "offset": offset}
        async with self._operations.admit(caller, op.GET_MCP_LOG, arguments, session.id, context) as traffic:
            await self._known(context, server)
            box, redactor = await self._sessions.find(session.id), await self._redactor(context)
            behind = min(offset, redactor.lookbehind, LOG_KEPT)
            try:
                page = await box.connection.mcp_log(server, offset, limit)
                before = await box.connection.mcp_log(server, offset - behind, behind) if behind else None
            except NotFound:  # it was never used in this sandbox
                return McpLog(text="", offset=0, next=0)
            except SandboxLost:
                await self._sessions.lost(box)
                raise
            traffic.count_out(len(page.text))
            return redacted_log(page, before, await self._redactor(context))

    async def catalogue(self, caller: Caller, name: str, server: str) -> McpCatalogue:
        """Return the stored catalogue of a server; starts nothing."""
        session, context = await self._durable(name)
        async with self._operations.admit(caller, op.GET_MCP_CATALOGUE, {"server": server}, session.id, context):
            return await self._catalogue(context, server)

    async def offered(self, name: str, server: str) -> McpCatalogue:
        """Return the catalogue, at most `OFFERED_S` old, to serve it at a URL. Not an operation of a caller. `NotFound`
        when there is no such server.
        """
        _, context = await self._durable(name)
        known = None if server in self._platform else (await self._declared(context, server)).generation
        found, generation = self._offered.get((context, server)) or (None, None)
        if found is None or generation != known:
            found = await self._catalogue(context, server)
            self._offered.put((context, server), (found, known))
        return found

    async def refresh(self, caller: Caller, name: str, server: str) -> McpCatalogue:
        """Ask a server for its catalogue again, in a sandbox of its own."""
        session, context = await self._durable(name)
        async with self._operations.admit(caller, op.REFRESH_MCP_SERVER, {"server": server}, session.id, context):
            if server in self._platform:
                await self._discover_platform(self._platform.get(server))
            else:
                await self._discovery.look(session, await self._ready(session, await self._known(context, server)))
            return await self._catalogue(context, server)

    # asking

    async def request(
        self, caller: Caller, name: str, server: str, request: McpRequest, progress: ProgressFnT | None = None
    ) -> McpResult:
        if not is_tool_name(request.tool):
            raise InvalidRequest("this is not the name of a tool", field="tool", hint="list the tools of the server")
        began = time.monotonic()
        answer = await self._ask(
            caller,
            name,
            server,
            request.tool,
            {"arguments": request.arguments},
            lambda speaker: speaker.call_tool(
                request.tool, request.arguments, request.timeout, progress, passed_on(caller)
            ),
            request.timeout,
        )
        return McpResult(
            server=server,
            tool=request.tool,
            content=answer.get("content", []),
            structured_content=answer.get("structuredContent"),
            is_error=bool(answer.get("isError")),
            timed_out=bool(answer.get(TIMED_OUT)),
            error=answer.get(REFUSED),
            duration_ms=(time.monotonic() - began) * 1000,
        )

    async def read_resource(self, caller: Caller, name: str, server: str, uri: str) -> Json:
        """Read a resource. Decided as `mcp(server:resources/read)`."""
        ask: Ask = lambda speaker: speaker.read_resource(uri, MCP_TIMEOUT_S)  # noqa: E731
        return await self._ask(caller, name, server, "resources/read", {"uri": uri}, ask, MCP_TIMEOUT_S)

    async def get_prompt(
        self, caller: Caller, name: str, server: str, prompt: str, arguments: Mapping[str, str] | None
    ) -> Json:
        """Get a prompt with its arguments filled in. Decided as `mcp(server:prompts/get)`."""
        ask: Ask = lambda speaker: speaker.get_prompt(prompt, arguments, MCP_TIMEOUT_S)  # noqa: E731
        given = {"prompt": prompt, "arguments": dict(arguments or {})}
        return await self._ask(caller, name, server, "prompts/get", given, ask, MCP_TIMEOUT_S)

    async def _ask(
        self, caller: Caller, name: str, server: str, tool: str, given: Mapping[str, object], ask: Ask, timeout: float
    ) -> Json:
        """Admit a request and send it to a server. Return its answer without secrets; a refusal is an answer too."""
        size_in = given_size(given)
        session, context = await self._durable(name)
        outside = server in self._platform
        began = time.monotonic()
        outcome = OK
        arguments = {"server": server, "tool": tool, **given}
        try:
            async with self._operations.admit(caller, op.MCP_REQUEST, arguments, session.id, context) as traffic:
                traffic.count_in(size_in)
                try:
                    if outside:
                        async with self._platform.get(server).spoken(timeout) as speaker:
                            answer = await ask(speaker)
                    else:
                        known = await self._declared(context, server)
                        answer = await self._ask_in_sandbox(caller, session, known, ask)
                except NoAnswer:
                    answer = timeout_answer(timeout)
                except RequestRefused as error:
                    answer = refusal_answer(error)
                outcome = "timed_out" if TIMED_OUT in answer else "tool_error" if answer.get("isError") else OK
                size = len(json.dumps(answer))
                traffic.count_out(size)
                traffic.told = {"exit": outcome}
                clean = (await self._redactor(context)).value
                return await in_thread_if_large(size, clean, answer)
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._metrics.mcp_called("platform" if outside else "context", outcome, time.monotonic() - began)

    async def _ask_in_sandbox(self, caller: Caller, session: SessionRecord, record: McpServerRecord, ask: Ask) -> Json:
        async with self._in_use(caller, session) as box:
            conversation = await self._conversation(caller, box, record)
            async with self._links.watching(box, record.name, conversation):
                return await ask(conversation)

    async def _conversation(
        self, caller: Caller, box: LiveSandbox, record: McpServerRecord, *, starting: bool = False
    ) -> Any:
        """Return the conversation with a server. If its process has to be started, the start is admitted too."""
        known = self._links.current(box, record.name, record.generation)
        if known is not None and (record.enabled or starting):  # another carrel server may have disabled it
            return known
        context, generation = record.context_id, record.generation

        async def check() -> None:
            now = _found(await self._store.declared(context, record.name), context, record.name)
            if now.generation != generation:
                self._declarations.changed(context, record.name)
                why = f"the MCP server '{record.name}' was changed meanwhile"
                raise Conflict(why, field="server", hint="call again")
            if not (now.enabled or starting):
                raise Conflict(f"the MCP server '{record.name}' is stopped", field="server", hint="start it first")

        await check()
        arguments = policy_arguments(record.name, declared(record))
        arguments.pop("install", None)
        session = box.record
        # The approval of the caller was used for the call, and the start is another operation.
        caller = replace(caller, approval=None)
        async with self._operations.admit(caller, op.START_MCP_SERVER, arguments, session.id, session.context_id):
            record = await self._ready(session, record)
            return await self._links.open(box, record.name, launch(record, record.environment), check)

    async def _ready(self, session: SessionRecord, record: McpServerRecord) -> McpServerRecord:
        """Return a server with its environment, built again if it no longer exists."""
        ready = await self._installing.ready(session, record)
        if ready.environment != record.environment:
            await self._store.place(ready)
            self._declarations.changed(record.context_id, record.name)
        return ready

    # inner

    async def _durable(self, name: str) -> tuple[SessionRecord, str]:
        record = await self._sessions.record(name)
        if record.state is State.TERMINATED:
            await self._sessions.find(name)  # raises
        if record.context_id is None:
            raise Conflict(
                "an ephemeral sandbox keeps nothing, so it has no MCP servers",
                field="id",
                hint="make the sandbox with a context_id",
            )
        return record, record.context_id

    async def _known(self, context: str, server: str) -> McpServerRecord:
        return _found(await self._store.get(context, server), context, server)

    async def _declared(self, context: str, server: str) -> McpServerRecord:
        """Return a declaration from the cache: every call needs it."""
        return _found(await self._declarations.find(context, server), context, server)

    def _running_now(self, session: SessionRecord) -> LiveSandbox | None:
        return next((box for box in self._sessions.live() if box.record.id == session.id), None)

    @asynccontextmanager
    async def _in_use(self, caller: Caller, session: SessionRecord) -> AsyncIterator[LiveSandbox]:
        """Return the sandbox of a session, resumed if it is stopped, and keep it in use for the block."""
        try:
            box = await self._sessions.find(session.id)
        except NotRunning:
            await self._operations.deploy_or_resume(caller, SandboxRequest(context_id=session.context_id))
            box = await self._sessions.find(session.owner)
        box.in_flight += 1
        box.touch()
        try:
            yield box
        except SandboxLost:
            await self._sessions.lost(box)
            raise
        finally:
            box.in_flight -= 1
            box.touch()

    async def _end_process(self, session: SessionRecord, server: str, *, forget: bool = False) -> None:
        box = self._running_now(session)
        if box is not None:
            await self._links.stop(box, server, forget=forget)

    async def _processes(self, session: SessionRecord) -> dict[str, McpProcess]:
        box = self._running_now(session)
        if box is None:
            return {}
        try:
            return await box.connection.mcp_processes()
        except SandboxLost:
            await self._sessions.lost(box)
            return {}

    async def _info(self, session: SessionRecord, record: McpServerRecord) -> McpServerInfo:
        process = (await self._processes(session)).get(record.name)
        return server_info(record.context_id, record, process, await self._redactor(record.context_id))

    async def _catalogue(self, context: str, server: str) -> McpCatalogue:
        if server in self._platform:
            record = await self._store.get(PLATFORM, server)
            if record is None or record.catalogue is None:
                await self._discover_platform(self._platform.get(server))
                record = await self._known(PLATFORM, server)
        else:
            record = await self._known(context, server)
        return await asyncio.to_thread(catalogue_info, server, record, await self._redactor(context))

    async def _discover_platform(self, server: PlatformServer) -> None:
        """Ask a server of the operator for its catalogue, and keep it for all contexts."""
        now = time.time()
        record = McpServerRecord(PLATFORM, server.name, {}, server.name, now, now)
        await self._store.put(record, lambda _others: None)
        try:
            async with server.spoken(MCP_TIMEOUT_S) as speaker:
                found, why = await speaker.offers(MCP_TIMEOUT_S)
            await self._discovery.keep(record, found, why)
        except (NoAnswer, RequestRefused):
            await self._discovery.keep(record, None, "it does not answer what it offers")
        except CarrelError as error:
            await self._discovery.keep(record, None, error.detail)


def _found(record: McpServerRecord | None, context: str, server: str) -> McpServerRecord:
    if record is None:
        why = f"context '{context}' has no MCP server '{server[:64]}'"
        raise NotFound(why, field="server", hint="list them first")
    return record


def _room(others: int) -> None:
    if others >= MOST_MCP_SERVERS:
        raise LimitExceeded(
            f"a context has {MOST_MCP_SERVERS} MCP servers at most", field="server", hint="remove one first"
        )
