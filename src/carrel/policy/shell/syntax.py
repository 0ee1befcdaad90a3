"""What shell text is made of, once read: words, redirections, commands. Values only; knows nothing of policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from carrel.policy.shell.step_budget import StepBudget

Dialect = Literal["bash", "sh"]
"""`bash`: read as Bash does. `sh`: what Bash and a POSIX shell such as dash would read differently is not accepted."""

Scope = Literal["same", "maybe", "loop", "sub"]
"""How a block runs: in this shell for certain, in this shell perhaps, there perhaps often, or in a child of it."""


class Unreadable(Exception):
    """The text cannot be read with certainty; the message says why, in words for a person."""


@dataclass(frozen=True, slots=True)
class Text:
    """Characters of a word that stand for themselves."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """A part of a word that the shell replaces when it runs.

    `names` are the variables whose values it is made of, None when it may be anything; no name means a number.
    `programs` are commands that run to make it.
    """

    source: str
    quoted: bool
    many: bool = False
    names: tuple[str, ...] | None = None
    programs: tuple[Block, ...] = ()


Part = Text | Expansion


@dataclass(frozen=True, slots=True)
class Word:
    """One word as written. `at` is where it begins, `source` how it is written."""

    parts: tuple[Part, ...]
    at: int
    source: str

    @property
    def plain(self) -> str | None:
        """The word when nothing in it is quoted or replaced, as reserved words must be."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Text) and not self.parts[0].quoted:
            return self.parts[0].text
        return None

    @property
    def programs(self) -> tuple[Block, ...]:
        """The commands that run to make this word."""
        return tuple(program for part in self.parts if isinstance(part, Expansion) for program in part.programs)


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name[subscript]=value` or `name=(values)`; `subscript` was expanded too."""

    name: str
    values: tuple[Word, ...]
    programs: tuple[Block, ...] = ()


@dataclass(slots=True)
class Redirect:
    """A redirection. `body` is the text of a here-document, which is read only when its line has ended."""

    operator: str
    target: Word
    body: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command: assignments, words, redirections in the order of reading."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...]
    arrays: tuple[Assignment, ...] = ()
    """Array values among the arguments of a declaration: `declare a=(…)`."""


@dataclass(frozen=True, slots=True)
class Bare:
    """Words that are expanded but name no command: the list of a `for`, the subject of a `case`, a test."""

    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function definition."""

    name: str
    body: Block


@dataclass(frozen=True, slots=True)
class Block:
    """Statements that belong together, with the redirections put on them."""

    nodes: tuple[Node, ...]
    scope: Scope = "same"
    redirects: tuple[Redirect, ...] = ()
    given: bool = False
    """Runs only when the node in front of it succeeded."""
    lines: tuple[int, ...] = ()
    """For a whole text: on which of its lines each node stands."""


Node = Simple | Bare | Function | Block


@dataclass(slots=True)
class Facts:
    """What the whole text says, wherever it says it: values of variables, arithmetic on them, odd constructs.

    Arithmetic evaluates the value of a variable as an expression, and a subscript in an expression may hold a command
    substitution. So arithmetic on a value that may hold `$` or a backquote can run anything.
    """

    budget: StepBudget = field(default_factory=StepBudget)
    """The steps that reading the text has taken, and may take."""
    dangerous: dict[str, str] = field(default_factory=dict)
    """Variables whose value may hold anything, and why."""
    links: dict[str, set[str]] = field(default_factory=dict)
    """Variables whose value is made of, or names, other variables."""
    evaluated: set[str] = field(default_factory=set)
    """Variables evaluated as arithmetic, as a name, or twice."""
    changed: Counter[str] = field(default_factory=Counter)
    """Every variable that gets a value, and how often the text gives it one."""
    asks: dict[str, None] = field(default_factory=dict)
    """Why a person must look, in the order found."""
    starts: set[int] = field(default_factory=set)
    """Where commands and reserved words begin."""

    def ask(self, reason: str) -> None:
        """Note that a person must look."""
        self.asks.setdefault(reason)

    def assign(self, name: str, *values: Word) -> None:
        """Note that a variable gets the value of words."""
        self.changed[name] += 1
        for word in values:
            for part in word.parts:
                if isinstance(part, Text):
                    self._assign_text(name, part)
                elif part.names is None:
                    self.dangerous.setdefault(name, part.source)
                else:
                    self.links.setdefault(name, set()).update(part.names)

    def _assign_text(self, name: str, part: Text) -> None:
        if "$" in part.text or "`" in part.text:
            self.dangerous.setdefault(name, part.text)
        elif not part.quoted and any(mark in part.text for mark in "*?["):
            self.dangerous.setdefault(name, part.text)  # in a `for` list these become names of files
        else:
            self.links.setdefault(name, set()).update(identifiers(part.text))

    def assign_anything(self, name: str, why: str) -> None:
        """Note that a variable gets a value that only shows when it runs."""
        self.changed[name] += 1
        self.dangerous.setdefault(name, why)

    def evaluate(self, names: tuple[str, ...] | None, source: str) -> None:
        """Note that variables, or something known only at run time, are evaluated as arithmetic or expanded again."""
        if names is None:
            self.ask(f"what is known only at run time is evaluated, and may run commands: {source[:80]}")
        else:
            self.evaluated.update(names)

    def evaluate_text(self, text: str) -> None:
        """Note that the identifiers of a text are evaluated as arithmetic."""
        self.evaluated.update(identifiers(text))

    def conclude(self) -> None:
        """Say which evaluated variables may hold a command, in the same order in every process."""
        pending, seen = sorted(self.evaluated), set(self.evaluated)
        while pending:
            name = pending.pop()
            self.budget.spend()
            if name in self.dangerous:
                self.ask(
                    f"'{name}' is evaluated, and a value known only at run time may hold commands: "
                    f"{self.dangerous[name][:80]}"
                )
            for other in sorted(self.links.get(name, ())):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)


def identifiers(text: str) -> set[str]:
    """The words of a text that could be variables."""
    found, word = set(), ""
    for char in text + " ":
        if char == "_" or char.isalnum():
            word += char
        elif word:
            if not word[0].isdigit():
                found.add(word)
            word = ""
    return found


COUNTERS = frozenset({"wc", "nproc", "date", "id", "grep"})
"""Programs whose output is a number when they are asked for one."""

_COUNTS = frozenset({("nproc",), ("date", "+%s"), ("id", "-u"), ("id", "-g"), *(("wc", f"-{each}") for each in "lcwm")})


def prints_a_number(program: Block) -> bool:
    """Whether a substitution can only be a number: its last command counts, and counts its input."""
    node: Node = program
    while isinstance(node, Block) and node.nodes and not node.redirects:
        piped = len(node.nodes) > 1 and all(isinstance(each, Block) and each.scope == "sub" for each in node.nodes)
        if len(node.nodes) > 1 and not piped:
            return False
        node = node.nodes[-1]
    if not isinstance(node, Simple) or node.assignments or any(">" in each.operator for each in node.redirects):
        return False
    words = tuple("".join(part.text for part in word.parts if isinstance(part, Text)) for word in node.words)
    if any(isinstance(part, Expansion) for word in node.words for part in word.parts):
        return False
    return words in _COUNTS or (len(words) == 3 and words[:2] == ("grep", "-c") and not words[2].startswith("-"))
