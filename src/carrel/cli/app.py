"""Builds the command line: every command, or only the one that was called, so that each start is quick."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

_COMMANDS = {
    "serve": ("Server", "server.serve"),
    "doctor": ("Server", "server.doctor"),
    "nodes": ("Server", "nodes.app"),
    "bundle": ("Server", "server.bundle"),
    "version": ("Server", "server.version"),
    "agent": ("Server", "agent.agent"),
    "mcp": ("Server", "mcp.mcp"),
    "here": ("Commands", "here.command.here"),
    "run": ("Commands", "commands.run"),
    "exec": ("Commands", "commands.execute"),
    "python": ("Commands", "python.python"),
    "sh": ("Commands", "commands.sh"),
    "port": ("Commands", "ports.port"),
    "logs": ("Commands", "commands.logs"),
    "events": ("Commands", "events.events"),
    "job": ("Commands", "jobs.app"),
    "ls": ("Files", "files.ls"),
    "cp": ("Files", "files.cp"),
    "sync": ("Files", "filespace.sync"),
    "filespace": ("Files", "filespace.app"),
    "ps": ("Sandboxes", "sandboxes.ps"),
    "stop": ("Sandboxes", "sandboxes.stop"),
    "resume": ("Sandboxes", "sandboxes.resume"),
    "usage": ("Sandboxes", "sandboxes.usage"),
    "rm": ("Sandboxes", "sandboxes.rm"),
    "forget": ("Sandboxes", "sandboxes.forget"),
    "templates": ("Sandboxes", "templates.templates"),
    "pool": ("Sandboxes", "pools.app"),
    "image": ("Sandboxes", "images.app"),
    "envs": ("Sandboxes", "envs.app"),
    "mcp-servers": ("Sandboxes", "mcp_servers.app"),
    "snapshot": ("Snapshots", "snapshots.snapshot"),
    "snapshots": ("Snapshots", "snapshots.snapshots"),
    "restore": ("Snapshots", "snapshots.restore"),
    "fork": ("Snapshots", "snapshots.fork"),
    "diff": ("Snapshots", "snapshots.diff"),
    "download": ("Snapshots", "snapshots.download"),
    "undo": ("Folders", "here.runs.undo"),
    "log": ("Folders", "here.runs.log"),
    "approvals": ("Policy", "approvals.app"),
    "approve": ("Policy", "approvals.approve"),
    "deny": ("Policy", "approvals.deny"),
    "policy": ("Policy", "policy.app"),
    "secret": ("Policy", "secrets.app"),
    "audit": ("Policy", "audit.app"),
    "egress": ("Policy", "egress.app"),
    "token": ("Policy", "tokens.app"),
}
"""Command → its heading in the help, and its function in this package."""

# Words after the command belong to the program that is run, options included.
_PROGRAM = {"allow_interspersed_args": False}


def called(given: list[str]) -> str | None:
    """Return the command that these words call; None when all commands are needed, as for help and completion."""
    words = given[1:] if given[:1] == ["--trace"] else given
    return words[0] if words and words[0] in _COMMANDS else None


def build(only: str | None = None) -> typer.Typer:
    """Build the command line, with every command or only one: declaring all takes longer than most commands run."""
    app = typer.Typer(
        name="carrel",
        help="A private, durable, governed workspace for every AI agent.",
        epilog="Start with `carrel doctor`, then `carrel run -- uname -a`. Every table has --json.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, (panel, place) in _COMMANDS.items():
        if only not in {None, name}:
            continue
        module, _, attribute = place.rpartition(".")
        found = getattr(import_module(f"carrel.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, rich_help_panel=panel)
        else:
            settings = _PROGRAM if name in {"here", "run", "exec"} else None
            app.command(name, rich_help_panel=panel, context_settings=settings)(found)
    return app


def _version(given: bool) -> None:
    if given:
        from carrel import __version__

        print(f"carrel {__version__}")
        raise typer.Exit


def _root(
    trace: Annotated[bool, typer.Option("--trace", help="Print a traceback when carrel itself fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """A private, durable, governed workspace for every AI agent."""
