"""`run`, `exec` and `logs`: commands in sandboxes, with their output where it belongs."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from carrel.cli import options
from carrel.errors import ApprovalNeeded, NotFound

Words = Annotated[list[str], typer.Argument(metavar="COMMAND", help="One word is shell text; several run as they are.")]
Cwd = Annotated[str | None, typer.Option("--cwd", "-C", help="Directory, relative to the workspace.")]


@options.makes_sandbox
def run(
    command: Words,
    *,
    wanted: options.Wanted,
    timeout: options.Timeout = None,
    env: options.Env = None,
    interactive: options.Interactive = False,
    tty: options.Tty = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox running (needs a server).")] = False,
    json: options.Json = False,
) -> None:
    """Run one command in a fresh sandbox that is gone afterwards. No server is needed beforehand.

    Where no server runs, nothing is audited. Where a policy, a template or a network is set, it starts a server.

    Output is live, the exit code is the command's: 128+n for a signal, 124 at the deadline. Ctrl-C interrupts the
    command; a second one kills it.

    \b
    carrel run -- python3 -c 'print(6 * 7)'
    carrel run --timeout 10 --memory 256m 'make test 2>&1 | tail'
    carrel run --template data-science -- python3 report.py
    carrel run -it -- python3
    cat data.csv | carrel run -- wc -l
    """
    from carrel.cli.failures import note
    from carrel.cli.reach import single, to_the_end
    from carrel.cli.streams import attended

    environment, program = options.environment(env), options.program(command)

    async def work() -> int:
        async with single(wanted, keep=keep) as box:
            if box.unsafe:
                note(f"carrel: UNSAFE: provider '{box.provider}' does not isolate")
            if keep:
                note(f"carrel: kept as {box.id}; `carrel rm {box.id}` removes it")
            return await attended(
                box, program, cwd=None, env=environment, timeout=timeout, interactive=interactive, tty=tty, json=json
            )

    raise typer.Exit(to_the_end(work()))


@options.makes_sandbox
def execute(
    context: options.Context,
    command: Words,
    *,
    wanted: options.Wanted,
    cwd: Cwd = None,
    timeout: options.Timeout = None,
    env: options.Env = None,
    interactive: options.Interactive = False,
    tty: options.Tty = False,
    approval: options.Approval = None,
    wait: options.Wait = None,
    json: options.Json = False,
) -> None:
    """Run a command in a context's sandbox, which is made or resumed when needed and stays.

    Options come before the context: what is behind it is the command. Ctrl-C interrupts the command; a second one
    kills it.

    \b
    carrel exec conversation-42 -- pytest -q
    carrel exec -it conversation-42 -- python3
    carrel exec --wait 300 conversation-42 -- git push
    carrel exec --network allowlist --memory 4g conversation-42 'git log --oneline | head'
    """
    from carrel.cli.reach import attempt, kept, to_the_end
    from carrel.cli.streams import attended

    environment, program = options.environment(env), options.program(command)

    async def work() -> int:
        async with kept(context, wanted) as box:
            return await attended(
                attempt(box, approval, wait),
                program,
                cwd=cwd,
                env=environment,
                timeout=timeout,
                interactive=interactive,
                tty=tty,
                json=json,
            )

    try:
        code = to_the_end(work())
    except ApprovalNeeded as error:
        # What was approved is the command with its directory and its variables.
        where = [] if cwd is None else ["--cwd", cwd]
        variables = [word for each in env or () for word in ("--env", each)]
        again = shlex.join(["--approval", error.approval or "ID", *where, *variables, context, *command])
        error.hint = f"somebody else lets it with `carrel approve {error.approval}`; then `carrel exec {again}`"
        raise
    raise typer.Exit(code)


def logs(
    context: options.Context,
    command_id: Annotated[str | None, typer.Argument(help="A command of `carrel ps CONTEXT`; else the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the command ends.")] = False,
    offset: Annotated[int, typer.Option(min=0, help="Start at this byte of the output.")] = 0,
    json: options.Json = False,
) -> None:
    """Show what a command has written.

    \b
    carrel logs conversation-42
    carrel logs conversation-42 -f
    """
    from carrel.cli.shown import print_line
    from carrel.cli.streams import write_out
    from carrel.client import Client, Output

    with Client(administrator=True) as client:
        box = client.attach(client.find(context))
        if command_id is None:
            known = box.commands.list()
            if not known:
                raise NotFound(f"'{context}' remembers no command", hint=f"carrel exec {context} -- COMMAND")
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
