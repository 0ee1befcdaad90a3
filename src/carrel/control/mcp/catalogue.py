"""Catalogues: what MCP servers offer. Found out in a sandbox of its own, bounded, kept, and shown without secrets.

That sandbox has a copy of the workspace and the policy, network, secrets and limits of the context: the server finds
what it would find there, and whatever it breaks is thrown away. Everything that a server sends comes from inside a
sandbox: it is bounded in size, number and depth. The name of a tool decides nothing: rules name a tool by its server
and its name together, and the server is the one that was asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from carrel.control.mcp.declarations import declared, launch
from carrel.control.mcp.links import NoAnswer, RequestRefused, start_conversation
from carrel.control.python.calls import Redactors
from carrel.control.sessions.owners import DISCOVERS, LABEL
from carrel.control.sessions.sessions import Sessions
from carrel.control.supervisor.client import McpProcess
from carrel.control.supervisor.connection import Json
from carrel.control.workspaces.workspaces import Workspaces, cap_bytes
from carrel.errors import CarrelError, InvalidRequest, TooLarge
from carrel.metrics import OK, Metrics, outcome_of
from carrel.models import McpCatalogue, McpLog, McpServerInfo, McpTool, SandboxRequest
from carrel.primitives import tasks
from carrel.primitives.keyed_lock import KeyedLocks
from carrel.redaction.redact import Redactor
from carrel.store import SessionRecord
from carrel.store.mcp_servers import McpServerRecord, McpServerStore
from carrel.threads import run_to_end

log = logging.getLogger("carrel.mcp")

PARALLEL = 4
PREFIX = "mcp-"
"""Prefix of the snapshots that discovery takes of workspaces. They last only until they are copied."""
MOST_TOOLS = 512
MOST_CATALOGUE = 1024 * 1024
MOST_ENTRY = 64 * 1024
"""Bytes of one tool, prompt or resource, as JSON."""
MOST_WORDS = 16_384
MOST_DEPTH = 64
MOST_PARTS = 100_000
MOST_GIVEN, MOST_GIVEN_DEPTH = 15 * 1024 * 1024, 48
"""Bytes and levels of the arguments of a call. A server may send them back inside an answer, which has bounds too."""
LONGEST_REASON = 1000

RESERVED = ("resources/", "prompts/", "completion/")
"""The name of a tool cannot begin like this: rules use such names for the other requests to a server."""
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_FIELDS = {
    "tools": ("name", "title", "description", "inputSchema", "outputSchema", "annotations"),
    "prompts": ("name", "title", "description", "arguments"),
    "resources": ("uri", "name", "title", "description", "mimeType", "size"),
    "resource_templates": ("uriTemplate", "name", "title", "description", "mimeType"),
}
_KEY = {"tools": "name", "prompts": "name", "resources": "uri", "resource_templates": "uriTemplate"}

Found = tuple[Json | None, str | None]


class McpDiscovery:
    """Asks servers what they offer, and keeps the answers. However many callers ask, one request is made; and one
    server of a context is asked at a time, so that servers that hang do not block other contexts.
    """

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
        self._turns = KeyedLocks()
        self._running: dict[tuple[str, str, str], asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Remove snapshots that the previous carrel process left behind."""
        driver = self._workspaces.driver
        for name in await asyncio.to_thread(driver.snapshots):
            if name.startswith(PREFIX):
                await asyncio.to_thread(driver.delete_snapshot, name)

    async def close(self) -> None:
        """Cancel the discoveries under way."""
        await tasks.cancel(self._running.values())

    async def look(self, session: SessionRecord, server: McpServerRecord) -> None:
        """Ask a server of a context for its catalogue, and keep the catalogue or the reason why there is none. A caller
        that stops waiting does not stop the discovery.
        """
        key = (server.context_id, server.name, server.generation)
        task = self._running.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._look(session, server))
            self._running[key] = task
            task.add_done_callback(lambda _task: self._running.pop(key, None))
        await asyncio.shield(task)

    async def _look(self, session: SessionRecord, server: McpServerRecord) -> None:
        async with self._turns.of(server.context_id), self._gate:
            now = await self._store.declared(server.context_id, server.name)
            if now is None or now.generation != server.generation:
                return  # the declaration changed while this waited: the answer would be for the old one
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
        """Store a catalogue, or the reason why there is none. Secrets are removed first: a fork may show the catalogue
        and does not know them.
        """
        redactor = await self._redactor(server.context_id or None)
        if found is not None:
            found = await asyncio.to_thread(redactor.value, found)
        if why is not None:
            why = redactor.text(bounded_text(why, LONGEST_REASON))
        await self._store.discovered(server.context_id, server.name, server.generation, found, why, time.time())

    async def _ask(self, session: SessionRecord, server: McpServerRecord) -> Found:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._within(session, server)
        except TimeoutError:
            return None, f"it could not be asked within {self._timeout_s:g} seconds"

    async def _within(self, session: SessionRecord, server: McpServerRecord) -> Found:
        await self._sessions.require_here(session)
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
        conversation = await start_conversation(box, server.name, launch(server, server.environment), self._start_s)
        try:
            return await conversation.offers(self._timeout_s)
        except RequestRefused as error:
            return None, f"it refused to list what it offers: {error.message}"
        except NoAnswer:
            return None, "it does not answer what it offers"
        finally:
            await conversation.close()

    async def _copy(self, session: SessionRecord, own: SessionRecord) -> None:
        """Copy the files of the context into the sandbox. A thread cannot be cancelled: a cancelled caller waits for
        it, or it would create files again that were already removed.
        """
        await run_to_end(lambda: self._copy_files(session, own))

    def _copy_files(self, session: SessionRecord, own: SessionRecord) -> None:
        driver, source = self._workspaces.driver, self._workspaces.volume(session)
        if session.workspace_path is not None or not driver.exists(source):
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


# bounds


def given_size(given: Mapping[str, object]) -> int:
    """Return the size of the arguments of a call in bytes; `InvalidRequest` for arguments that cannot be sent. A
    message that breaks the connection would also end the calls of others to the same server.
    """
    if not is_bounded(given, MOST_GIVEN_DEPTH):
        why = "the arguments are nested too deeply or have too many parts"
        hint = f"at most {MOST_GIVEN_DEPTH - 1} levels and {MOST_PARTS} values"
        raise InvalidRequest(why, field="arguments", hint=hint)
    try:
        size = len(json.dumps(given, ensure_ascii=False).encode())
    except (UnicodeEncodeError, TypeError):
        raise InvalidRequest("the arguments are not JSON", field="arguments", hint="send text as UTF-8") from None
    if size > MOST_GIVEN:
        why = f"the arguments have {size} bytes, and {MOST_GIVEN} is the most"
        raise TooLarge(why, field="arguments", hint="write them to a file of the workspace, and name that")
    return size


def is_bounded(value: object, depth: int = MOST_DEPTH) -> bool:
    """Whether a value is neither nested too deeply nor too large."""
    left = MOST_PARTS
    waiting: list[tuple[object, int]] = [(value, depth)]
    while waiting:
        each, depth = waiting.pop()
        left -= 1
        if left < 0 or depth < 0:
            return False
        if isinstance(each, dict):
            waiting += [(inner, depth - 1) for inner in each.values()]
        elif isinstance(each, list):
            waiting += [(inner, depth - 1) for inner in each]
    return True


def bounded_text(value: object, most: int = MOST_WORDS) -> str:
    """Return a text of a server, cut, and without characters that a database cannot store."""
    text = value if isinstance(value, str) else str(value)
    text = text[:most].replace("\0", "\ufffd")
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def is_tool_name(name: object) -> bool:
    """Whether this can be the name of a tool."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not name.startswith(RESERVED)


def bounded_catalogue(
    *,
    protocol_version: str | None,
    server_info: Mapping[str, Any] | None,
    instructions: str | None,
    found: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[Json, str | None]:
    """Return the catalogue to keep, and a sentence on what was left out of it. `found` has the lists by the names of
    `_FIELDS`.
    """
    kept: Json = {
        "protocol_version": None if protocol_version is None else bounded_text(protocol_version, 32),
        "server_info": _strings(server_info or {}, ("name", "version", "title"), 256),
        "instructions": None if instructions is None else bounded_text(instructions),
    }
    left: list[str] = []
    room = MOST_CATALOGUE
    for kind, fields in _FIELDS.items():
        items, why = _listed(kind, fields, found.get(kind, ()), room)
        kept[kind] = items
        room -= sum(len(json.dumps(each)) for each in items)
        left += why
    return kept, "; ".join(left)[:LONGEST_REASON] or None


def _listed(
    kind: str, fields: Iterable[str], found: Sequence[Mapping[str, Any]], room: int
) -> tuple[list[Json], list[str]]:
    kept: dict[str, Json] = {}
    wrong: dict[str, int] = {}
    shown, key = kind.replace("_", " "), _KEY[kind]
    for each in found:
        reason = None
        item = {field: each[field] for field in fields if each.get(field) is not None}
        name = item.get(key)
        if (kind == "tools" and not is_tool_name(name)) or not isinstance(name, str) or not 0 < len(name) <= 2048:
            reason = "whose names are not allowed"
        elif name in kept:
            reason = "that are listed twice"
        elif len(kept) >= MOST_TOOLS:
            reason = f"beyond the first {MOST_TOOLS}"
        else:
            item = {field: bounded_text(value) if isinstance(value, str) else value for field, value in item.items()}
            text = json.dumps(item) if is_bounded(item) else ""
            if not text or len(text) > MOST_ENTRY:
                reason = f"of more than {MOST_ENTRY // 1024} KB, or nested too deeply"
            elif len(text) > room:
                reason = f"beyond {MOST_CATALOGUE // 1024} KB altogether"
            else:
                room -= len(text)
                # Parsed again from the text, so that it is surely JSON and shares no object with the answer.
                kept[bounded_text(name, 2048)] = json.loads(text)
        if reason is not None:
            wrong[reason] = wrong.get(reason, 0) + 1
    return list(kept.values()), [f"left out {count} {shown} {reason}" for reason, count in wrong.items()]


def _strings(given: Mapping[str, Any], fields: Iterable[str], most: int) -> Json:
    return {field: bounded_text(given[field], most) for field in fields if isinstance(given.get(field), str)}


# as the API shows it


def server_info(context: str, record: McpServerRecord, process: McpProcess | None, redactor: Redactor) -> McpServerInfo:
    """Describe a server of a context; `process` is its process, as the supervisor describes it."""
    request = declared(record)
    info = McpServerInfo(
        name=record.name,
        state="stopped" if process is None else process.state,
        enabled=record.enabled,
        command=request.command,
        variables=sorted(request.variables),
        secret_variables=request.secret_variables,
        requirements=request.requirements,
        python=request.python,
        npm=request.npm,
        cwd=request.cwd,
        environment=record.environment,
        generation=record.generation,
        tools=_count(record),
        discovered_at=_moment(record.discovered_at),
        discovery_error=record.discovery_error,
        starts=None if process is None else process.started,
        reason=None if process is None else process.reason,
        retry_in_s=None if process is None else process.retry_in_s,
        url=url_of(context, record.name),
    )
    clean = redactor.value(info.model_dump(include={"command", "cwd", "discovery_error", "reason"}))
    return info.model_copy(update=clean)


def platform_info(context: str, name: str, record: McpServerRecord | None, redactor: Redactor) -> McpServerInfo:
    """Describe a server that the operator runs."""
    why = None if record is None else record.discovery_error
    return McpServerInfo(
        name=name,
        origin="platform",
        state="running",
        generation=name,
        tools=0 if record is None else _count(record),
        discovered_at=None if record is None else _moment(record.discovered_at),
        discovery_error=None if why is None else redactor.text(why),
        url=url_of(context, name),
    )


def redacted_log(page: McpLog, before: McpLog | None, redactor: Redactor) -> McpLog:
    """Remove secrets from a part of a server's log. `before` is the part before it, in which a secret may begin that
    ends in this one.

    The oldest line may have lost its beginning, so that a secret in it cannot be recognized: it is left out.
    """
    passed = b"" if before is None else before.text.encode("utf-8", "surrogatepass")
    text = page.text
    if page.dropped and page.offset == page.dropped:
        _, broken, rest = text.partition("\n")
        passed, text = b"", rest if broken else text
    stream = redactor.stream(skip=len(passed))
    clean = stream.finish(passed + text.encode("utf-8", "surrogatepass"))
    return page.model_copy(update={"text": clean.decode("utf-8", "replace")})


def url_of(context: str, name: str) -> str:
    """Return the URL at which MCP clients connect to a server. It lasts as long as the context."""
    return f"/v1/sandboxes/{context}/mcp-servers/{name}/mcp"


def catalogue_info(server: str, record: McpServerRecord, redactor: Redactor) -> McpCatalogue:
    """Return a stored catalogue without secrets."""
    kept: Json = redactor.value(dict(record.catalogue or {}))
    return McpCatalogue(
        server=server,
        protocol_version=kept.get("protocol_version"),
        server_info=kept.get("server_info"),
        instructions=kept.get("instructions"),
        tools=[_tool(server, each) for each in kept.get("tools", [])],
        prompts=kept.get("prompts", []),
        resources=kept.get("resources", []),
        resource_templates=kept.get("resource_templates", []),
        discovered_at=_moment(record.discovered_at),
        current=record.catalogue_generation == record.generation,
        error=record.discovery_error,
    )


def _tool(server: str, kept: Json) -> McpTool:
    return McpTool(
        name=kept["name"],
        qualified=f"{server}:{kept['name']}",
        title=kept.get("title"),
        description=kept.get("description"),
        input_schema=kept.get("inputSchema") or {},
        output_schema=kept.get("outputSchema"),
        annotations=kept.get("annotations"),
    )


def _count(record: McpServerRecord) -> int:
    found = (record.catalogue or {}).get("tools")
    return len(found) if isinstance(found, list) else 0


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)
