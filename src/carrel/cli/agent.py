"""`agent`: starts an A2A agent that works with a carrel server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from carrel.cli.failures import note
from carrel.primitives.imports import importing


def agent(
    *,
    model: Annotated[
        str, typer.Option(help="A chat model such as openai:gpt-5.5. With shell, each message is run as a command.")
    ] = "shell",
    base_url: Annotated[str | None, typer.Option(metavar="URL", help="An OpenAI-compatible model endpoint.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 7073,
    public_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The URL at which callers reach it, for the agent card.")
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(help="A SQLite file or postgresql:// URL for tasks and conversations.", show_default="agent.db"),
    ] = None,
    approver_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file with the token of an approver: callers' answers then decide approvals."
        ),
    ] = None,
    push_hosts: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A private host that may receive push notifications; repeatable."),
    ] = None,
    keep_days: Annotated[
        float,
        typer.Option(metavar="DAYS", help="Delete tasks, and conversations without tasks, this long after their end."),
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Start an A2A agent. Other agents send it tasks; each task works in a carrel workspace with its caller's token.

    \b
    carrel agent
    carrel agent --model openai:gpt-5.5 --database postgresql://localhost/agents
    """
    from carrel.client import data_dir, locate
    from carrel.client.locate import is_loopback

    if log_level not in {"debug", "info", "warning", "error"}:
        raise typer.BadParameter(f"'{log_level}' is not debug, info, warning or error", param_hint="--log-level")
    if public_url is not None and not re.match(r"https?://[^/\s]+(/\S*)?$", public_url):
        raise typer.BadParameter(
            f"'{public_url}' is not a URL such as https://agent.example.org", param_hint="--public-url"
        )
    with importing():
        from carrel.integrations.a2a.server import AgentSettings, serve
        from carrel.integrations.http import read_token_file
    settings = AgentSettings(
        carrel_url=locate().url,
        database=database or str(data_dir() / "agent.db"),
        model=model,
        base_url=base_url,
        host=host,
        port=port,
        public_url=public_url,
        approver_token=None if approver_token_file is None else read_token_file(approver_token_file),
        push_hosts=tuple(push_hosts or ()),
        keep_days=keep_days,
    )
    if public_url is None and not is_loopback(host):
        note("carrel: tokens are sent unencrypted; put a proxy with TLS in front and name it with --public-url")
    serve(settings, log_level=log_level)
