"""Reads the words of shell text, character by character, exactly as Bash does.

No grammar table can describe Bash: the meaning of a character depends on the quotes and expansions around it. So every
context has its own method here. Text that Bash might read differently raises `Unreadable`. The commands inside a
substitution are read by `commands`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby

from carrel.policy.shell.cursor import Cursor
from carrel.policy.shell.syntax import (
    Block,
    Expansion,
    LiteralText,
    Part,
    Unreadable,
    Word,
    may_run,
    prints_a_number,
    programs_of,
)

META = frozenset(" \t\n;&|<>()")
BLANK = " \t"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = frozenset("@*#?-$!0123456789")
_NUMBERS = frozenset(
    ["#", "?", "$", "!", "RANDOM", "SECONDS", "LINENO", "BASHPID", "UID", "EUID", "PPID", "EPOCHSECONDS", "SHLVL"]
)
_HOSTILE = frozenset({"_", "PWD", "OLDPWD", "BASH_COMMAND", "BASH_ARGV", "BASH_EXECUTION_STRING", "BASH_REMATCH"})
"""Variables of the shell whose value a command may choose."""
_BAD_EXPANSION = "an expansion ${…} that this reader does not support"
_BAD_ARITHMETIC = "arithmetic that this reader does not support"
_PLAIN_RUN = re.compile(r"[A-Za-z0-9_./:,+@%^=~*?!#{}\]-]+")
_QUOTED_RUN = re.compile(r'[^"\\$`]+')
_ARITHMETIC = frozenset(" \t\n+-*/%<>=!&|^~?:,#_.") | frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)


class WordReader(Cursor, ABC):
    """Reads words from a text."""

    @abstractmethod
    def substitution(self) -> Block:
        """Read the commands of a substitution, including its closing parenthesis."""

    @abstractmethod
    def nested(self, text: str, origin: Sequence[int]) -> Block:
        """Read the commands of a text that was taken out of this one."""

    def word(self, *, command: bool = False) -> Word | None:
        """Read the next word; None if there is none. `command`: a subscript may belong to an assignment here."""
        self.char()
        start = self.at
        parts: list[Part] = []
        plain: list[str] = []

        def flush() -> None:
            if plain:
                parts.append(LiteralText("".join(plain), quoted=False))
                plain.clear()

        while True:
            char = self.char()
            if not char:
                break
            if char in META:
                if char in "<>" and self.parenthesis_follows():
                    flush()
                    parts.append(self._process_substitution())
                    continue
                break
            if char == "\\":
                flush()
                parts.append(LiteralText(self.escaped(), quoted=True))
            elif char == "'":
                flush()
                parts.append(LiteralText(self.single_quoted(), quoted=True))
            elif char == '"':
                flush()
                parts += self._double()
            elif char == "$":
                flush()
                parts += self._dollar(quoted=False)
            elif char == "`":
                flush()
                parts.append(self._backquote(quoted=False))
            elif char == "[" and command and not parts and NAME.fullmatch("".join(plain)):
                plain.append(char)
                self.at += 1
                flush()
                parts += self._subscript()
                plain.append("]")
            else:
                run = _PLAIN_RUN.match(self.text, self.at)
                plain.append(char if run is None else run[0])
                self.at += len(plain[-1])
        flush()
        if self.at == start or not parts:
            return None
        return Word(merged(parts), self.place(start), self.text[start : self.at])

    def _double(self) -> list[Part]:
        start = self.at
        self.at += 1
        parts: list[Part] = [LiteralText("", quoted=True)]  # `""` is a word too
        while True:
            char = self.char()
            if not char:
                raise Unreadable("a double quote is not closed")
            if char == '"':
                self.at += 1
                self.no_line_end_in(self.text[start : self.at])
                return parts
            parts += self.inside_quotes(char)

    def inside_quotes(self, char: str) -> list[Part]:
        """Read the next parts inside double quotes."""
        if char == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            if following and following in '$`"\\':
                self.at += 2
                return [LiteralText(following, quoted=True)]
            self.at += 1
            return [LiteralText("\\", quoted=True)]
        if char == "$":
            return self._dollar(quoted=True)
        if char == "`":
            return [self._backquote(quoted=True)]
        run = _QUOTED_RUN.match(self.text, self.at)
        assert run is not None
        self.at = run.end()
        return [LiteralText(run[0], quoted=True)]

    # --- expansions

    def _dollar(self, *, quoted: bool) -> list[Part]:
        start = self.at
        self.at += 1
        char = self.char()
        if char == "(":
            if self.follows("(("):
                self.take("((")
                return [self._made(start, quoted, names=(), programs=self.arithmetic())]
            self.at += 1
            program = self.substitution()
            return [self._made(start, quoted, names=_printed(program), programs=(program,))]
        if char == "{":
            self.at += 1
            return [self._parameter(start, quoted=quoted)]
        if char == "[":
            raise Unreadable("the old arithmetic $[…]")
        if char == "'" and not quoted:
            self.at += 1
            return [LiteralText(self.ansi_c(), quoted=True)]
        if char == '"' and not quoted:
            self.only_bash('$"…"')
            return self._double()
        if found := NAME.match(self.text, self.at):
            self.at = found.end()
            # A line continuation inside the name would make it longer.
            if self.text.startswith("\\\n", self.at):
                raise Unreadable("a line continuation inside the name of a variable")
            return [self._made(start, quoted, names=_value_of(found[0]))]
        if char and char in _SPECIAL:
            self.at += 1
            many = char == "@" or (char == "*" and not quoted)
            return [self._made(start, quoted, names=_value_of(char), many=many)]
        return [LiteralText("$", quoted=quoted)]

    def _made(
        self,
        start: int,
        quoted: bool,
        *,
        names: tuple[str, ...] | None = None,
        programs: tuple[Block, ...] = (),
        many: bool = False,
    ) -> Expansion:
        return Expansion(self.text[start : self.at], quoted, many or not quoted, names, programs)

    def _process_substitution(self) -> Expansion:
        self.only_bash("process substitution")
        start = self.at
        self.at += 2
        program = self.substitution()
        if not program.nodes:
            raise Unreadable("an empty process substitution")
        return Expansion(self.text[start : self.at], quoted=True, programs=(program,))

    def _backquote(self, *, quoted: bool) -> Expansion:
        start = self.at
        self.at += 1
        out: list[str] = []
        origin: list[int] = []
        text = self.text
        while True:
            char = text[self.at : self.at + 1]
            if not char:
                raise Unreadable("a backquote is not closed")
            if char == "`":
                break
            if char == "\\" and (following := text[self.at + 1 : self.at + 2]):
                if following == "\n":
                    raise Unreadable("a line continuation in backquotes")
                if following in "$`\\":
                    self.at += 1
                    char = following
                elif following == '"' and quoted:
                    raise Unreadable("a quoted double quote in backquotes in double quotes")
            out.append(char)
            origin.append(self.place(self.at))
            self.at += 1
        self.at += 1
        inner = "".join(out)
        if "#" in inner or "<<" in inner:
            raise Unreadable("a comment or a here-document in backquotes")
        self.no_line_end_in(inner)
        program = self.nested(inner, origin)
        return Expansion(text[start : self.at], quoted, not quoted, _printed(program), (program,))

    def _parameter(self, start: int, *, quoted: bool) -> Expansion:
        if self.take("#"):
            if self.take("}"):  # ${#} counts the arguments
                return self._made(start, quoted, names=())
            return self._length(start, quoted)
        indirect = self.follows("!") and not self.follows("!}")
        if indirect:
            self.at += 1
        name = self._parameter_name()
        many = False
        programs: tuple[Block, ...] = ()
        if self.take("["):
            subscript = self._subscript()
            many = any(isinstance(part, LiteralText) and part.text in {"@", "*"} for part in subscript)
            programs = programs_of(subscript)
        names: tuple[str, ...] | None = _value_of(name)
        many = many or name in {"@", "*"}
        if indirect:
            if self.take("*}") or self.take("@}"):
                return self._made(start, quoted, many=True)
            if not many:
                self.facts.evaluate(names, f"${{!{name}}}")
            names = None
        names, more = self._operation(name, names, quoted=quoted)
        return self._made(start, quoted, names=names, programs=(*programs, *more), many=many)

    def _length(self, start: int, quoted: bool) -> Expansion:
        self._parameter_name()
        programs: tuple[Block, ...] = ()
        if self.take("["):
            programs = programs_of(self._subscript())
        self._closing_brace()
        return self._made(start, quoted, names=(), programs=programs)

    def _parameter_name(self) -> str:
        self.char()
        if found := NAME.match(self.text, self.at):
            self.at = found.end()
            return found[0]
        char = self.char()
        if char.isdigit() and char.isascii():
            digits = re.compile(r"[0-9]+").match(self.text, self.at)
            assert digits is not None
            self.at = digits.end()
            return digits[0]
        if char and char in _SPECIAL:
            self.at += 1
            return char
        raise Unreadable(_BAD_EXPANSION)

    def _operation(
        self, name: str, names: tuple[str, ...] | None, *, quoted: bool
    ) -> tuple[tuple[str, ...] | None, tuple[Block, ...]]:
        """Read the rest of `${name…}`. Returns the variables that the value comes from, and the programs that run."""
        if self.take("}"):
            return names, ()
        if self.take("@"):
            letter = self.char()
            self.at += 1
            if letter not in set("QUuLAaKk") or not self.take("}"):
                raise Unreadable("an expansion ${…@…} with an unknown or unsafe operator")
            return names, ()
        for operator in (":-", ":=", ":?", ":+", "-", "=", "?", "+"):
            if self.take(operator):
                parts = self._operand("}", quoted=quoted)
                word = Word(tuple(parts), self.at, name)
                if operator.endswith("="):
                    self.facts.assign(name, word)
                return _joined_names(names, parts), word.programs
        for operator in ("##", "#", "%%", "%", "^^", "^", ",,", ","):
            if self.take(operator):
                return names, programs_of(self._operand("}", quoted=quoted))
        if self.take("/"):
            if not self.take("/"):
                self.take("#")
            pattern = self._operand("/}", quoted=quoted, keep=True)
            replacement = self._operand("}", quoted=quoted) if self.take("/") else self._closing_brace()
            return _joined_names(names, replacement), programs_of((*pattern, *replacement))
        if self.take(":"):
            return names, self._arithmetic_until("}")
        raise Unreadable(_BAD_EXPANSION)

    def _closing_brace(self) -> list[Part]:
        if not self.take("}"):
            raise Unreadable(_BAD_EXPANSION)
        return []

    def _operand(self, ends: str, *, quoted: bool, keep: bool = False) -> list[Part]:
        """Read the word inside `${name-word}` up to one of `ends`, and consume that character too unless `keep`."""
        parts: list[Part] = []
        while True:
            char = self.char()
            if not char:
                raise Unreadable("an expansion ${…} is not closed")
            if char in ends:
                self.at += 0 if keep else 1
                return parts
            if char in "'{" or (quoted and char in '"\\'):
                if char == "'" and not quoted:
                    parts.append(LiteralText(self.single_quoted(), quoted=True))
                    continue
                raise Unreadable("quotes or braces inside an expansion ${…}")
            if char in "<>" and self.parenthesis_follows():
                raise Unreadable("a process substitution inside an expansion")
            if char == "\n":
                self.no_line_end_in(char)
            if char == "\\":
                parts.append(LiteralText(self.escaped(), quoted=True))
            elif char == '"':
                parts += self._double()
            elif char == "$":
                parts += self._dollar(quoted=quoted)
            elif char == "`":
                parts.append(self._backquote(quoted=quoted))
            else:
                self.at += 1
                parts.append(LiteralText(char, quoted=quoted))

    def _subscript(self) -> list[Part]:
        """Read a subscript, including the closing bracket. The shell evaluates it as arithmetic."""
        parts: list[Part] = []
        start = self.at
        while True:
            char = self.char()
            if not char or char in META or char in "[{}~\\":
                raise Unreadable("a subscript […] that this reader does not support")
            if char == "]":
                self.at += 1
                break
            if char == "'":
                parts.append(LiteralText(self.single_quoted(), quoted=True))
            elif char == '"':
                parts += self._double()
            elif char == "$":
                parts += self._dollar(quoted=False)
            elif char == "`":
                parts.append(self._backquote(quoted=False))
            else:
                self.at += 1
                parts.append(LiteralText(char, quoted=False))
        self.evaluate_parts(merged(parts), self.text[start : self.at - 1])
        return list(merged(parts))

    # --- arithmetic

    def evaluate_parts(self, parts: Sequence[Part], source: str) -> None:
        """Record what arithmetic on these parts evaluates."""
        for part in parts:
            if isinstance(part, LiteralText):
                if may_run(part.text):
                    self.facts.ask(f"arithmetic on text that contains a command: {source[:80]}")
                self.facts.evaluate_text(part.text)
            else:
                self.facts.evaluate(part.names, part.source)

    def arithmetic(self, *, more: str = "") -> tuple[Block, ...]:
        """Read an expression, including its two closing parentheses. It may also contain the characters of `more`."""
        programs = self._arithmetic_until(")", more=more)
        if self.text[self.at : self.at + 1] != ")":
            raise Unreadable("parentheses that may be arithmetic or a subshell")
        self.at += 1
        return programs

    def _arithmetic_until(self, end: str, *, more: str = "") -> tuple[Block, ...]:
        """Read an expression, including the character `end`. Unusual characters are refused."""
        programs: list[Block] = []
        level = 0
        plain: list[str] = []
        while True:
            char = self.char()
            if char == end and level == 0:
                self.at += 1
                break
            if char in {"$", "`"}:
                before = plain[-1] if plain else ""
                for part in self._dollar(quoted=True) if char == "$" else [self._backquote(quoted=True)]:
                    if isinstance(part, LiteralText) or before.isalnum() or before == "_":
                        raise Unreadable(_BAD_ARITHMETIC)
                    self.facts.evaluate(part.names, part.source)
                    programs += part.programs
                plain.append(" ")
                continue
            if char in {"(", ")"}:
                if char == "(" and plain and plain[-1] in {"<", ">"}:
                    raise Unreadable("arithmetic that may be a process substitution")
                level += 1 if char == "(" else -1
                if level < 0:
                    raise Unreadable("parentheses that do not match")
            elif char == "[":
                self.at += 1
                programs += programs_of(self._subscript())
                continue
            elif not char or not (char in _ARITHMETIC or (more and char in more)):
                raise Unreadable(_BAD_ARITHMETIC)
            if char == "\n":
                self.no_line_end_in(char)
            plain.append(char)
            self.at += 1
        self.facts.evaluate_text("".join(plain))
        return tuple(programs)


def merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Join neighbouring texts that are both quoted or both unquoted."""
    made: list[Part] = []
    for quoted, alike in groupby(parts, key=lambda part: part.quoted if isinstance(part, LiteralText) else None):
        if quoted is None:
            made += alike
        else:
            made.append(LiteralText("".join(part.text for part in alike if isinstance(part, LiteralText)), quoted))
    return tuple(made)


def _printed(program: Block) -> tuple[str, ...] | None:
    return () if prints_a_number(program) else None


def _value_of(name: str) -> tuple[str, ...] | None:
    if name in _NUMBERS:
        return ()
    if name in _HOSTILE:
        return None
    if name in {"@", "*"} or name.isdigit():
        return ("@",)
    return (name,)


def _joined_names(names: tuple[str, ...] | None, parts: Sequence[Part]) -> tuple[str, ...] | None:
    found: list[str] = list(names or ())
    for part in parts:
        if isinstance(part, LiteralText):
            if may_run(part.text):
                return None
        elif part.names is None:
            return None
        else:
            found += part.names
    return None if names is None else tuple(found)
