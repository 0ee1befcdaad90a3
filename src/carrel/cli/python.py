"""`python`: runs Python code in a sandbox, in a new process or in a code context that keeps its variables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected, explaining_approval, find_or_create, with_approval
from carrel.cli.failures import TIMED_OUT, note
from carrel.cli.printing import print_json
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    from carrel.client import Client, Sandbox


@options.takes_sandbox_options
def python(
    context: Annotated[
        str | None,
        typer.Argument(
            metavar="CONTEXT",
            help="A context id or a sandbox id. Without one, a new sandbox is used and removed afterwards.",
            autocompletion=options.contexts,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A local file with the code; '-' or none reads standard input."),
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments, for `sys.argv`.")] = None,
    *,
    sandbox: options.SandboxOptions,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="The code, instead of a file.")] = None,
    cell: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run it as a cell of this code context, which keeps variables.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", metavar="NAME", help="A Python environment; see `carrel envs`.")
    ] = None,
    timeout: options.Timeout = None,
    env: options.Env = None,
    approval: options.Approval = None,
    wait: options.Wait = None,
    json: options.Json = False,
) -> None:
    """Run Python in a new sandbox, or in the sandbox of a context, which is created or resumed if needed and stays.

    The first argument is a file if it ends in .py or has a slash, else a context. Without -c or a file the code is
    read from standard input. Options of your own program come after `--`.

    \b
    carrel python report.py 2026 -- --all
    carrel python -c 'print(6 * 7)'
    carrel python conversation-42 report.py
    carrel python conversation-42 -c 'print(6 * 7)'
    carrel python conversation-42 --cell analysis -c 'x = 41'
    carrel python conversation-42 --cell analysis -c 'x + 1'
    """
    from carrel.cli.running import context_sandbox, ephemeral_sandbox, run_with_cleanup
    from carrel.cli.streams import follow

    words = [word for word in (context, file) if word is not None] + (args or [])
    if code is None and cell is None and words and _is_file(words[0]):
        words.insert(0, "")
    context = words.pop(0) if words else None
    if not context and code is None and not words:
        raise InvalidRequest(
            "name a file or a context, or give the code with -c",
            field="context",
            hint="`carrel python FILE`, `carrel python CONTEXT FILE`, or `carrel python -c CODE`",
        )
    source = None if code is not None or not words else words.pop(0)
    text = code if code is not None else _read(source)
    variables = options.environment(env)
    if not context and (cell is not None or approval is not None or wait is not None):
        raise InvalidRequest("--cell, --approval and --wait need a context", field="context", hint="name one")
    if not context and code is not None and not sandbox and not variables and not words:
        with connected() as client:
            raise typer.Exit(_stateless(client, text, environment, timeout, json=json))
    if context and cell is not None:
        with connected() as client, explaining_approval():
            box = with_approval(find_or_create(client, context, sandbox), approval, wait)
            raise typer.Exit(_cell(box, cell, text, environment, variables, timeout, json=json))
    fed = (code is not None or source not in {None, "-"}) and not sys.stdin.closed and not sys.stdin.isatty()

    async def work() -> int:
        async with context_sandbox(context, sandbox) if context else ephemeral_sandbox(sandbox) as box:
            handle = await with_approval(box, approval, wait).python.start(
                text, args=words, env=environment, variables=variables, timeout=timeout, interactive=fed
            )
            return await follow(handle, fed=fed, json=json)

    with explaining_approval():
        raise typer.Exit(run_with_cleanup(work()))


def _is_file(word: str) -> bool:
    """Return whether a word is a local file: it ends in .py, or has a slash, which no context has."""
    return word.endswith(".py") or "/" in word or word == "-"


def _read(file: str | None) -> str:
    if file in {None, "-"} and sys.stdin.isatty():
        note("carrel: type the code, then Ctrl-D")
    try:
        text = sys.stdin.read() if file is None or file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}", field="file") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the code is not UTF-8", field="file") from None
    if not text:
        raise InvalidRequest("there is no code", field="code", hint="give -c CODE, a file, or code on standard input")
    return text


def _stateless(client: Client, text: str, env: str | None, timeout: float | None, *, json: bool) -> int:
    from carrel.cli.streams import signal_number, write_out

    done = client.python.run(text, env=env, timeout=timeout)
    if json:
        print_json(done)
    else:
        write_out("stdout", done.output.encode(errors="replace"))
        write_out("stderr", done.stderr.encode(errors="replace"))
    if done.timed_out:
        return TIMED_OUT
    return 128 + signal_number(done.signal) if done.exit_code is None else done.exit_code


def _cell(
    box: Sandbox,
    name: str,
    text: str,
    env: str | None,
    variables: dict[str, str],
    timeout: float | None,
    *,
    json: bool,
) -> int:
    from carrel.cli.streams import write_out

    stream = box.python.context(name, env=env, variables=variables).stream(
        text, timeout="default" if timeout is None else timeout
    )
    for chunk in stream:
        if not json:
            write_out(chunk.stream, chunk.data)
    result = stream.result()
    if json:
        print_json(result)
        return 0 if result.ok else 1
    for shown in result.results:
        if shown.text is not None:
            write_out("stdout", shown.text.encode(errors="replace") + b"\n")
    if result.error is not None:
        write_out("stderr", result.error.traceback.encode(errors="replace"))
    if result.status == "died":
        note(f"carrel: this cell ended code context '{name}'; its variables are gone")
    return 0 if result.ok else 1
