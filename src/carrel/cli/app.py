"""Puts the commands together. Imports only what declaring them needs, so that every start is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from carrel.cli import (
    agent,
    approvals,
    audit,
    commands,
    egress,
    envs,
    files,
    filespace,
    host,
    mcp,
    mcp_servers,
    policy,
    python,
    sandboxes,
    secrets,
    server,
    snapshots,
    templates,
    terminals,
    tokens,
)

app = typer.Typer(
    name="carrel",
    help="A private, durable, governed workspace for every AI agent.",
    epilog="Start with `carrel doctor`, then `carrel run -- uname -a`. Every table has --json.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    trace: Annotated[bool, typer.Option("--trace", help="Show where carrel itself failed.")] = False,
) -> None:
    """A private, durable, governed workspace for every AI agent."""


# Words after the command belong to the program that is run, options included.
_PROGRAM = {"allow_interspersed_args": False}

app.command("serve", rich_help_panel="Server")(server.serve)
app.command("doctor", rich_help_panel="Server")(host.doctor)
app.command("version", rich_help_panel="Server")(host.version)
app.command("agent", rich_help_panel="Server")(agent.agent)
app.command("mcp", rich_help_panel="Server")(mcp.mcp)
app.command("run", rich_help_panel="Commands", context_settings=_PROGRAM)(commands.run)
app.command("exec", rich_help_panel="Commands", context_settings=_PROGRAM)(commands.execute)
app.command("python", rich_help_panel="Commands")(python.python)
app.command("sh", rich_help_panel="Commands")(terminals.sh)
app.command("logs", rich_help_panel="Commands")(commands.logs)
app.command("ls", rich_help_panel="Files")(files.ls)
app.command("cp", rich_help_panel="Files")(files.cp)
app.command("sync", rich_help_panel="Files")(filespace.sync)
app.add_typer(filespace.app, name="filespace", rich_help_panel="Files")
app.command("ps", rich_help_panel="Sandboxes")(sandboxes.ps)
app.command("stop", rich_help_panel="Sandboxes")(sandboxes.stop)
app.command("resume", rich_help_panel="Sandboxes")(sandboxes.resume)
app.command("usage", rich_help_panel="Sandboxes")(sandboxes.usage)
app.command("rm", rich_help_panel="Sandboxes")(sandboxes.rm)
app.command("templates", rich_help_panel="Sandboxes")(templates.templates)
app.add_typer(envs.app, name="envs", rich_help_panel="Sandboxes")
app.add_typer(mcp_servers.app, name="mcp-servers", rich_help_panel="Sandboxes")
app.command("snapshot", rich_help_panel="Snapshots")(snapshots.snapshot)
app.command("snapshots", rich_help_panel="Snapshots")(snapshots.snapshots)
app.command("restore", rich_help_panel="Snapshots")(snapshots.restore)
app.command("fork", rich_help_panel="Snapshots")(snapshots.fork)
app.command("diff", rich_help_panel="Snapshots")(snapshots.diff)
app.command("download", rich_help_panel="Snapshots")(snapshots.download)
app.add_typer(approvals.app, name="approvals", rich_help_panel="Policy")
app.command("approve", rich_help_panel="Policy")(approvals.approve)
app.command("deny", rich_help_panel="Policy")(approvals.deny)
app.add_typer(policy.app, name="policy", rich_help_panel="Policy")
app.add_typer(secrets.app, name="secret", rich_help_panel="Policy")
app.add_typer(audit.app, name="audit", rich_help_panel="Policy")
app.add_typer(egress.app, name="egress", rich_help_panel="Policy")
app.add_typer(tokens.app, name="token", rich_help_panel="Policy")
