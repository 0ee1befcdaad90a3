"""Reads the commands of shell text: lists, pipelines, compound commands, functions, redirections, here-documents.

The result keeps the order of statements, and which of them run in a child process. Nothing here knows what a command
does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from carrel.policy.shell.cursor import MAX_DEPTH
from carrel.policy.shell.syntax import (
    Assignment,
    Bare,
    Block,
    Dialect,
    Expansion,
    Function,
    LiteralText,
    Node,
    Part,
    Redirect,
    Simple,
    TextFacts,
    Unreadable,
    Word,
)
from carrel.policy.shell.words import BLANK, META, NAME, WordReader, merged

DECLARATIONS = frozenset({"declare", "typeset", "local", "export", "readonly"})
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?\+?=")
_FUNCTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:@+-]*")
_REGEX = re.compile(r"[A-Za-z0-9_.^*+?\[\]{}|():,/=@%~-]+(?:\$(?=[\s)|]))?(?=\s)")
_NUMERIC_TESTS = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})
_NO_STOPS: frozenset[str] = frozenset()
OPENING = frozenset({"if", "while", "until", "for", "select", "case", "{", "[[", "function", "coproc"})
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}", "in"})
RESERVED = OPENING | _CLOSING | {"!", "time", "]]"}
_OPERATORS = ("&>>", "&>", "<<<", "<<-", "<<", "<&", "<>", "<", ">>", ">&", ">|", ">")
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>])|\{[A-Za-z_][A-Za-z0-9_]*\}(?=[<>])")
_BROKEN_DESCRIPTOR = re.compile(r"(?:[0-9]|\\\n)+[<>]|\{(?:[A-Za-z0-9_]|\\\n)+\}(?:\\\n)*[<>]")


def read(
    text: str, facts: TextFacts, dialect: Dialect = "bash", *, depth: int = 0, origin: Sequence[int] | None = None
) -> Block:
    """Read the commands of a text. Raises `Unreadable` where Bash might read it differently."""
    reader = _CommandReader(text, facts, dialect, depth=depth, origin=origin)
    lines: list[int] = []
    nodes = reader.statements(_NO_STOPS, empty=True, lines=lines)
    if reader.char():
        raise Unreadable(f"unexpected character '{reader.char()}'")
    if reader.pending:
        raise Unreadable("a here-document has no body")
    return Block(nodes, lines=tuple(lines))


class _CommandReader(WordReader):
    _after_peek = 0
    _substitutions = 0

    # --- what is between commands

    def blanks(self) -> None:
        """Skip blanks and a comment."""
        before = self.at
        while (char := self.char()) and char in BLANK:
            self.at += 1
        if char == "#":
            # A line continuation before the '#' would make it part of the word before, unless that word has ended.
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
        end = "".join(part.text for part in redirect.target.parts if isinstance(part, LiteralText))
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
            redirect.body = (LiteralText(body, quoted=True),)
        else:
            reader = _CommandReader(body, self.facts, self.dialect, depth=self.depth + 1, origin=[-1] * len(body))
            redirect.body = reader.here_text()

    def here_text(self) -> tuple[Part, ...]:
        """Read the parts of an unquoted here-document."""
        parts: list[Part] = []
        while char := self.char():
            if char == '"' or (char == "\\" and self.text[self.at + 1 : self.at + 2] == '"'):
                parts.append(LiteralText(char, quoted=True))
                self.at += 1
            else:
                parts += self.inside_quotes(char)
        return merged(parts)

    def peek_reserved(self) -> str | None:
        """Return the reserved word that is next, without consuming it; None if there is none."""
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
        self._after_peek = place
        return word

    def expect(self, *words: str) -> str:
        """Consume one of these reserved words."""
        self.newlines()
        found = self.peek_reserved()
        if found is None or found not in words:
            raise Unreadable(f"'{words[0]}' is missing")
        self.take_reserved()
        return found

    def take_reserved(self) -> None:
        """Consume the reserved word that `peek_reserved` returned."""
        self.char()
        self.facts.starts.add(self.place(self.at))
        self.at = self._after_peek

    def redirect(self) -> Redirect | None:
        """Read the next redirection; None if there is none."""
        start = self.at
        self.char()
        if found := _DESCRIPTOR.match(self.text, self.at):
            self.at = found.end()
            if self.parenthesis_follows():
                raise Unreadable("a number directly before a process substitution")
            if found[0].startswith("{"):
                self.only_bash("{name}>")
                self.facts.assign_anything(found[0][1:-1], found[0])
        elif _BROKEN_DESCRIPTOR.match(self.text, self.at):
            raise Unreadable("a line continuation before a redirection")
        char = self.char()
        operator = None
        if char and char in "&<>" and (self.follows("&>") if char == "&" else not self.parenthesis_follows()):
            operator = next((each for each in _OPERATORS if self.take(each)), None)
        if operator is None:
            self.at = start
            return None
        if operator in {"&>", "&>>", "<<<"}:
            self.only_bash(operator)
        while (char := self.char()) and char in BLANK:
            self.at += 1
        if operator in {"<&", ">&"} and self.take("-"):
            # The dash is a complete token: characters that follow it directly are a new word.
            return Redirect(operator, Word((LiteralText("-", quoted=False),), -1, "-"))
        target = self.word()
        if target is None:
            raise Unreadable("a redirection without a target")
        made = Redirect(operator, target)
        if operator in {"<<", "<<-"}:
            if any(isinstance(part, Expansion) for part in target.parts) or "\n" in target.source:
                raise Unreadable("a here-document whose end marker is not a plain word")
            self.pending.append(made)
        return made

    # --- substitutions

    def substitution(self) -> Block:
        outer, self.pending = self.pending, []
        self.depth += 1
        self._substitutions += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("the text is nested too deeply")
        start = self.at
        nodes = self.statements(_NO_STOPS, empty=True, closing=")")
        if not self.take(")"):
            raise Unreadable("a substitution is not closed")
        if self.pending or (outer and "\n" in self.text[start : self.at]):
            raise Unreadable("a here-document that crosses the border of a substitution")
        self.depth -= 1
        self._substitutions -= 1
        self.pending = outer
        return Block(nodes, "sub")

    def nested(self, text: str, origin: Sequence[int]) -> Block:
        return Block(read(text, self.facts, self.dialect, depth=self.depth + 1, origin=origin).nodes, "sub")

    # --- lists

    def statements(
        self, stops: frozenset[str], *, empty: bool = False, closing: str = "", lines: list[int] | None = None
    ) -> tuple[Node, ...]:
        """Read statements up to a reserved word of `stops`, a closing parenthesis, `;;` or the end.

        `lines` receives the line number of each statement: after an error Bash drops the rest of the line.
        """
        nodes: list[Node] = []
        line = 0
        while True:
            start = self.at
            self.newlines()
            line += "\n" in self.text[start : self.at]
            char = self.char()
            if not char or char == ")" or self.follows(";;") or self.follows(";&"):
                break
            if self.peek_reserved() in stops:
                break
            nodes += self.and_or()
            if lines is not None:
                lines.append(line)
            self.blanks()
            char = self.char()
            if self.follows(";;") or self.follows(";&"):
                break
            if char == ";":
                self.at += 1
            elif char == "&" and not self.follows("&&"):
                self.at += 1
                nodes[-1] = Block((nodes[-1],), "sub")
            elif char == "\n" or self.peek_reserved() in stops:
                pass
            elif char and char not in (closing or ")"):
                raise Unreadable(f"unexpected character '{char}'")
            elif not char or char == ")":
                break
        if not nodes and not empty:
            raise Unreadable("a list without a command")
        return tuple(nodes)

    def and_or(self) -> list[Node]:
        """Read pipelines joined by `&&` and `||`, as one node."""
        found = [self.pipeline()]
        only_and = True
        while True:
            self.blanks()
            if self.take("||"):
                only_and = False
            elif not self.take("&&"):
                break
            self.newlines()
            found.append(self.pipeline())
        if not only_and:
            return [Block((found[0], *(Block((each,), "maybe") for each in found[1:])))]
        node = found.pop()
        while found:
            node = Block((found.pop(), Block((node,), "maybe", given=True)))
        return [node]

    def pipeline(self) -> Node:
        """Read commands joined by pipes. If there are several, each runs in a child process."""
        negated = False
        while True:
            self.blanks()
            word = self.peek_reserved()
            if word == "time":
                self.take_reserved()
                self.blanks()
                if self.follows("-p"):
                    option = self.word()
                    if option is None or option.plain != "-p":
                        raise Unreadable("an unknown option of 'time'")
                    self.blanks()
                if self.follows("--"):
                    raise Unreadable("an unknown option of 'time'")
                if not self.char() or self.char() in "\n;)":
                    return Bare(())
            elif word == "!":
                self.take_reserved()
                negated = True
                if not self.text[self.at : self.at + 1].isspace():
                    raise Unreadable("'!' is not followed by a blank")
            else:
                break
        commands = [self.command()]
        while True:
            self.blanks()
            if self.follows("||") or not self.take("|"):
                break
            if self.take("&"):
                self.only_bash("|&")
            self.newlines()
            if self.peek_reserved() in {"!", "time"}:
                raise Unreadable("'!' or 'time' inside a pipeline")
            commands.append(self.command())
        if len(commands) == 1:
            return Block((commands[0],)) if negated else commands[0]
        return Block(tuple(Block((each,), "sub") for each in commands))

    # --- commands

    def command(self) -> Node:
        """Read one command of any kind."""
        self.blanks()
        if self.char() == "(":
            return self.with_redirects(self.parenthesised())
        word = self.peek_reserved()
        if word in OPENING:
            return self.compound(word)
        if word is not None:
            raise Unreadable(f"unexpected '{word}'")
        return self.simple()

    def parenthesised(self) -> Block:
        """A subshell or `((…))`."""
        self.char()
        self.facts.starts.add(self.place(self.at))
        if self.follows("(("):
            self.only_bash("((…))")
            self.take("((")
            return Block(self.arithmetic())
        self.take("(")
        nodes = self.statements(_NO_STOPS, closing=")")
        if not self.take(")"):
            raise Unreadable("a parenthesis is not closed")
        return Block(nodes, "sub")

    def compound(self, word: str) -> Node:
        """A compound command that begins with a reserved word."""
        if word not in {"if", "while", "until", "for", "case", "{"}:
            self.only_bash(word)
        self.take_reserved()
        if word == "function":
            return self.function_keyword()
        if word == "coproc":
            return self.coprocess()
        bodies = {
            "if": self.if_,
            "while": self.loop,
            "until": self.loop,
            "for": self.for_,
            "select": self.for_,
            "case": self.case,
            "{": self.braces,
            "[[": self.test,
        }
        return self.with_redirects(bodies[word]())

    def with_redirects(self, block: Block) -> Block:
        """Read the redirections after a compound command and add them to its block."""
        found: list[Redirect] = []
        self.blanks()
        while (redirect := self.redirect()) is not None:
            found.append(redirect)
            self.blanks()
        # In `{ { a; } }` a reserved word follows, which the caller reads.
        if (char := self.char()) and char not in "\n;&|)" and self.peek_reserved() is None:
            raise Unreadable("a word directly after a compound command")
        return Block(block.nodes, block.scope, (*block.redirects, *found))

    def braces(self) -> Block:
        """`{ …; }`."""
        if not self.text[self.at : self.at + 1].isspace() and self.char() != "(":
            raise Unreadable("'{' is not followed by a blank")
        nodes = self.statements(frozenset({"}"}))
        self.expect("}")
        return Block(nodes)

    def if_(self) -> Block:
        """`if …; then …; elif …; else …; fi`."""
        nodes: list[Node] = list(self.statements(frozenset({"then"})))
        stops = frozenset({"elif", "else", "fi"})
        self.expect("then")
        nodes.append(Block(self.statements(stops), "maybe"))
        while (found := self.expect("elif", "else", "fi")) == "elif":
            nodes.append(Block(self.statements(frozenset({"then"})), "maybe"))
            self.expect("then")
            nodes.append(Block(self.statements(stops), "maybe"))
        if found == "else":
            nodes.append(Block(self.statements(frozenset({"fi"})), "maybe"))
            self.expect("fi")
        return Block(tuple(nodes))

    def loop(self) -> Block:
        """`while …; do …; done`."""
        condition = self.statements(frozenset({"do"}))
        return Block((*condition, self.do_group()))

    def do_group(self) -> Block:
        """`do …; done`."""
        self.expect("do")
        nodes = self.statements(frozenset({"done"}))
        self.expect("done")
        return Block(nodes, "loop")

    def for_(self) -> Block:
        """`for name in …; do …; done`, `select`, `for ((…)); do …; done`."""
        self.blanks()
        if self.follows("(("):
            self.only_bash("for ((…))")
            self.take("((")
            programs = self.arithmetic(more=";")
            self.blanks()
            self.take(";")
            return Block((*programs, self.do_group()))
        name = self.word()
        if name is None or name.plain is None or not NAME.fullmatch(name.plain):
            raise Unreadable("the loop variable is not a valid name")
        self.newlines()
        words: list[Word] = []
        if self.peek_reserved() == "in":
            self.take_reserved()
            while True:
                self.blanks()
                word = self.word()
                if word is None:
                    break
                words.append(word)
            if self.char() not in {";", "\n"} or self.follows(";;"):
                raise Unreadable("the list of a loop is not closed")
            self.facts.assign(name.plain, *words)
        else:
            self.facts.assign(name.plain, Word((Expansion("$@", False, True, ("@",)),), -1, "$@"))
        self.take(";")
        return Block((Bare(tuple(words)), self.do_group()))

    def case(self) -> Block:
        """`case word in pattern) …;; esac`."""
        self.blanks()
        subject = self.word()
        if subject is None:
            raise Unreadable("'case' without a word")
        self.expect("in")
        nodes: list[Node] = [Bare((subject,))]
        while True:
            self.newlines()
            if self.peek_reserved() == "esac":
                self.take_reserved()
                return Block(tuple(nodes))
            self.take("(")
            patterns: list[Word] = []
            while True:
                self.blanks()
                pattern = self.word()
                if pattern is None:
                    raise Unreadable("a pattern of 'case' that this reader does not support")
                patterns.append(pattern)
                self.blanks()
                if not self.take("|"):
                    break
            if not self.take(")"):
                raise Unreadable("a pattern of 'case' that this reader does not support")
            nodes += [Bare(tuple(patterns)), Block(self.statements(frozenset({"esac"}), empty=True), "maybe")]
            self.newlines()
            if self.take(";;"):
                if self.take("&"):
                    self.only_bash(";;&")
            elif self.take(";&"):
                self.only_bash(";&")
            elif self.peek_reserved() != "esac":
                raise Unreadable("a branch of 'case' does not end with ';;'")

    def test(self) -> Block:
        """Read `[[ … ]]`. Its words are expanded, and the operands of numeric tests are evaluated."""
        words: list[Word] = []
        numeric = False
        while True:
            self.newlines()
            char = self.char()
            if not char:
                raise Unreadable("'[[' is not closed")
            if self.take("&&") or self.take("||"):
                numeric = False
                continue
            if words and words[-1].plain == "=~" and (found := _REGEX.match(self.text, self.at)):
                self.at = found.end()
                words.append(Word((LiteralText(found[0], quoted=True),), -1, found[0]))
                self.facts.assign_anything("BASH_REMATCH", "=~")
                continue
            if char in "()<>":
                if char in "()" and self.at and self.text[self.at - 1] not in " \t\n()":
                    raise Unreadable("a pattern in '[[' that this reader does not support")
                if char in "<>" and self.parenthesis_follows():
                    raise Unreadable("a process substitution in '[['")
                self.at += 1
                continue
            word = self.word()
            if word is None:
                raise Unreadable("a test in '[[' that this reader does not support")
            if word.plain == "]]":
                return Block((Bare(tuple(words)),))
            if numeric:
                self.evaluate_parts(word.parts, word.source)
            numeric = word.plain in _NUMERIC_TESTS
            if numeric and words:
                self.evaluate_parts(words[-1].parts, words[-1].source)
            if words and words[-1].plain in {"-v", "-R"} and (word.plain is None or "[" in word.plain):
                self.evaluate_parts(word.parts, word.source)
            words.append(word)

    def coprocess(self) -> Node:
        """Read `coproc [name] command`. The command runs in a child process."""
        if self._substitutions:
            # Bash prints a substitution from its syntax tree and parses it again, and it prints a coprocess wrongly.
            raise Unreadable("a coprocess inside a substitution")
        self.blanks()
        start = self.at
        self.facts.assign_anything("COPROC", "coproc")
        if self.peek_reserved() is None and self.char() != "(":
            name = self.word()
            self.blanks()
            if name is not None and name.plain and (self.char() == "(" or self.peek_reserved() in OPENING):
                if not NAME.fullmatch(name.plain):
                    raise Unreadable("the name of this coprocess is not a valid identifier")
                self.facts.starts.add(name.at)
                self.facts.assign_anything(name.plain, "coproc")
            else:
                self.at = start
        return Block((self.command(),), "sub")

    def function_keyword(self) -> Function:
        """`function name { …; }`."""
        self.blanks()
        name = self.word()
        self.blanks()
        if self.take("("):
            self.blanks()
            if not self.take(")"):
                raise Unreadable("')' is missing in the definition of a function")
        return self.function(name)

    def function(self, name: Word | None) -> Function:
        """Read the body of a function."""
        if name is None or name.plain is None or not _FUNCTION_NAME.fullmatch(name.plain):
            raise Unreadable("a function with an unusual name")
        self.newlines()
        if self.char() == "(":
            body: Node = self.with_redirects(self.parenthesised())
        elif (word := self.peek_reserved()) in OPENING - {"function", "coproc"} and word is not None:
            body = self.compound(word)
        else:
            raise Unreadable("a function without a body")
        return Function(name.plain, Block((body,), "maybe"))

    def simple(self) -> Node:
        """Read a simple command or a function definition."""
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirects: list[Redirect] = []
        arrays: list[Assignment] = []
        while True:
            self.blanks()
            redirect = self.redirect()
            if redirect is not None:
                redirects.append(redirect)
                continue
            if not words and (assignments or redirects) and self.peek_reserved() is not None:
                raise Unreadable("a reserved word after a redirection or an assignment")
            word = self.word(command=not words)
            if word is None:
                if self.char() == "(" and len(words) == 1 and not assignments and not redirects:
                    self.take("(")
                    self.blanks()
                    if not self.take(")"):
                        raise Unreadable("a parenthesis after a word")
                    return self.function(words[0])
                break
            found = _ASSIGNED.match(skeleton(word))
            if self.char() == "(" and found and found.end() == len(skeleton(word)):
                if words and words[0].plain not in DECLARATIONS:
                    raise Unreadable("an array outside an assignment or a declaration")
                (arrays if words else assignments).append(self.array(found[1], word))
                continue
            if found and ("+=" in found[0] or found[2]):
                self.only_bash("+= or a subscript")
            if found and not words:
                value = after(word, found.end())
                self.facts.assign(found[1], value)
                assignments.append(Assignment(found[1], (value,), word.programs))
            else:
                if not words:
                    self.facts.starts.add(word.at)
                words.append(word)
        if self.char() == "(":
            raise Unreadable("a parenthesis after a word")
        if not (words or assignments or redirects or arrays):
            raise Unreadable("a command is missing")
        return Simple(tuple(assignments), tuple(words), tuple(redirects), tuple(arrays))

    def array(self, name: str, word: Word) -> Assignment:
        """Read the values of `name=(…)`."""
        self.only_bash("an array")
        self.take("(")
        values: list[Word] = []
        while True:
            self.newlines()
            if self.take(")"):
                break
            value = self.word()
            if value is None:
                raise Unreadable("an array that this reader does not support")
            if value.source.startswith("[") and "=" in value.source:
                self.evaluate_parts(value.parts, value.source)
            values.append(value)
        self.facts.assign(name, *values)
        return Assignment(name, tuple(values), word.programs)


def skeleton(word: Word) -> str:
    """Return the unquoted text of a word, with NUL characters in the place of quoted text and expansions."""
    return "".join(
        part.text if isinstance(part, LiteralText) and not part.quoted else "\0" * _size(part) for part in word.parts
    )


def after(word: Word, length: int) -> Word:
    """Return the rest of a word after the first `length` characters of its skeleton."""
    left: list[Part] = []
    for part in word.parts:
        size = _size(part)
        if length >= size:
            length -= size
        elif isinstance(part, LiteralText):
            left.append(LiteralText(part.text[length:], part.quoted))
            length = 0
        else:
            left.append(part)
    return Word(tuple(left), word.at, word.source)


def _size(part: Part) -> int:
    """The length of a part in a skeleton. Empty quotes count too, because they change what a word means."""
    return max(1, len(part.text)) if isinstance(part, LiteralText) else 1
