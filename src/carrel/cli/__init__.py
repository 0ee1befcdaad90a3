"""The `carrel` command: arguments in, calls of the SDK, text or JSON out. Holds no logic of sandboxes."""

from __future__ import annotations

import io
import sys
from typing import NoReturn


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. Every failure becomes a line or two on stderr and an exit code."""
    from carrel.cli.failures import exit_code_of

    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character is shown its code.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from carrel.cli.app import app

        # Without standalone mode typer hands back the exit code and leaves failures to be told here.
        code = app(args=given, prog_name="carrel", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        code = exit_code_of(error, trace="--trace" in given[:1])
    sys.exit(code if isinstance(code, int) else 0)
