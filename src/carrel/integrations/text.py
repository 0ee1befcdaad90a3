"""Text from agents and sandboxes, made safe for people who read it and protocols that send it. Pure."""

from __future__ import annotations

import re

_SPACES = re.compile(r"\s{4,}")


def one_line(text: str, longest: int | None = 500) -> str:
    """Put an agent's text on one line for the person who decides on it, and say what is cut.

    Control characters are replaced, and long runs of spaces, which could hide what follows them.
    """
    line = "".join(c if c.isprintable() else "⏎" if c == "\n" else "�" for c in text.strip())
    line = _SPACES.sub(lambda found: f" [{len(found[0])} spaces] ", line)
    left = 0 if longest is None else len(line) - longest
    return line if left <= 0 else f"{line[:longest]} […] and {left} characters more, which are not shown"


def sendable_text(text: str) -> str:
    """Escape what JSON cannot carry: file names that are not UTF-8 reach Python with surrogate escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def printable(path: str) -> str:
    """Escape the control characters of a file name, which may have any bytes."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in sendable_text(path))
