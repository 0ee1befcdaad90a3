"""`sh`: a terminal of a sandbox in the terminal one sits at."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.errors import NotRunning, SandboxLost

if TYPE_CHECKING:
    import asyncio

    from carrel.client import AsyncSandbox, AsyncTerminal

_END_OF_FILE = b"\x04"


def sh(
    context: Annotated[
        str | None,
        typer.Argument(
            metavar="CONTEXT",
            help="Its sandbox; else one that is gone afterwards.",
            autocompletion=options.contexts,
        ),
    ] = None,
    command: Annotated[str | None, typer.Option("--command", "-c", help="Run this instead of a shell.")] = None,
    provider: options.Provider = None,
    trust: options.Trust = None,
    approval: options.Approval = None,
    wait: options.Wait = None,
) -> None:
    """Open an interactive terminal in a sandbox.

    \b
    carrel sh
    carrel sh conversation-42
    carrel sh conversation-42 -c 'vim notes.md'
    """
    from carrel.cli.failures import note
    from carrel.cli.reach import attempt, ephemeral, kept, once_approved, to_the_end

    if context is not None and (provider or trust):
        raise typer.BadParameter("it is for a fresh sandbox; a context has its own", param_hint="--provider/--trust")
    asked = options.Ephemeral(provider=provider, trust=trust)

    async def work() -> int:
        async with kept(context) if context is not None else ephemeral(asked) as box:
            if box.unsafe:
                note(f"carrel: UNSAFE: provider '{box.provider}' does not isolate")
            return await _attend(attempt(box, approval, wait), command)

    with once_approved():
        raise typer.Exit(to_the_end(work()))


async def _attend(box: AsyncSandbox, command: str | None) -> int:
    import asyncio

    from carrel.cli.streams import exit_code, write_out

    columns, rows = shutil.get_terminal_size()
    async with await box.terminal(rows, columns, command) as terminal:
        with _raw_mode(), _following_size(terminal):
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


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too; the terminal is as before afterwards, whatever happens."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Keys typed ahead are for the shell: they are kept.
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _following_size(terminal: AsyncTerminal) -> Iterator[None]:
    if not sys.stdout.isatty():
        yield
        return
    import asyncio

    loop = asyncio.get_running_loop()
    pending: set[asyncio.Task[None]] = set()

    async def resize() -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        with contextlib.suppress(NotRunning):
            await terminal.resize(max(size.lines, 1), max(size.columns, 1))

    def changed() -> None:
        task = loop.create_task(resize())
        pending.add(task)
        task.add_done_callback(pending.discard)

    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        for task in pending:
            task.cancel()
