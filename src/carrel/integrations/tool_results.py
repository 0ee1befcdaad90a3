"""Results of tools in words for a model: how a command ended, why something was refused. They are the same for every
protocol, so that a model has to learn them only once. Pure.
"""

from __future__ import annotations

from carrel.errors import ApprovalNeeded, CarrelError, Denied, PlatformError
from carrel.models import CommandInfo, CommandResult


def ending(result: CommandResult | CommandInfo) -> str:
    """Say how a command ended."""
    if result.timed_out:
        return "timed out: killed with everything it started"
    if result.oom_killed:
        return "killed: out of memory"
    return f"killed by {result.signal}" if result.signal is not None else f"exit code {result.exit_code}"


def joined(output: str, more: str) -> str:
    """Append lines to output, on a line of their own."""
    return output + ("" if not output or output.endswith("\n") else "\n") + more


def cut_middle(text: str, marker: str, *, head: int, tail: int) -> str:
    """Cut the middle out of a text that is too long."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}\n{marker}\n{text[-tail:]}"


def refusal_text(error: CarrelError) -> str:
    """Say what was not done, why, and whether to try again."""
    if isinstance(error, Denied):
        words = "A person has to approve this first" if isinstance(error, ApprovalNeeded) else "Denied"
        rule = f" (rule {error.rule})" if error.rule else ""
        again = "Try again later." if error.extra.get("retry") else "Trying again changes nothing: choose another way."
        text = f"{words}: {error.reason or error.detail}{rule}\n{again}"
    elif isinstance(error, PlatformError):
        text = (
            f"carrel itself failed, not what you asked for: {error.detail}\n"
            "It is not known whether anything was done. Try again later, or tell the person."
        )
    else:
        text = f"Not done: {error.detail}" + (f" [{error.field}]" if error.field else "")
    return text + hint(error)


def hint(error: CarrelError) -> str:
    """Return the hint of an error as a line of its own, if it has one."""
    return f"\nHint: {error.hint}" if error.hint else ""
