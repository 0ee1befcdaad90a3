"""`run`, `exec`, `sh` and `logs`: commands and terminals in sandboxes."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import attached, explaining_approval, with_approval
from carrel.cli.failures import note
from carrel.cli.printing import print_line
from carrel.errors import ApprovalNeeded, NotFound, NotRunning, SandboxLost

if TYPE_CHECKING:
    from carrel.client import AsyncSandbox, AsyncTerminal

Words = Annotated[
    list[str],
    typer.Argument(metavar="COMMAND", help="One word is run by a shell; several are a program and its arguments."),
]
Cwd = Annotated[str | None, typer.Option("--cwd", "-C", help="Directory to run in, relative to the workspace.")]
_END_OF_FILE = b"\x04"


@options.takes_sandbox_options
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="One word is run by a shell; several are a program and its arguments. Default: that of the image.",
        ),
    ] = None,
    *,
    sandbox: options.SandboxOptions,
    timeout: options.Timeout = None,
    env: options.Env = None,
    interactive: options.Interactive = False,
    tty: options.Tty = False,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the sandbox (needs a server).")] = False,
    json: options.Json = False,
) -> None:
    """Run one command in a new sandbox and remove the sandbox afterwards. Works without a server.

    Without a server nothing is audited. If a policy, a template or a network is set, it starts a server for the run.

    Output is printed as it comes. The exit code is that of the command: 128+n for a signal, 124 for a timeout. Ctrl-C
    interrupts the command; a second Ctrl-C kills it.

    \b
    carrel run -- python3 -c 'print(6 * 7)'
    carrel run --timeout 10 --memory 256m 'make test 2>&1 | tail'
    carrel run --template data-science -- python3 report.py
    carrel run -it -- python3
    cat data.csv | carrel run -- wc -l
    carrel run --image debian:12 -- cat /etc/os-release
    """
    from carrel.cli.running import image_command, one_command_sandbox, run_with_cleanup
    from carrel.cli.streams import run_attached

    environment, program = options.environment(env), options.program(command) if command else None
    if program is None:
        if not (sandbox.image or sandbox.template):
            raise typer.BadParameter("name a command, or an image whose command is run", param_hint="COMMAND")
        sandbox = replace(sandbox, start_in="image")

    async def work() -> int:
        async with one_command_sandbox(sandbox, keep=keep) as box:
            if box.unsafe:
                note(f"carrel: UNSAFE: provider '{box.provider}' does not isolate")
            if keep:
                note(f"carrel: kept as {box.id}; `carrel rm {box.id}` removes it")
            return await run_attached(
                box,
                program or await image_command(box),
                cwd=None,
                env=environment,
                timeout=timeout,
                interactive=interactive,
                tty=tty,
                json=json,
            )

    raise typer.Exit(run_with_cleanup(work()))


@options.takes_sandbox_options
def execute(
    context: options.Context,
    command: Words,
    *,
    sandbox: options.SandboxOptions,
    cwd: Cwd = None,
    timeout: options.Timeout = None,
    env: options.Env = None,
    interactive: options.Interactive = False,
    tty: options.Tty = False,
    approval: options.Approval = None,
    wait: options.Wait = None,
    json: options.Json = False,
) -> None:
    """Run a command in the sandbox of a context. The sandbox is created or resumed if needed, and stays.

    Options come before the context: everything after it is the command. Ctrl-C interrupts the command; a second
    Ctrl-C kills it.

    \b
    carrel exec conversation-42 -- pytest -q
    carrel exec -it conversation-42 -- python3
    carrel exec --wait 300 conversation-42 -- git push
    carrel exec --network allowlist --memory 4g conversation-42 'git log --oneline | head'
    """
    from carrel.cli.running import context_sandbox, run_with_cleanup
    from carrel.cli.streams import run_attached

    environment, program = options.environment(env), options.program(command)

    async def work() -> int:
        async with context_sandbox(context, sandbox) as box:
            return await run_attached(
                with_approval(box, approval, wait),
                program,
                cwd=cwd,
                env=environment,
                timeout=timeout,
                interactive=interactive,
                tty=tty,
                json=json,
            )

    try:
        code = run_with_cleanup(work())
    except ApprovalNeeded as error:
        # The approval covers the command with its directory and its variables.
        where = [] if cwd is None else ["--cwd", cwd]
        variables = [word for each in env or () for word in ("--env", each)]
        again = shlex.join(["--approval", error.approval or "ID", *where, *variables, context, *command])
        error.hint = f"another person allows it with `carrel approve {error.approval}`; then `carrel exec {again}`"
        raise
    raise typer.Exit(code)


@options.takes_sandbox_options
def sh(
    context: Annotated[
        str | None,
        typer.Argument(
            metavar="CONTEXT",
            help="The context whose sandbox to use; without one, a new sandbox that is removed afterwards.",
            autocompletion=options.contexts,
        ),
    ] = None,
    *,
    sandbox: options.SandboxOptions,
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
    from carrel.cli.running import context_sandbox, ephemeral_sandbox, run_with_cleanup

    async def work() -> int:
        async with context_sandbox(context, sandbox) if context is not None else ephemeral_sandbox(sandbox) as box:
            if box.unsafe:
                note(f"carrel: UNSAFE: provider '{box.provider}' does not isolate")
            return await _attend(with_approval(box, approval, wait), command)

    with explaining_approval():
        raise typer.Exit(run_with_cleanup(work()))


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
        # The end of a pipe means what Ctrl-D means at a keyboard.
        await terminal.send(_END_OF_FILE)


def logs(
    context: options.Context,
    command_id: Annotated[
        str | None, typer.Argument(help="A command id from `carrel ps CONTEXT`. Default: the newest.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new output until the command ends.")] = False,
    offset: Annotated[int, typer.Option(min=0, help="Start at this byte of the output.")] = 0,
    json: options.Json = False,
) -> None:
    """Print the output of a command.

    \b
    carrel logs conversation-42
    carrel logs conversation-42 -f
    """
    from carrel.cli.streams import write_out
    from carrel.client import Output

    with attached(context) as box:
        if command_id is None:
            known = box.commands.list()
            if not known:
                raise NotFound(
                    f"no command has run in '{context}' since its sandbox started",
                    hint=f"carrel exec {context} -- COMMAND",
                )
            command_id = known[-1].id
        handle = box.commands.get(command_id)
        if json and not follow:
            seen: Output = handle.output(offset)
            ended = seen.info.model_dump(mode="json") if seen.info else None
            body = {"id": handle.id, "stdout": seen.stdout, "stderr": seen.stderr, "offset": seen.offset}
            print_line({**body, "info": ended})
        elif json:
            for chunk in handle.stream(offset):
                print_line({"stream": chunk.stream, "text": chunk.text, "offset": chunk.offset})
        elif follow:
            for chunk in handle.stream(offset):
                write_out(chunk.stream, chunk.data)
        else:
            for chunk in handle.written(offset):
                write_out(chunk.stream, chunk.data)
