"""A cursor over shell text: characters, line continuations, quotes. Knows nothing of expansions or commands."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from carrel.policy.shell.step_budget import MAX_TEXT
from carrel.policy.shell.syntax import Dialect, Redirect, TextFacts, Unreadable

MAX_DEPTH = 40
_ENDS = frozenset({"", " ", "\t", "\n"})
_PLAIN = _ENDS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:,+@%^-")
_JOINS_ON = frozenset("$\\<>{[!#`")
"""Characters that form a token together with the character after them."""
_BIDI = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_ESCAPES = {"a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_NUMERIC_ESCAPE = re.compile(r"([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})")


def check(text: str) -> None:
    """Refuse text that is too long, or contains characters that are invisible to a person or invalid for a shell."""
    if len(text) > MAX_TEXT:
        raise Unreadable(f"it is longer than {MAX_TEXT} characters")
    if text.isascii() and text.isprintable():
        return
    for char in text:
        if char < " " and char not in "\t\n":
            raise Unreadable(f"it contains the control character U+{ord(char):04X}")
        if char > "~" and (char in _BIDI or unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}):
            raise Unreadable(f"it contains the invisible or invalid character U+{ord(char):04X}")


class Cursor:
    """A text and a position in it. `origin` maps each position to one in the text that this text was taken from."""

    def __init__(
        self, text: str, facts: TextFacts, dialect: Dialect, *, depth: int = 0, origin: Sequence[int] | None = None
    ):
        if depth > MAX_DEPTH:
            raise Unreadable("the text is nested too deeply")
        self.text = text
        self.facts = facts
        self.dialect = dialect
        self.depth = depth
        self.at = 0
        self.pending: list[Redirect] = []  # here-documents whose body comes after the line
        self._origin = origin
        self._budget = facts.budget
        self._budget.spend(1 + len(text) // 8)

    def place(self, at: int) -> int:
        """Return the position in the outermost text; -1 if it is not there."""
        if self._origin is None:
            return at
        return self._origin[at] if at < len(self._origin) else -1

    def char(self) -> str:
        """Skip line continuations and return the next character; an empty string at the end."""
        text, at = self.text, self.at
        self._budget.spend()
        if at >= len(text):
            return ""
        if (char := text[at]) != "\\":
            return char
        if text.startswith("\\\n", at):
            before = text[self.at - 1 : self.at]
            while text.startswith("\\\n", self.at):
                self._budget.spend()
                self.at += 2
            behind = text[self.at : self.at + 1]
            if before not in _ENDS and (before in _JOINS_ON or behind not in _PLAIN):
                raise Unreadable("a line continuation inside a token")
        return text[self.at] if self.at < len(text) else ""

    def parenthesis_follows(self) -> bool:
        """Whether a parenthesis follows the next character, as in `<(`."""
        at = self.at + 1
        if self.text.startswith("\\\n", at):
            while self.text.startswith("\\\n", at):
                self._budget.spend()
                at += 2
            if self.text.startswith("(", at):
                raise Unreadable("a line continuation in front of a parenthesis")
        return self.text.startswith("(", at)

    def take(self, token: str) -> bool:
        """Consume a token if it is next; return whether it was."""
        start = self.at
        for wanted in token:
            if self.char() != wanted:
                self.at = start
                return False
            self.at += 1
        return True

    def follows(self, token: str) -> bool:
        """Whether a token is next."""
        start = self.at
        found = self.take(token)
        self.at = start
        return found

    def only_bash(self, what: str) -> None:
        """Refuse a construct of Bash if the text is for another shell."""
        if self.dialect != "bash":
            raise Unreadable(f"sh and Bash read {what} differently")

    def escaped(self) -> str:
        """Consume a backslash and the character after it; return that character."""
        following = self.text[self.at + 1 : self.at + 2]
        if not following:
            raise Unreadable("the text ends with a backslash")
        self.at += 2
        return following

    def single_quoted(self) -> str:
        """Consume a text in single quotes; return it without the quotes."""
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise Unreadable("a single quote is not closed")
        found = self.text[self.at + 1 : end]
        self.no_line_end_in(found)
        self.at = end + 1
        return found

    def no_line_end_in(self, found: str) -> None:
        """Refuse a line end inside a word while a here-document waits for the end of its line."""
        if self.pending and "\n" in found:
            raise Unreadable("a line ends inside quotes while a here-document is open")

    def ansi_c(self) -> str:
        """Read a text in `$'…'`, after its first quote; return it with its escapes replaced."""
        self.only_bash("$'…'")
        out: list[str] = []
        text = self.text
        while True:
            char = text[self.at : self.at + 1]
            if not char:
                raise Unreadable("a single quote is not closed")
            self.at += 1
            if char == "'":
                self.no_line_end_in("".join(out))
                return "".join(out)
            if char != "\\":
                out.append(char)
                continue
            following = text[self.at : self.at + 1]
            if numeric := _NUMERIC_ESCAPE.match(text, self.at):
                self.at = numeric.end()
                octal, byte, short, long = numeric.groups()
                value = int(octal, 8) & 0xFF if octal else int(byte or short or long, 16)
                if value == 0 or value > 0x7F:
                    raise Unreadable("a numeric escape for a character that is not ASCII")
                out.append(chr(value))
            elif following in _ESCAPES:
                out.append(_ESCAPES[following])
                self.at += 1
            elif following and following in "\\'\"?":
                out.append(following)
                self.at += 1
            else:
                raise Unreadable("an unknown escape in $'…'")
