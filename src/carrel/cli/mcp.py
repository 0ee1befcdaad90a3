"""`mcp`: starts carrel as an MCP server, over standard input and output or over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.failures import note
from carrel.errors import InvalidRequest
from carrel.primitives.imports import importing

if TYPE_CHECKING:
    from carrel.integrations.mcp.server import WorkspaceServer


def mcp(
    *,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            "-c",
            metavar="NAME",
            help="The context to work in. With --http: for requests that name none.",
            show_default="one for this MCP client and directory",
            autocompletion=options.contexts,
        ),
    ] = None,
    template: options.Template = None,
    http: Annotated[bool, typer.Option("--http", help="Serve streamable HTTP instead of stdin and stdout.")] = False,
    host: Annotated[str, typer.Option(help="With --http: address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http: port; 0 picks a free one.")] = 7072,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --http: another host name that clients may use; repeatable."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, max=3600, help="How long a call waits for an approval if the user agrees."
        ),
    ] = 300.0,
    approver_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with an approver's token: the user of the MCP client then decides approvals. Not with --http.",
        ),
    ] = None,
) -> None:
    """Give an MCP client the tools of a context: commands, Python, files, snapshots, environments.

    MCP clients start `carrel mcp` themselves and talk to it over stdin and stdout. It uses CARREL_TOKEN, or the token
    that the local server wrote for agents. With --http each request needs its own token and names its context:
    http://127.0.0.1:7072/CONTEXT/mcp.

    \b
    carrel mcp --context conversation-42
    carrel mcp --http --port 7072
    """
    if approver_token_file is not None and http:
        raise InvalidRequest(
            "an approver's token cannot be used with --http: anyone with an agent's token could answer as a person",
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
    """Log to stderr without tracebacks; standard output belongs to the protocol."""
    import logging

    class LogFormatter(logging.Formatter):
        def formatException(self, ei: object) -> str:  # noqa: N802 - logging names it
            return ""

    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _workspaces(context: str | None, template: str | None, wait: float, approver: Path | None) -> WorkspaceServer:
    if context is not None:
        _check(context)
    with importing():
        from carrel.client import AsyncClient
        from carrel.integrations.http import read_token_file
        from carrel.integrations.mcp.asking import Asking
        from carrel.integrations.mcp.server import WorkspaceServer

    token = None if approver is None else read_token_file(approver)
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


def _serve_stdio(workspaces: WorkspaceServer) -> None:
    import asyncio
    import signal
    import sys

    from mcp.server.stdio import stdio_server

    if sys.stdin.isatty():
        note("carrel: this is for MCP clients, which start it themselves. Ctrl-C ends it")
        # Without this, the thread that reads the terminal could not be interrupted before the next line.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    async def work() -> None:
        server = workspaces.server
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    asyncio.run(work())


def _serve_http(workspaces: WorkspaceServer, context: str | None, host: str, port: int, names: list[str]) -> None:
    import uvicorn

    from carrel.client.locate import is_loopback
    from carrel.integrations.http import listen, url_of, uvicorn_config
    from carrel.integrations.mcp.http import application

    app = application(workspaces, hosts=names, context_id=context, host=host)
    config = uvicorn_config(app, grace_s=2, log_level="warning", lifespan="on")
    with listen(host, port) as listener:
        print(f"carrel mcp listens on {url_of(host, listener.getsockname()[1])}/CONTEXT/mcp", flush=True)
        if not is_loopback(host):
            note("carrel: tokens are sent unencrypted; put a proxy with TLS in front")
        uvicorn.Server(config).run(sockets=[listener])
