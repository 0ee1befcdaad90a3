"""`sh`: a terminal of a sandbox in the terminal one sits at."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.errors import NotRunning, SandboxLost

if TYPE_CHECKING:
    from carrel.client import AsyncSandbox, AsyncTerminal

_END_OF_FILE = b"\x04"


@options.makes_sandbox
def sh(
    context: Annotated[
        str | None,
        typer.Argument(
            metavar="CONTEXT",
            help="Its sandbox; else one that is gone afterwards.",
            autocompletion=options.contexts,
        ),
    ] = None,
    *,
    wanted: options.Wanted,
    command: Annotated[str | None, typer.Option("--command", "-c", help="Run this instead of a shell.")] = None,
    approval: options.Approval = None,
    wait: options.Wait = None,
) -> None:
    """Open an interactive terminal in a sandbox.

    \b
    carrel sh
    carrel sh --network allowlist
    carrel sh conversation-42
    carrel sh conversation-42 -c 'vim notes.md'
    """
    from carrel.cli.failures import note
    from carrel.cli.reach import attempt, ephemeral, kept, once_approved, to_the_end

    async def work() -> int:
        async with kept(context, wanted) if context is not None else ephemeral(wanted) as box:
            if box.unsafe:
                note(f"carrel: UNSAFE: provider '{box.provider}' does not isolate")
            return await _attend(attempt(box, approval, wait), command)

    with once_approved():
        raise typer.Exit(to_the_end(work()))


async def _attend(box: AsyncSandbox, command: str | None) -> int:
    import asyncio

    from carrel.cli.streams import exit_code, following_size, raw_mode, terminal_size, write_out

    rows, columns = terminal_size()
    async with await box.terminal(rows, columns, command) as terminal:
        with raw_mode(), following_size(terminal.resize):
            typing = asyncio.ensure_future(_type(terminal))
            try:
                async for data in terminal:
                    await asyncio.to_thread(write_out, "stdout", data)
            finally:
                typing.cancel()
                await asyncio.gather(typing, return_exceptions=True)
    if terminal.exit is None:
        raise SandboxLost("the terminal was closed by the server", hint="is the sandbox still running?")
    return exit_code(terminal.exit)


async def _type(terminal: AsyncTerminal) -> None:
    from carrel.cli.streams import standard_input

    with contextlib.suppress(NotRunning):
        async for data in standard_input():
            await terminal.send(data)
        # A pipe that ends is what Ctrl-D is at a keyboard.
        await terminal.send(_END_OF_FILE)
