"""The syntax tree of shell text: words, redirections, commands. Values only; knows nothing of policy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from carrel.policy.shell.step_budget import StepBudget

Dialect = Literal["bash", "sh"]
"""`bash`: read the text as Bash does. `sh`: accept only text that Bash and a POSIX shell such as dash read alike."""

Scope = Literal["same", "maybe", "loop", "sub"]
"""How a block runs: in this shell always (`same`), perhaps (`maybe`) or repeatedly (`loop`), or in a subshell (`sub`).
"""


class Unreadable(Exception):
    """The text cannot be read with certainty. Users read the message."""


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Literal characters of a word."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """A part of a word that the shell replaces at run time.

    `names` are the variables that its value comes from: None means that the value is unknown, an empty tuple that it is
    a number. `programs` are the commands that run to compute it.
    """

    source: str
    quoted: bool
    many: bool = False
    names: tuple[str, ...] | None = None
    programs: tuple[Block, ...] = ()


Part = LiteralText | Expansion


@dataclass(frozen=True, slots=True)
class Word:
    """One word. `at` is its position in the text, `source` its characters there."""

    parts: tuple[Part, ...]
    at: int
    source: str

    @property
    def plain(self) -> str | None:
        """The word if it has no quotes and no expansion, as reserved words must be; else None."""
        if len(self.parts) == 1 and isinstance(self.parts[0], LiteralText) and not self.parts[0].quoted:
            return self.parts[0].text
        return None

    @property
    def programs(self) -> tuple[Block, ...]:
        """The commands that run to compute this word."""
        return programs_of(self.parts)


def programs_of(parts: Iterable[Part]) -> tuple[Block, ...]:
    """Return the commands that run to compute these parts."""
    return tuple(program for part in parts if isinstance(part, Expansion) for program in part.programs)


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name[subscript]=value` or `name=(values)`. `programs` includes the subscript's."""

    name: str
    values: tuple[Word, ...]
    programs: tuple[Block, ...] = ()


@dataclass(slots=True)
class Redirect:
    """A redirection. `body` is the text of a here-document; it is filled in at the end of the line."""

    operator: str
    target: Word
    body: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command: assignments, words and redirections."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...]
    arrays: tuple[Assignment, ...] = ()
    """Array values among the arguments of a declaration: `declare a=(…)`."""


@dataclass(frozen=True, slots=True)
class Bare:
    """Words that are expanded but are no command: the list of a `for`, the subject of a `case`, a test."""

    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function definition."""

    name: str
    body: Block


@dataclass(frozen=True, slots=True)
class Block:
    """Statements, with the redirections that apply to all of them."""

    nodes: tuple[Node, ...]
    scope: Scope = "same"
    redirects: tuple[Redirect, ...] = ()
    given: bool = False
    """It runs only if the node before it succeeded (`&&`)."""
    lines: tuple[int, ...] = ()
    """For a whole text: the line number of each node."""


Node = Simple | Bare | Function | Block


@dataclass(slots=True)
class TextFacts:
    """Facts collected from the whole text: the values of variables, arithmetic on them, reasons to ask a person.

    Arithmetic evaluates the value of a variable as an expression, and a subscript in an expression may hold a command
    substitution. So arithmetic on a value that may hold `$` or a backquote can run anything.
    """

    budget: StepBudget = field(default_factory=StepBudget)
    dangerous: dict[str, str] = field(default_factory=dict)
    """Variables whose value is unknown or may hold a command, with the source of that value."""
    links: dict[str, set[str]] = field(default_factory=dict)
    """For a variable, the other variables that its value contains or names."""
    evaluated: set[str] = field(default_factory=set)
    """Variables that are evaluated as arithmetic or as a name, or are expanded twice."""
    changed: Counter[str] = field(default_factory=Counter)
    """How often the text assigns each variable."""
    asks: dict[str, None] = field(default_factory=dict)
    """Reasons why a person must decide, in the order in which they were found (a dict is an ordered set)."""
    starts: set[int] = field(default_factory=set)
    """The positions where commands and reserved words begin."""

    def ask(self, reason: str) -> None:
        """Record a reason why a person must decide."""
        self.asks.setdefault(reason)

    def assign(self, name: str, *values: Word) -> None:
        """Record that these words are assigned to a variable."""
        self.changed[name] += 1
        for word in values:
            for part in word.parts:
                if isinstance(part, Expansion):
                    if part.names is None:
                        self.dangerous.setdefault(name, part.source)
                    else:
                        self.links.setdefault(name, set()).update(part.names)
                elif may_run(part.text) or (not part.quoted and any(mark in part.text for mark in "*?[")):
                    # In a `for` list `*`, `?` and `[` become names of files.
                    self.dangerous.setdefault(name, part.text)
                else:
                    self.links.setdefault(name, set()).update(identifiers(part.text))

    def assign_anything(self, name: str, why: str) -> None:
        """Record that a variable gets a value that is known only at run time."""
        self.changed[name] += 1
        self.dangerous.setdefault(name, why)

    def evaluate(self, names: tuple[str, ...] | None, source: str) -> None:
        """Record that variables (None: an unknown value) are evaluated as arithmetic or expanded a second time."""
        if names is None:
            self.ask(f"a value known only at run time is evaluated and may run commands: {source[:80]}")
        else:
            self.evaluated.update(names)

    def evaluate_text(self, text: str) -> None:
        """Record that the identifiers of a text are evaluated as arithmetic."""
        self.evaluated.update(identifiers(text))

    def conclude(self) -> None:
        """Ask for each evaluated variable that may hold a command. The order is the same in every process."""
        pending, seen = sorted(self.evaluated), set(self.evaluated)
        while pending:
            name = pending.pop()
            self.budget.spend()
            if name in self.dangerous:
                self.ask(
                    f"the variable '{name}' is evaluated, and its value, known only at run time, may hold commands: "
                    f"{self.dangerous[name][:80]}"
                )
            for other in sorted(self.links.get(name, ())):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)


def may_run(text: str) -> bool:
    """Whether a text may run commands if it is expanded or evaluated."""
    return "$" in text or "`" in text


def identifiers(text: str) -> set[str]:
    """Return the words of a text that could be names of variables."""
    return {word for word in re.findall(r"\w+", text) if not word[0].isdigit()}


COUNTERS = frozenset({"wc", "nproc", "date", "id", "grep"})
"""Programs that print a number if they are called as in `_COUNTS`."""

_COUNTS = frozenset({("nproc",), ("date", "+%s"), ("id", "-u"), ("id", "-g"), *(("wc", f"-{each}") for each in "lcwm")})


def prints_a_number(program: Block) -> bool:
    """Whether the output of a substitution can only be a number: its last command is a known counter."""
    node: Node = program
    while isinstance(node, Block) and node.nodes and not node.redirects:
        piped = len(node.nodes) > 1 and all(isinstance(each, Block) and each.scope == "sub" for each in node.nodes)
        if len(node.nodes) > 1 and not piped:
            return False
        node = node.nodes[-1]
    if not isinstance(node, Simple) or node.assignments or any(">" in each.operator for each in node.redirects):
        return False
    words = tuple("".join(part.text for part in word.parts if isinstance(part, LiteralText)) for word in node.words)
    if any(isinstance(part, Expansion) for word in node.words for part in word.parts):
        return False
    return words in _COUNTS or (len(words) == 3 and words[:2] == ("grep", "-c") and not words[2].startswith("-"))
