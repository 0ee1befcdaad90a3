"""`mcp`: carrel as an MCP server, for the clients that people and agents use. Starts it; knows no tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.failures import note
from carrel.cli.importing import importing
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    import socket

    from carrel.integrations.mcp.server import WorkspaceServer


def mcp(
    *,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            "-c",
            metavar="NAME",
            help="The context to work in. Over HTTP for those who name none.",
            show_default="one for the client and this directory",
            autocompletion=options.contexts,
        ),
    ] = None,
    template: options.Template = None,
    http: Annotated[bool, typer.Option("--http", help="Serve streamable HTTP, not stdin and stdout.")] = False,
    host: Annotated[str, typer.Option(help="With --http: address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http: port; 0 picks a free one.")] = 7072,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --http: a name it may be reached by besides; repeatable."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=3600, help="How long a call waits when a person says so.")
    ] = 300.0,
    approver_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Decide what waits with this token by what the person in front of the client says. Not with --http.",
        ),
    ] = None,
) -> None:
    """Give an MCP client the tools of a context: commands, Python, files, snapshots, environments.

    Over stdin and stdout it works with CARREL_TOKEN, or with the token that the local server left for agents. Over
    HTTP each request has to bring its own token and context: http://127.0.0.1:7072/CONTEXT/mcp.

    \b
    carrel mcp --context conversation-42
    carrel mcp --http --port 7072
    """
    if approver_token_file is not None and http:
        raise InvalidRequest(
            "an approver's token is not for HTTP: whoever holds an agent's token could answer in a person's place",
            field="approver_token_file",
            hint="decide with `carrel approve`, or run `carrel mcp` without --http beside the client",
        )
    workspaces = _workspaces(context, template, wait, approver_token_file)
    _log_to_stderr()
    if http:
        _serve_http(workspaces, context, host, port, allow_host or [])
    else:
        _serve_stdio(workspaces)


def _log_to_stderr() -> None:
    """What goes wrong, in a line each: standard output is the protocol's, and nobody is shown a traceback."""
    import logging

    class Lines(logging.Formatter):
        def formatException(self, ei: object) -> str:  # noqa: N802 - logging names it
            return ""

    handler = logging.StreamHandler()
    handler.setFormatter(Lines("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _workspaces(context: str | None, template: str | None, wait: float, approver: Path | None) -> WorkspaceServer:
    if context is not None:
        _check(context)
    token = None if approver is None else _token(approver)
    with importing():
        from carrel.client import AsyncClient
        from carrel.integrations.mcp.asking import Asking
        from carrel.integrations.mcp.server import WorkspaceServer

    deciding = None if token is None else lambda: AsyncClient(token=token)
    return WorkspaceServer(context_id=context, template=template, asking=Asking(wait_s=wait, approver=deciding))


def _check(context: str) -> None:
    from pydantic import TypeAdapter, ValidationError

    from carrel.models.base import ContextId

    try:
        TypeAdapter(ContextId).validate_python(context)
    except ValidationError:
        raise InvalidRequest(
            f"'{context}' cannot be a context",
            field="context",
            hint="1 to 128 letters, digits, `.`, `_`, `:`, `-`, a letter or digit first",
        ) from None


def _token(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidRequest(f"{path} holds no token", field="approver_token_file", hint="one line: the token alone")
    return text


def _serve_stdio(workspaces: WorkspaceServer) -> None:
    import asyncio
    import signal
    import sys

    from mcp.server.stdio import stdio_server

    if sys.stdin.isatty():
        note("carrel: this is for MCP clients, which start it themselves. Ctrl-C ends it")
        # What reads the terminal cannot be interrupted otherwise before the next line.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    async def work() -> None:
        server = workspaces.server
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    asyncio.run(work())


def _listening(host: str, port: int) -> socket.socket:
    import socket

    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="port",
            hint="choose another with --port, or 0 for any",
        ) from None


def _serve_http(workspaces: WorkspaceServer, context: str | None, host: str, port: int, names: list[str]) -> None:
    import uvicorn

    from carrel.client.locate import is_loopback
    from carrel.connections import Connections, connections_allowed, http_protocol
    from carrel.integrations.mcp.http import application, url_of

    app = application(workspaces, hosts=names, context_id=context, host=host)
    connections = Connections(connections_allowed())
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=http_protocol(connections),
        ws="none",
        backlog=connections.backlog,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        lifespan="on",
    )
    listening = _listening(host, port)
    try:
        print(f"carrel mcp listens on {url_of(host, listening.getsockname()[1])}/CONTEXT/mcp", flush=True)
        if not is_loopback(host):
            note("carrel: tokens travel in the clear here; put a proxy with TLS in front")
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()
