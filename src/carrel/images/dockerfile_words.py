"""Words of a Dockerfile: quotes, escapes and variables, by the rules of Dockerfiles (which are not those of a shell).

Pure, and linear in the length of the text.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAME_START = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_NAME = _NAME_START | frozenset("0123456789")
DEEPEST = 16
LONGEST = 1 << 20


class WordError(ValueError):
    """A word cannot be read. Its text says why."""


def split(text: str, escape: str) -> list[str]:
    """Split at blanks outside quotes. The words keep their quotes and escapes."""
    words: list[str] = []
    word, quote, index = "", "", 0
    while index < len(text):
        char = text[index]
        if char == escape and quote != "'" and index + 1 < len(text):
            word += text[index : index + 2]
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char.isspace():
            if word:
                words.append(word)
            word, index = "", index + 1
            continue
        word += char
        index += 1
    if quote:
        raise WordError(f"a quote {quote} is not closed")
    return [*words, word] if word else words


def pairs(text: str, escape: str) -> list[tuple[str, str]]:
    """Return the names and values of `a=1 b="2 3"`, or of the old form `a the rest`. They keep quotes and escapes."""
    words = split(text, escape)
    if words and "=" not in words[0]:
        rest = text.strip()[len(words[0]) :].strip()
        if not rest:
            raise WordError(f"'{words[0][:80]}' has no value")
        return [(words[0], rest)]
    found: list[tuple[str, str]] = []
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise WordError(f"'{word[:80]}' is not NAME=VALUE")
        found.append((name, value))
    return found


class _Expansion:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str, *, quotes: bool = True):
        self._quotes = quotes
        self._text = text
        self._variables = variables
        self._escape = escape
        self._at = 0

    def read(self, end: str, depth: int) -> str:
        """Return the text up to the character `end` (or to the end of the text), expanded."""
        if depth > DEEPEST:
            raise WordError("variables are nested too deep")
        parts: list[str] = []
        size = 0
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == end:
                break
            parts.append(self._next(char, depth))
            size += len(parts[-1])
            if size > LONGEST:
                raise WordError(f"a word is longer than {LONGEST} characters")
        return "".join(parts)

    def _next(self, char: str, depth: int) -> str:
        self._at += 1
        if char == "'" and self._quotes:
            return self._single_quoted()
        if char == '"' and self._quotes:
            return self._double_quoted(depth)
        if char == "$":
            return self._variable(depth)
        if char == self._escape and not self._quotes and self._text[self._at : self._at + 1] not in {"$", char}:
            return char
        if char == self._escape and self._at < len(self._text):
            self._at += 1
            return self._text[self._at - 1]
        return char

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise WordError("a quote ' is not closed")
        found, self._at = self._text[self._at : end], end + 1
        return found

    def _double_quoted(self, depth: int) -> str:
        parts: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == '"':
                return "".join(parts)
            if char == "$":
                parts.append(self._variable(depth))
            elif char == self._escape and self._text[self._at : self._at + 1] in {'"', "$", self._escape}:
                parts.append(self._text[self._at])
                self._at += 1
            else:
                parts.append(char)
        raise WordError('a quote " is not closed')

    def _variable(self, depth: int) -> str:
        if self._text[self._at : self._at + 1] != "{":
            name = self._name()
            return self._variables.get(name, "") if name else "$"
        self._at += 1
        name = self._name()
        if not name:
            raise WordError("${ is not followed by a name")
        value, operator = self._variables.get(name), ""
        for known in (":-", ":+", "-", "+"):
            if self._text.startswith(known, self._at):
                operator = known
                break
        if not operator and self._text[self._at : self._at + 1] != "}":
            raise WordError(f"${{{name}… is not supported: use ${{{name}}}, ${{{name}:-word}} or ${{{name}:+word}}")
        self._at += len(operator)
        word = self.read("}", depth + 1) if operator else ""
        if self._text[self._at : self._at + 1] != "}":
            raise WordError(f"${{{name} is not closed")
        self._at += 1
        there = value is not None and (value != "" or operator in {"-", "+"})
        if operator.endswith("-"):
            return value if there and value is not None else word
        if operator.endswith("+"):
            return word if there else ""
        return value or ""

    def _name(self) -> str:
        start = self._at
        if self._text[start : start + 1] in _NAME_START and start < len(self._text):
            while self._at < len(self._text) and self._text[self._at] in _NAME:
                self._at += 1
        return self._text[start : self._at]


def expand(word: str, variables: Mapping[str, str], escape: str) -> str:
    """Return a word with its variables replaced, and without its quotes and escapes."""
    return _Expansion(word, variables, escape).read("", 0)


def expand_text(text: str, variables: Mapping[str, str], escape: str) -> str:
    """Return a text with its variables replaced, in which quotes mean nothing."""
    return _Expansion(text, variables, escape, quotes=False).read("", 0)
