"""`python`: code in a context's sandbox, in a fresh process or in a code context that keeps its variables."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.failures import note
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    from carrel.client import Client, Sandbox


def python(
    context: Annotated[
        str | None,
        typer.Argument(
            metavar="CONTEXT",
            help="A context id, or a sandbox id; with -c it may be left out: then nothing is kept.",
            autocompletion=options.contexts,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A local file with the code; '-' or none reads it from stdin."),
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="For `sys.argv`.")] = None,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="The code itself.")] = None,
    cell: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run it as a cell of this code context: variables stay.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", metavar="NAME", help="An environment that `carrel envs` lists.")
    ] = None,
    timeout: options.Timeout = None,
    env: options.Env = None,
    approval: options.Approval = None,
    wait: options.Wait = None,
) -> None:
    """Run Python in a context's sandbox, which is made or resumed when needed and stays.

    Without -c or a file the code is read from standard input.

    \b
    carrel python -c 'print(6 * 7)'
    carrel python conversation-42 -c 'print(6 * 7)'
    carrel python conversation-42 report.py -- 2026 --all
    carrel python conversation-42 --cell analysis -c 'x = 41'
    carrel python conversation-42 --cell analysis -c 'x + 1'
    """
    from carrel.cli.reach import attempt, once_approved, wanted
    from carrel.client import Client

    if context is None and code is None:
        raise InvalidRequest(
            "name a context, or give the code with -c",
            field="context",
            hint="`carrel python CONTEXT FILE`, or `carrel python -c CODE`",
        )
    if context is not None and file is None and code is None and (context.endswith(".py") or "/" in context):
        raise InvalidRequest(
            f"'{context}' is taken for a context, which comes before the file",
            field="context",
            hint=f"carrel python CONTEXT {context}",
        )
    if code is not None and file is not None:
        args, file = [str(file), *(args or [])], None
    text = code if code is not None else _read(file)
    variables = options.environment(env)
    with Client(administrator=True) as client:
        if context is None:
            if cell is not None or variables or approval is not None or wait is not None:
                raise InvalidRequest(
                    "code contexts, variables, --approval and --wait need a context", field="context", hint="name one"
                )
            raise typer.Exit(_stateless(client, text, environment, timeout))
        box = attempt(wanted(client, context), approval, wait)
        with once_approved():
            if cell is not None:
                raise typer.Exit(_cell(box, cell, text, environment, variables, timeout))
            raise typer.Exit(_call(box, text, args or [], environment, variables, timeout))


def _read(file: Path | None) -> str:
    if (file is None or str(file) == "-") and sys.stdin.isatty():
        note("carrel: type the code, then Ctrl-D")
    try:
        text = sys.stdin.read() if file is None or str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", field="file") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the code is not UTF-8", field="file") from None
    if not text:
        raise InvalidRequest("there is no code", field="code", hint="give -c CODE, a file, or code on standard input")
    return text


def _stateless(client: Client, text: str, env: str | None, timeout: float | None) -> int:
    from carrel.cli.failures import TIMED_OUT
    from carrel.cli.streams import signal_number, write_out

    done = client.python.run(text, env=env, timeout=timeout)
    write_out("stdout", done.output.encode(errors="replace"))
    write_out("stderr", done.stderr.encode(errors="replace"))
    if done.timed_out:
        return TIMED_OUT
    return 128 + signal_number(done.signal) if done.exit_code is None else done.exit_code


def _call(
    box: Sandbox, text: str, args: list[str], env: str | None, variables: dict[str, str], timeout: float | None
) -> int:
    from carrel.cli.streams import exit_code, write_out
    from carrel.errors import CarrelError, SandboxLost

    handle = box.python.start(text, args=args, env=env, variables=variables, timeout=timeout)
    stream = handle.stream()
    try:
        for chunk in stream:
            write_out(chunk.stream, chunk.data)
    except BaseException:
        # Nobody waits for it any more: it ends as a command of `exec` does.
        with suppress(CarrelError):
            handle.kill()
        raise
    if stream.info is None:
        raise SandboxLost("the server did not say how the code ended")
    return exit_code(stream.info)


def _cell(box: Sandbox, name: str, text: str, env: str | None, variables: dict[str, str], timeout: float | None) -> int:
    from carrel.cli.streams import write_out

    stream = box.python.context(name, env=env, variables=variables).stream(
        text, timeout="default" if timeout is None else timeout
    )
    for chunk in stream:
        write_out(chunk.stream, chunk.data)
    result = stream.result()
    for shown in result.results:
        if shown.text is not None:
            write_out("stdout", shown.text.encode(errors="replace") + b"\n")
    if result.error is not None:
        write_out("stderr", result.error.traceback.encode(errors="replace"))
    if result.status == "died":
        note(f"carrel: code context '{name}' ended with this cell; its variables are gone")
    return 0 if result.ok else 1
