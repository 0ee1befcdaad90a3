"""The `carrel` command: parses arguments, calls the SDK, prints text or JSON."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

_EXTRAS = {
    "agent": "a2a",
    "audit": "server",
    "bundle": "server",
    "doctor": "server",
    "here": "server",
    "mcp": "mcp",
    "policy": "server",
    "python": "server",
    "run": "server",
    "serve": "server",
}
"""Command → the extra whose packages it imports. All other commands need only `cli`."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. Every failure becomes a line or two on stderr and an exit code."""
    from carrel.cli.failures import exit_code_of, flush_or_discard
    from carrel.extras import using

    given = sys.argv[1:] if arguments is None else arguments
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks are printed as escapes.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with using(_extra_for(given)):
            if (code := _quickly(given)) is not None:
                sys.exit(code)
            from carrel.cli.app import build, called

            app = build(called(given))
            # Without standalone mode typer returns the exit code and does not print failures itself.
            code = app(args=given, prog_name="carrel", standalone_mode=False)
            sys.stdout.flush()
    except BaseException as error:
        code = exit_code_of(error, trace="--trace" in given[:1])
    # The interpreter flushes both again when it ends; if that failed, it would exit with 120 and a traceback.
    flush_or_discard(sys.stdout)
    flush_or_discard(sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _quickly(given: list[str]) -> int | None:
    """Run a command that must start quickly, without the library that reads options; None for any other command."""
    if given[:1] != ["here"]:
        return None
    from carrel.cli.here.words import parse

    options = parse(given[1:])
    if options is None:
        return None
    from carrel.cli.here.start import start

    return start(options)


def _extra_for(given: list[str]) -> str:
    command = next((word for word in given if not word.startswith("-")), "")
    return _EXTRAS.get(command, "cli")


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed, so that no connection gets its descriptor number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open
