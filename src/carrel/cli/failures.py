"""Reports failures: `error:` and `hint:` on stderr and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from carrel.errors import ApprovalNeeded, CarrelError, Denied, Unauthorized
from carrel.extras import ExtraMissing

USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 1
TIMED_OUT = 124


class Terminated(BaseException):
    """A signal ended the command line. Raised after it has cleaned up."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def note(text: str) -> None:
    """Print a line to stderr; ignore it if stderr cannot be written to."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def flush_or_discard(stream: TextIO) -> OSError | None:
    """Flush a standard stream. If that fails, discard its content and all later output, and return the error."""
    try:
        stream.flush()
    except OSError as error:
        _discard(stream)
        return error
    return None


def _discard(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    stream.flush()


def print_error(error: str, hint: str | None = None) -> None:
    """Print an error and a hint. Control characters are escaped, because they may come from an agent."""
    note(f"error: {_printable(error)}")
    if hint:
        note(f"hint: {_printable(hint)}")


def exit_code_of(error: BaseException, *, trace: bool = False) -> int:
    """Print an error and return the exit code for it."""
    if trace and not isinstance(error, SystemExit):
        import traceback

        note("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Terminated):
        return 128 + error.number
    if isinstance(error, BaseExceptionGroup):
        return exit_code_of(error.exceptions[0])
    if isinstance(error, BrokenPipeError):
        _discard(sys.stdout)
        return BROKEN_PIPE
    if isinstance(error, CarrelError | ExtraMissing):
        print_error(error.detail, hint_of(error))
        return 1
    if callable(words := getattr(error, "format_message", None)):
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", "carrel")
        # The message is empty when help was printed because no command was given.
        if message := str(words()).rstrip(".").replace(": Value error, ", ": "):
            print_error(message, f"`{command} --help` shows how it is used")
        return USAGE
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    if isinstance(error, OSError):
        if error.filename is None and (refused := flush_or_discard(sys.stdout)) is not None:
            print_error(f"cannot write to standard output: {refused.strerror}")
            return 1
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
        return 1
    print_error(
        f"carrel failed: {type(error).__name__}: {error}",
        "this is a bug in carrel; `carrel --trace …` shows where it happened",
    )
    return 1


def hint_of(error: CarrelError | ExtraMissing) -> str | None:
    """Return a hint for the command line; the server's own hints are for callers of the API."""
    if isinstance(error, Unauthorized):
        if os.environ.get("CARREL_URL") and not os.environ.get("CARREL_TOKEN"):
            return "CARREL_URL names a server; set CARREL_TOKEN to a token of that server"
        return "set CARREL_TOKEN to a valid token, or unset it to use the token of the server on this machine"
    hint = error.hint
    if isinstance(error, ApprovalNeeded):
        if error.approval is None or (hint and "`carrel " in hint):
            return hint
        return f"another person allows it from now on with `carrel approve --for-context {error.approval}`; then retry"
    if isinstance(error, Denied) and error.rule and hint is None:
        source = error.extra.get("source")
        return f"the rule is {error.rule}{f' in {source}' if source else ''}"
    if hint is None or "/docs" in hint:
        return None
    return hint.replace("deploy_or_resume", "`carrel resume`")


def _printable(text: str) -> str:
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
