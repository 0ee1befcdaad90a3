"""`mcp-servers`: add, list, start, stop, call and remove the MCP servers in the sandbox of a context."""

from __future__ import annotations

import json as encoding
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import attached, connected, explaining_approval, with_approval
from carrel.cli.failures import note
from carrel.cli.printing import plain, print_done, print_items, print_json, print_line
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    from carrel.models import McpServerInfo

app = typer.Typer(help="MCP servers that run in the sandbox of a context.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="SERVER", help="The name of the MCP server.")]
Pairs = list[str]


@app.command("ls")
def ls(context: options.Context, json: options.Json = False) -> None:
    """List the MCP servers of a context. Starts nothing.

    \b
    carrel mcp-servers ls conversation-42
    """
    with attached(context) as box:
        found = box.mcp.list()
    print_items(found, json, ["SERVER", "STATE", "TOOLS", "COMMAND", "PROBLEM"], _row)


def _row(info: McpServerInfo) -> list[str]:
    state = info.state if info.enabled else "disabled"
    command = " ".join(info.command)[:60] or "run by the operator"
    return [info.name, state, str(info.tools), command, (info.discovery_error or info.reason or "-")[:60]]


@app.command("add", context_settings={"allow_interspersed_args": False})
def add(
    context: options.Context,
    server: Name,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")],
    requirements: Annotated[
        Pairs | None,
        typer.Option("--requirement", "-r", help="A Python package it needs, such as mcp-server-time; repeatable."),
    ] = None,
    npm: Annotated[Pairs | None, typer.Option("--npm", "-n", help="An npm package it needs; repeatable.")] = None,
    variables: Annotated[
        Pairs | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="An environment variable; repeatable.")
    ] = None,
    secrets: Annotated[
        Pairs | None,
        typer.Option(
            "--secret", "-s", metavar="NAME[=SECRET]", help="An environment variable with the value of a secret."
        ),
    ] = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", "-w", help="The directory it starts in, relative to the workspace.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Add an MCP server to a context, or replace the one of that name. Options come before the context.

    \b
    carrel mcp-servers add -r mcp-server-time conversation-42 clock mcp-server-time
    carrel mcp-servers add -s API_KEY conversation-42 search python3 search.py
    """
    if server.startswith("-"):
        raise typer.BadParameter(f"'{server}' is not a name; options come before the context", param_hint="SERVER")
    with attached(context) as box:
        info = box.mcp.add(
            server, options.program_words(command), variables=_pairs(variables, "--env"),
            secret_variables=_pairs([each if "=" in each else f"{each}={each}" for each in secrets or ()], "--secret"),
            requirements=requirements or None, npm=npm or None, cwd=cwd,
        )  # fmt: skip
    if json:
        print_json(info)
        return
    if info.discovery_error is not None:
        note(f"its tools could not be listed: {plain(info.discovery_error)}")
    print(f"{info.name}: {info.tools} tools, {box.mcp.url(info.name)}")


@app.command("tools")
def tools(
    context: options.Context,
    server: Annotated[str | None, typer.Argument(metavar="SERVER", help="Only the tools of this server.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the servers for their tools again.")] = False,
    json: options.Json = False,
) -> None:
    """List the known tools of MCP servers. Starts no server unless --refresh is given.

    \b
    carrel mcp-servers tools conversation-42
    carrel mcp-servers tools conversation-42 clock --refresh
    """
    with attached(context) as box:
        if refresh:
            for each in [server] if server else [known.name for known in box.mcp.list()]:
                asked = box.mcp.refresh(each)
                if asked.error is not None:
                    note(f"{each}: {plain(asked.error)}")
        found = box.mcp.tools(server)
    print_items(
        found,
        json,
        ["TOOL", "DESCRIPTION"],
        lambda tool: [tool.qualified, (tool.description or tool.title or "-").partition("\n")[0][:80]],
    )


@app.command("call")
def call(
    context: options.Context,
    server: Name,
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="The name of the tool.")],
    arguments: Annotated[str, typer.Argument(metavar="JSON", help="The arguments, as a JSON object.")] = "{}",
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long the call may take.")] = 60.0,
    approval: options.Approval = None,
    wait: options.Wait = None,
    json: options.Json = False,
) -> None:
    """Call a tool of an MCP server. The exit code is 1 when the tool reports an error.

    \b
    carrel mcp-servers call conversation-42 clock get_current_time '{"timezone": "Europe/Berlin"}'
    """
    try:
        given = encoding.loads(arguments)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest("the arguments must be a JSON object", field="JSON", hint="""such as '{"city": "Bonn"}'""")
    with connected() as client, explaining_approval():
        box = with_approval(client.attach(client.find(context)), approval, wait)
        result = box.mcp.request(server, tool, given, timeout=timeout)
    if json:
        print_json(result)
    else:
        for each in result.content:
            print(_lines(str(each.get("text"))) if each.get("type") == "text" else plain(f"[{each.get('type')}]"))
    if result.is_error:
        sys.exit(1)


@app.command("start")
def start(context: options.Context, server: Name, json: options.Json = False) -> None:
    """Start an MCP server now, and resume the sandbox if it is stopped.

    \b
    carrel mcp-servers start conversation-42 clock
    """
    with attached(context) as box:
        info = box.mcp.start(server)
    if json:
        print_json(info)
    else:
        print(info.state)


@app.command("stop")
def stop(context: options.Context, server: Name, json: options.Json = False) -> None:
    """Stop an MCP server; calls are refused until it is started again.

    \b
    carrel mcp-servers stop conversation-42 clock
    """
    with attached(context) as box:
        box.mcp.stop(server)
    if json:
        print_done(stopped=server)


@app.command("log")
def log(context: options.Context, server: Name, json: options.Json = False) -> None:
    """Print the standard error of an MCP server.

    \b
    carrel mcp-servers log conversation-42 clock
    """
    with attached(context) as box:
        offset = 0
        while (page := box.mcp.log(server, offset)).text:
            if json:
                print_line(page)
            else:
                sys.stdout.write(_lines(page.text))
            offset = page.next


@app.command("rm")
def rm(context: options.Context, server: Name, json: options.Json = False) -> None:
    """Stop an MCP server and remove it from the context.

    \b
    carrel mcp-servers rm conversation-42 clock
    """
    with attached(context) as box:
        box.mcp.remove(server)
    if json:
        print_done(removed=server)


def _lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.split("\n"))


def _pairs(given: Pairs | None, option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise InvalidRequest(f"{option} needs NAME=VALUE, not '{each[:80]}'", field=option, hint="add a value")
        found[name] = value
    return found
