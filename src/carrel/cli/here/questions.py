"""Questions of a sandbox to the person at the terminal: approvals that wait, asked with one key each.

Knows nothing of screens: `streams` shows the text and brings the keys. An approval that nobody answers expires on
the server, which means no.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from carrel.cli.failures import note
from carrel.cli.here.wire import LocalWire
from carrel.errors import CarrelError

_KEYS: dict[bytes, dict[str, Any]] = {
    b"a": {"approve": True},
    b"y": {"approve": True},
    b"c": {"approve": True, "scope": "context"},
    b"d": {"approve": False, "message": "the person at the terminal said no"},
    b"n": {"approve": False, "message": "the person at the terminal said no"},
    b"\x03": {"approve": False, "message": "the person at the terminal said no"},
}
SILENCE_S = 0.5
"""A key answers a question only if nothing was typed for so long before it."""
_LONGEST = 2000
_MOST_LINE = 1024 * 1024


class ApprovalQuestions:
    """The approvals of one context, as the server reports them. Without `asks` they are only announced on stderr."""

    def __init__(self, wire: LocalWire, context: str, *, asks: bool, answer_with: str):
        self._wire = wire
        self._context = context
        self._asks = asks
        self._answer_with = answer_with
        self._pending: dict[str, dict[str, Any]] = {}
        self._seen: set[str] = set()
        self.answers: dict[str, bool] = {}
        """Which questions of this run were answered with yes, and which were not."""
        self._connection: socket.socket | None = None
        self._received = b""
        self._last_typed = 0.0

    def open(self) -> None:
        """Ask the server for news. Does not wait for the answer."""
        self._connection = self._wire.open_stream("/v1/approvals/watch")

    def fileno(self) -> int:
        """Return the descriptor on which news arrive; -1 when none can arrive."""
        return -1 if self._connection is None else self._connection.fileno()

    def arrived(self) -> None:
        """Read the news. When the server closes the stream, there are no more questions."""
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(self._received) > _MOST_LINE:
            self.close()
            return
        # The lines are JSON objects between the headers and sizes of HTTP, which are no JSON objects.
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            approval = json.loads(line)
        except ValueError:
            return
        if not isinstance(approval, dict) or approval.get("context_id") != self._context:
            return
        name = str(approval.get("id"))
        if approval.get("state") != "pending":
            self._pending.pop(name, None)
            if name in self._seen:
                self.answers[name] = approval.get("state") == "approved"
            return
        self._pending[name] = approval
        if name in self._seen:
            return
        self._seen.add(name)
        _notify(_line(approval.get("summary")))
        if not self._asks:
            how = f"`{self._answer_with} approve {name}` or `{self._answer_with} deny {name}`"
            begin, end = ("\r\n", "\r") if os.isatty(2) else ("", "")  # the terminal may be in raw mode
            note(f"{begin}carrel: the program waits for an answer: {_line(approval.get('summary'))}; {how}{end}")

    @property
    def waiting(self) -> bool:
        """Whether there is something to ask at the terminal."""
        if self._pending:
            now = time.time()
            for name in [each for each, approval in self._pending.items() if _expiry(approval) <= now]:
                del self._pending[name]
                self.answers[name] = False
        return self._asks and bool(self._pending)

    def text(self) -> bytes:
        """Return the first question. Keys answer it from a moment after this call."""
        self._last_typed = time.monotonic()
        approval = next(iter(self._pending.values()))
        lines = [
            "carrel: may the program do this?",
            "",
            f"  {_line(approval.get('summary'))}",
            f"  why it asks: {_line(approval.get('reason'))}",
            f"  no answer until {_line(approval.get('expires_at'))[11:19]} UTC means no",
            "",
            "[a] allow once   [c] allow it in this context from now on   [d] deny ",
        ]
        return "\r\n".join(lines).encode()

    def typed(self, keys: bytes) -> bool:
        """Take what was typed; return whether it has answered the question.

        Only a single key after a moment of silence does. Other keys were meant for the program. And the program could
        answer for the person: a terminal sends its answers to queries, and the mouse, the same way as keys, and the
        program can choose the letters in them.
        """
        now = time.monotonic()
        is_silent, self._last_typed = now - self._last_typed >= SILENCE_S, now
        decision = _KEYS.get(keys.lower())
        if decision is None or not is_silent:
            return False
        name = next(iter(self._pending))
        del self._pending[name]
        self.answers[name] = bool(decision["approve"])
        try:
            self._wire.request("POST", f"/v1/approvals/{name}/decide", decision)
        except CarrelError as error:  # another person was quicker, or it has expired
            note(f"\r\ncarrel: {error.detail}\r")
        return True

    def close(self) -> None:
        """Stop listening."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _expiry(approval: dict[str, Any]) -> float:
    """Return the time when the question expires: then no answer means no. The server sends no event for it."""
    from datetime import datetime

    return datetime.fromisoformat(str(approval["expires_at"])).timestamp()


def _line(value: object) -> str:
    """Return text of an agent in one printable line."""
    text = " ".join(str(value).split())[:_LONGEST]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _notify(summary: str) -> None:
    """Show a notification on the desktop, where there is one."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    import shutil
    import subprocess

    program = shutil.which("notify-send")
    if program is None:
        return
    nowhere = subprocess.DEVNULL
    words = [program, "--app-name=carrel", "--", "carrel here asks", summary]
    with suppress(OSError):  # it cannot be started; the question is in the terminal too
        subprocess.Popen(words, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
