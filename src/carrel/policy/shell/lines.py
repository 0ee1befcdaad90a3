"""Reads what lies between the words of shell text: blanks, comments, line ends, here-documents, redirections.

Knows reserved words by sight; what they begin, `grammar` knows.
"""

from __future__ import annotations

import re
from abc import abstractmethod

from carrel.policy.shell.syntax import Expansion, Part, Redirect, Text, Unreadable, Word
from carrel.policy.shell.words import BLANK, META, WordReader, merged

OPENING = frozenset({"if", "while", "until", "for", "select", "case", "{", "[[", "function", "coproc"})
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}", "in"})
RESERVED = OPENING | _CLOSING | {"!", "time", "]]"}
_OPERATORS = ("&>>", "&>", "<<<", "<<-", "<<", "<&", "<>", "<", ">>", ">&", ">|", ">")
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>])|\{[A-Za-z_][A-Za-z0-9_]*\}(?=[<>])")
_BROKEN_DESCRIPTOR = re.compile(r"(?:[0-9]|\\\n)+[<>]|\{(?:[A-Za-z0-9_]|\\\n)+\}(?:\\\n)*[<>]")


class LineReader(WordReader):
    """Reads everything but commands."""

    _after_glimpse = 0

    @abstractmethod
    def here_reader(self, body: str) -> LineReader:
        """A reader for the body of a here-document."""

    def blanks(self) -> None:
        """Skip blanks and a comment."""
        before = self.at
        while (char := self.char()) and char in BLANK:
            self.at += 1
        if char == "#":
            # A continuation in front would join it to the word before, unless something real ends that word.
            raw = self.text[before - 1 : before] if self.at == before else " "
            if raw and raw not in META and self.text[self.at - 2 : self.at] == "\\\n":
                raise Unreadable("a comment after a line continuation")
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end

    def newlines(self) -> None:
        """Skip blanks, comments and line ends."""
        self.blanks()
        while self.char() == "\n":
            self.line_end()
            self.blanks()

    def line_end(self) -> None:
        """Consume a line end and the here-documents that begin after it."""
        self.at += 1
        waiting, self.pending = self.pending, []
        for redirect in waiting:
            self._here_document(redirect)

    def _here_document(self, redirect: Redirect) -> None:
        end = "".join(part.text for part in redirect.target.parts if isinstance(part, Text))
        quoted = any(part.quoted for part in redirect.target.parts)
        lines: list[str] = []
        while True:
            if self.at >= len(self.text):
                raise Unreadable("a here-document is not closed")
            stop = self.text.find("\n", self.at)
            stop = len(self.text) if stop < 0 else stop
            line = self.text[self.at : stop]
            self.at = min(stop + 1, len(self.text))
            shown = line.lstrip("\t") if redirect.operator == "<<-" else line
            if shown == end:
                break
            if not quoted and (len(line) - len(line.rstrip("\\"))) % 2:
                raise Unreadable("a line continuation in a here-document")
            if stop == len(self.text):
                raise Unreadable("a here-document is not closed")
            lines.append(shown)
        body = "".join(line + "\n" for line in lines)
        if quoted:
            redirect.body = (Text(body, quoted=True),)
        else:
            redirect.body = self.here_reader(body).here_text()

    def here_text(self) -> tuple[Part, ...]:
        """The parts of an unquoted here-document."""
        parts: list[Part] = []
        while char := self.char():
            if char == '"' or (char == "\\" and self.text[self.at + 1 : self.at + 2] == '"'):
                parts.append(Text(char, quoted=True))
                self.at += 1
            else:
                parts += self.inside_quotes(char)
        return merged(parts)

    def glimpse(self) -> str | None:
        """The reserved word that is next, without consuming it."""
        start, word = self.at, ""
        while (char := self.char()) and char not in META:
            word += char
            if len(word) > 8:
                break
            self.at += 1
        place, self.at = self.at, start
        if word not in RESERVED:
            return None
        if word == "time" and self.dialect != "bash":
            return None
        self._after_glimpse = place
        return word

    def expect(self, *words: str) -> str:
        """Consume one of these reserved words."""
        self.newlines()
        found = self.glimpse()
        if found is None or found not in words:
            raise Unreadable(f"'{words[0]}' is missing")
        self.reserved()
        return found

    def reserved(self) -> None:
        """Consume the reserved word that was glimpsed."""
        self.char()
        self.facts.starts.add(self.place(self.at))
        self.at = self._after_glimpse

    def redirect(self) -> Redirect | None:
        """The redirection that is next."""
        start = self.at
        self.char()
        if found := _DESCRIPTOR.match(self.text, self.at):
            self.at = found.end()
            if self.opens():
                raise Unreadable("a number right in front of a process substitution")
            if found[0].startswith("{"):
                self.only_bash("{name}>")
                self.facts.assign_anything(found[0][1:-1], found[0])
        elif _BROKEN_DESCRIPTOR.match(self.text, self.at):
            raise Unreadable("a line continuation in front of a redirection")
        char = self.char()
        if char == "&" and not self.follows("&>"):
            self.at = start
            return None
        if not char or char not in "&<>" or (self.opens() and char != "&"):
            self.at = start
            return None
        operator = next((each for each in _OPERATORS if self.take(each)), None)
        if operator is None:
            self.at = start
            return None
        if operator in {"&>", "&>>", "<<<"}:
            self.only_bash(operator)
        while (char := self.char()) and char in BLANK:
            self.at += 1
        if operator in {"<&", ">&"} and self.take("-"):
            # The dash is whole: what follows without a blank is a word of its own.
            return Redirect(operator, Word((Text("-", quoted=False),), -1, "-"))
        target = self.word()
        if target is None:
            raise Unreadable("a redirection without a target")
        made = Redirect(operator, target)
        if operator in {"<<", "<<-"}:
            if any(isinstance(part, Expansion) for part in target.parts) or "\n" in target.source:
                raise Unreadable("the end of a here-document that is not understood")
            self.pending.append(made)
        return made


def skeleton(word: Word) -> str:
    """The unquoted text of a word, with a mark where something is quoted or replaced."""
    return "".join(
        part.text if isinstance(part, Text) and not part.quoted else "\0" * _size(part) for part in word.parts
    )


def after(word: Word, length: int) -> Word:
    """What is left of a word behind so many characters of its skeleton."""
    left: list[Part] = []
    for part in word.parts:
        size = _size(part)
        if length >= size:
            length -= size
        elif isinstance(part, Text):
            left.append(Text(part.text[length:], part.quoted))
            length = 0
        else:
            left.append(part)
    return Word(tuple(left), word.at, word.source)


def _size(part: Part) -> int:
    """How long a part is in a skeleton: empty quotes count too, for they make a word another one."""
    return max(1, len(part.text)) if isinstance(part, Text) else 1
