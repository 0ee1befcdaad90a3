"""A conversation with one process of an MCP server: the official client over carrel's own transport.

The only module of the control plane that imports the client of the `mcp` package. That takes long, so this module is
imported when a server is first used. Messages of a server are hostile input. They are read only while somebody waits
for an answer; messages that nobody asked for are dropped and counted; requests of the server (sampling, roots,
elicitation) are refused. Its schemas are passed on and never used for validation: a schema can keep a validator busy
for ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import ClientSession, MCPError, types
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.message import SessionMessage
from pydantic import BaseModel, ValidationError

from carrel.control.mcp.catalogue import bounded_catalogue, bounded_text, is_bounded
from carrel.control.mcp.links import NoAnswer, RequestRefused, StandIn, failed, known_failure
from carrel.control.supervisor.connection import Json
from carrel.errors import CarrelError, LimitExceeded
from carrel.tracing import TraceContext

CLIENT = types.Implementation(name="carrel", version="0.1.0")
MOST_CALLS = 64
"""Calls of one server at once."""
MOST_UNASKED = 32 * 1024 * 1024
MOST_NONSENSE = 1000
MOST_ASKING = 16
"""Requests of a server that wait for a refusal at once."""
MOST_PROGRESS = 2000
"""Progress notifications that are passed on between two answers."""
MOST_PAGES, MOST_LISTED = 64, 10_000
ASKED_COST = 64 * 1024
"""A request of a server counts like this many bytes that nobody asked for."""
CLOSE_S = 5.0

R = TypeVar("R", bound=BaseModel)
Messages = MemoryObjectSendStream[SessionMessage | Exception]

logging.getLogger("client").setLevel(logging.CRITICAL)  # errors of hostile servers would fill the log
logging.getLogger("mcp.shared.jsonrpc_dispatcher").setLevel(logging.CRITICAL)


class McpTransport(Protocol):
    """The transport of a conversation, such as `links.Wire`."""

    ended: str | None

    def lines(self) -> AsyncIterator[bytes]: ...
    async def send(self, line: bytes) -> None: ...
    def close(self) -> None: ...


class Speaker:
    """Sends requests to a server through an initialized session."""

    def __init__(self, server: str):
        self.server = server
        self.session: ClientSession | None = None
        self.introduction: types.InitializeResult | None = None

    async def call_tool(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        timeout: float,
        progress: ProgressFnT | None = None,
        trace: TraceContext | None = None,
    ) -> Json:
        """Call a tool; return the result of the protocol. The server gets the trace in `_meta`."""
        meta: Any = None if trace is None else {name: value for name, value in trace._asdict().items() if value}
        params = types.CallToolRequestParams(name=tool, arguments=dict(arguments), _meta=meta)
        return await self._ask(types.CallToolRequest(params=params), types.CallToolResult, timeout, progress)

    async def read_resource(self, uri: str, timeout: float) -> Json:
        params = types.ReadResourceRequestParams(uri=uri)
        return await self._ask(types.ReadResourceRequest(params=params), types.ReadResourceResult, timeout)

    async def get_prompt(self, name: str, arguments: Mapping[str, str] | None, timeout: float) -> Json:
        """Get a prompt with its arguments filled in."""
        params = types.GetPromptRequestParams(name=name, arguments=None if arguments is None else dict(arguments))
        return await self._ask(types.GetPromptRequest(params=params), types.GetPromptResult, timeout)

    async def offers(self, timeout: float) -> tuple[Json, str | None]:
        """Return the bounded catalogue of the server, and a sentence on what was left out."""
        introduction = self.introduction
        if introduction is None:
            raise self.lost()
        can = introduction.capabilities
        found: dict[str, list[Json]] = {}
        if can.tools is not None:
            found["tools"] = await self._listed(types.ListToolsRequest, types.ListToolsResult, "tools", timeout)
        if can.prompts is not None:
            found["prompts"] = await self._listed(types.ListPromptsRequest, types.ListPromptsResult, "prompts", timeout)
        if can.resources is not None:
            kinds = types.ListResourcesRequest, types.ListResourcesResult
            found["resources"] = await self._listed(*kinds, "resources", timeout)
            with suppress(RequestRefused):  # many servers with resources have no templates
                templates = types.ListResourceTemplatesRequest, types.ListResourceTemplatesResult
                found["resource_templates"] = await self._listed(*templates, "resourceTemplates", timeout)
        return bounded_catalogue(
            protocol_version=str(introduction.protocol_version),
            server_info=introduction.server_info.model_dump(mode="json", by_alias=True),
            instructions=introduction.instructions,
            found=found,
        )

    async def _listed(self, request: Callable[..., Any], result: type[R], key: str, timeout: float) -> list[Json]:
        found: list[Json] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            params = None if cursor is None else types.PaginatedRequestParams(cursor=cursor)
            page = await self._ask(request(params=params), result, timeout)
            found += page.get(key, [])
            following = page.get("nextCursor")
            if not isinstance(following, str) or following == cursor or len(found) > MOST_LISTED:
                break
            cursor = following
        return found

    async def introduce(self, session: ClientSession) -> types.InitializeResult:
        """Initialize the session; `McpServerFailed` when the server does not speak the protocol."""
        try:
            introduction = await session.initialize()
        except MCPError as error:
            raise self.lost(f"refused to introduce itself: {bounded_text(error.message, 300)}") from None
        except (ValidationError, ValueError, RuntimeError, RecursionError):
            raise self.lost("does not speak a version of MCP that carrel knows") from None
        self.session, self.introduction = session, introduction
        return introduction

    def lost(self, why: str = "has ended") -> CarrelError:
        """Return the error that says why the server cannot be used; `why` if nothing better is known."""
        return failed(self.server, why)

    @property
    def alive(self) -> bool:
        """Whether the server can still be asked."""
        return self.session is not None

    async def _ask(self, request: Any, result: type[R], timeout: float, progress: ProgressFnT | None = None) -> Json:
        session = self.session
        if session is None or not self.alive:
            raise self.lost()
        began = time.monotonic()
        try:
            answer = await session.send_request(request, result, timeout, progress_callback=progress)
            return answer.model_dump(mode="json", by_alias=True, exclude_none=True)
        except MCPError as error:
            if time.monotonic() - began >= timeout:
                raise NoAnswer from None
            if not self.alive:
                raise self.lost() from None
            raise RequestRefused(error.code, bounded_text(error.message, 2000)) from None
        except (ValidationError, ValueError, RecursionError):
            raise failed(self.server, "answered something that is not what the protocol asks for") from None


class Conversation(Speaker):
    """One initialized session. `open` makes one; it lasts until `close`, or until the server fails."""

    def __init__(self, server: str, wire: McpTransport):
        super().__init__(server)
        self._wire = wire
        self._task: asyncio.Task[None]
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._wanted = asyncio.Event()
        self._waiting = 0
        self._failure: CarrelError | None = None
        self._asked: set[object] = set()
        self._asking = 0
        self._unasked = self._nonsense = self._progress = 0

    @classmethod
    async def open(cls, server: str, wire: McpTransport, deadline_s: float) -> Conversation:
        """Initialize a session with a process that was started."""
        made = cls(server, wire)
        made._task = asyncio.get_running_loop().create_task(made._run())
        made._want(1)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(made._ready)
        except TimeoutError:
            await made.close()
            raise failed(server, f"did not introduce itself within {deadline_s:g} seconds") from None
        except BaseException:
            await made.close()
            raise
        finally:
            made._want(-1)
        return made

    @property
    def alive(self) -> bool:
        """See `Speaker`."""
        return not self._task.done() and self._failure is None and not self._closing.is_set()

    async def close(self) -> None:
        """End the conversation; the process is left alone."""
        self._closing.set()
        pause = CLOSE_S if self._ready.done() else 0.0
        try:
            await asyncio.wait({self._task}, timeout=pause)
        finally:  # if the caller is cancelled meanwhile, the task still ends
            self._task.cancel()
        await asyncio.wait({self._task})

    # asking

    async def _ask(self, request: Any, result: type[R], timeout: float, progress: ProgressFnT | None = None) -> Json:
        if self._waiting >= MOST_CALLS:
            raise LimitExceeded(
                f"{MOST_CALLS} calls of the MCP server '{self.server}' are under way already", hint="wait for some"
            )
        self._want(1)
        try:
            return await super()._ask(request, result, timeout, progress)
        finally:
            self._want(-1)

    def lost(self, why: str = "has ended") -> CarrelError:
        """See `Speaker`."""
        return self._failure or failed(self.server, self._wire.ended or why)

    def _want(self, change: int) -> None:
        """Read messages of the server only while somebody waits for one."""
        self._waiting += change
        if self._waiting > 0:
            self._wanted.set()
        else:
            self._wanted.clear()

    # the conversation itself

    async def _run(self) -> None:
        try:
            into, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            outgoing, out_of = anyio.create_memory_object_stream[SessionMessage](0)
            with into, incoming, outgoing, out_of:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._read(into)), group.create_task(self._write(out_of))]
                    try:
                        await self._speak(incoming, outgoing)
                    finally:
                        for task in tasks:
                            task.cancel()
        except BaseExceptionGroup as group_of:
            failure = known_failure(group_of)
            self._fail(failure if isinstance(failure, CarrelError) else failed(self.server, "could not be reached"))
        except CarrelError as error:
            self._fail(error)
        finally:
            self._wire.close()
            self._fail(failed(self.server, self._wire.ended or "has ended"))

    async def _speak(self, incoming: Any, outgoing: Any) -> None:
        async with ClientSession(incoming, outgoing, client_info=CLIENT) as session:
            await self.introduce(session)
            if not self._ready.done():
                self._ready.set_result(None)
            await self._closing.wait()

    def _fail(self, error: CarrelError) -> None:
        if self._failure is None:
            self._failure = error
        if not self._ready.done():
            self._ready.set_exception(self._failure)
            self._ready.exception()  # mark it as retrieved: nobody may wait for it any more
        self._closing.set()

    async def _read(self, into: Messages) -> None:
        try:
            async with aclosing(self._wire.lines()) as lines:  # type: ignore[type-var]
                async for line in lines:
                    await self._wanted.wait()
                    message = self._taken(line)
                    if message is not None:
                        await into.send(message)
            self._fail(failed(self.server, self._wire.ended or "has ended"))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return
        except CarrelError as error:
            self._fail(error)
        finally:
            into.close()  # wakes whoever waits

    def _taken(self, line: bytes) -> SessionMessage | None:
        """Return a message that is expected; None for one that nobody asked for. Raises when there are too many of
        those.
        """
        size = line.size if isinstance(line, StandIn) else len(line)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self._count(size, nonsense=True)
            return None
        if not is_bounded(value):
            raise failed(self.server, "sent a message that is nested too deeply or has too many parts")
        if not self._expected(value):
            self._count(size)
            return None
        try:
            return SessionMessage(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
        except (ValidationError, RecursionError):
            self._count(size, nonsense=True)
            return None

    def _expected(self, value: Json) -> bool:
        """Whether a message is an answer that somebody waits for, or one of the few others that are accepted."""
        method, name = value.get("method"), value.get("id")
        if method is None:
            if not isinstance(name, int | str) or name not in self._asked:
                return False
            self._asked.discard(name)
            self._unasked = self._progress = 0
        elif name is not None:
            if self._asking >= MOST_ASKING:
                return False
            self._asking += 1
            self._count(ASKED_COST)
        elif method == "notifications/progress" and self._progress < MOST_PROGRESS:
            self._progress += 1
        else:
            return False
        return True

    def _count(self, size: int, *, nonsense: bool = False) -> None:
        self._unasked += size
        self._nonsense += nonsense
        if self._unasked > MOST_UNASKED:
            raise failed(self.server, "sends more than it was asked for")
        if self._nonsense > MOST_NONSENSE:
            raise failed(self.server, "sends messages that do not follow the protocol")

    async def _write(self, out_of: MemoryObjectReceiveStream[SessionMessage]) -> None:
        try:
            async for each in out_of:
                message = each.message
                if isinstance(message, types.JSONRPCRequest):
                    self._asked.add(message.id)
                elif not isinstance(message, types.JSONRPCNotification):
                    self._asking -= 1
                await self._wire.send(message.model_dump_json(by_alias=True, exclude_unset=True).encode())
        except CarrelError as error:
            self._fail(error)
        finally:
            out_of.close()
