"""MCP servers and what they offer as the API shows them: without secrets, and with the names that rules use. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from carrel.control.mcp.request_checks import Json, declared
from carrel.control.supervisor.client import McpProcess
from carrel.models import McpCatalogue, McpLog, McpServerInfo, McpTool
from carrel.redaction.redact import Redactor
from carrel.store.mcp_servers import McpServerRecord


def shown(context: str, record: McpServerRecord, process: McpProcess | None, redactor: Redactor) -> McpServerInfo:
    """A server of a context; `process` is its process now, as the sandbox describes it."""
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


def shown_platform(context: str, name: str, record: McpServerRecord | None, redactor: Redactor) -> McpServerInfo:
    """A server that the operator runs, with what is known of what it offers."""
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


def shown_log(page: McpLog, before: McpLog | None, redactor: Redactor) -> McpLog:
    """A part of the log of a server; `before` is what lies before it, where a secret may have begun that goes on in it.

    The oldest line that is kept may have lost its beginning, and with it what tells a secret: it is left out.
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
    """Where MCP clients connect to a server. It lasts as long as the context."""
    return f"/v1/sandboxes/{context}/mcp-servers/{name}/mcp"


def catalogue_of(server: str, record: McpServerRecord, redactor: Redactor) -> McpCatalogue:
    """What a server offers, as it is known."""
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
