"""The `carrel` command: arguments in, calls of the SDK, text or JSON out. Holds no logic of sandboxes."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

_EXTRAS = {
    "agent": "a2a",
    "audit": "server",
    "doctor": "server",
    "mcp": "mcp",
    "policy": "server",
    "python": "server",
    "run": "server",
    "serve": "server",
}
"""The extra whose packages a command imports; every other command needs those of `cli` alone."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. Every failure becomes a line or two on stderr and an exit code."""
    from carrel.cli.failures import exit_code_of, flush_or_discard
    from carrel.extras import using

    given = sys.argv[1:] if arguments is None else arguments
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character is shown its code.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with using(_extra_for(given)):
            from carrel.cli.app import build, called

            app = build(called(given))
            # Without standalone mode typer hands back the exit code and leaves failures to be told here.
            code = app(args=given, prog_name="carrel", standalone_mode=False)
            sys.stdout.flush()
    except BaseException as error:
        code = exit_code_of(error, trace="--trace" in given[:1])
    # The interpreter flushes both once more when it ends; if that failed, it would exit with 120 and a traceback.
    flush_or_discard(sys.stdout)
    flush_or_discard(sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _extra_for(given: list[str]) -> str:
    command = next((word for word in given if not word.startswith("-")), "")
    return _EXTRAS.get(command, "cli")


def _open_standard_streams() -> None:
    """Who closed one of them wants nothing of it: then it is /dev/null, and no connection gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open
