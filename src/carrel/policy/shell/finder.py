"""Finds every command that a shell text or an argument list could run, and every file its redirections open.

If something is known only at run time, the result says that a person must decide. Knows nothing of rules.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from carrel.policy.shell import commands
from carrel.policy.shell.arguments import Argument, Unknown, joined, literal, shown, value
from carrel.policy.shell.builtins import BUILTINS, SHELL_WORDS, BuiltinCall, expanded, positional
from carrel.policy.shell.cursor import check
from carrel.policy.shell.step_budget import StepBudget, TooComplex, size_of
from carrel.policy.shell.syntax import (
    COUNTERS,
    Assignment,
    Bare,
    Block,
    Dialect,
    Expansion,
    Function,
    LiteralText,
    Node,
    Redirect,
    Simple,
    TextFacts,
    Unreadable,
    Word,
    may_run,
    programs_of,
)
from carrel.policy.shell.variables import LOCALE, belongs_to, changes_what_runs, is_evaluated
from carrel.policy.shell.wrappers import RUNNERS, Wrapped, base, unwrap

MOST_COMMANDS = 1000
MOST_DIRECTORIES = 16
MAX_NESTING = 12
_TOO_MANY_PROGRAMS = "programs that run programs are nested too deeply"

_HARMLESS_DEVICE = re.compile(r"/dev/(null|zero|full|u?random|tty|std(in|out|err)|fd/\d+)")
_SOCKET = re.compile(r"/dev/(?:tcp|udp)/([^/]+)/([^/]+)")


@dataclass(frozen=True, slots=True)
class FoundCommand:
    """A program or shell builtin that may run. `via` names the programs that run it."""

    arguments: tuple[Argument, ...]
    via: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The command as a person would write it."""
        return joined(self.arguments)


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file that a redirection or an option opens. `path` is absolute, or None if it is known only at run time."""

    operation: Literal["read", "write", "delete"]
    path: str | None
    source: str


@dataclass(frozen=True, slots=True)
class HostUse:
    """A connection that a redirection to `/dev/tcp` or `/dev/udp` opens."""

    host: str
    port: str


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that a text could run or open, and the reasons why a person must decide (`asks`)."""

    commands: tuple[FoundCommand, ...]
    files: tuple[FileUse, ...]
    hosts: tuple[HostUse, ...]
    asks: tuple[str, ...]
    opaque: tuple[str, ...]
    """Commands that read further commands from a file or from standard input, which are not known here."""


def find(command: str | Sequence[str], *, dialect: Dialect = "bash", cwd: str | None = None) -> Found:
    """Find what a shell text, or a program with its arguments, could run."""
    budget = StepBudget(size_of(command))
    finder = _Finder(dialect, cwd, budget)
    finder.start(command)
    if finder.unset & finder.defined:
        # A function that is unset somewhere is not certain anywhere: read the text again with that knowledge.
        finder = _Finder(dialect, cwd, budget, frozenset(finder.unset))
        finder.start(command)
    return Found(
        tuple(dict.fromkeys(finder.commands)),
        tuple(dict.fromkeys(finder.files)),
        tuple(dict.fromkeys(finder.hosts)),
        tuple(finder.facts.asks),
        tuple(dict.fromkeys(finder.opaque)),
    )


class _Finder:
    """Walks the syntax tree. One object serves a text and all the texts inside it."""

    def __init__(
        self, dialect: Dialect, cwd: str | None, budget: StepBudget, unset_anywhere: frozenset[str] = frozenset()
    ):
        self.facts = TextFacts(budget)
        self._spend = budget.spend
        self.dialect: Dialect = dialect
        self.commands: list[FoundCommand] = []
        self.files: list[FileUse] = []
        self.hosts: list[HostUse] = []
        self.opaque: list[str] = []
        self.functions: dict[str, Function] = {}
        self.unset: set[str] = set()
        self._directories: frozenset[str] | None = None if cwd is None else frozenset({cwd})
        self._entered: frozenset[str] | None = None
        """The directories that the last `cd` leads to if it succeeds."""
        self._via: tuple[str, ...] = ()
        self._ascii = True
        self._depth = 0
        self._unset_anywhere = unset_anywhere
        self._definitions: list[tuple[Function, dict[str, Function]]] = []
        self._walked: set[tuple[object, ...]] = set()
        self._walked_once: set[int] = set()
        self._calling: list[str] = []
        self._later: list[tuple[str, dict[str, Function], Dialect]] = []
        self._excused: Counter[str] = Counter()

    @property
    def defined(self) -> set[str]:
        """The names of all functions that the text defines."""
        return {function.name for function, _ in self._definitions}

    # --- texts

    def start(self, command: str | Sequence[str]) -> None:
        """Read and walk the whole command."""
        try:
            if isinstance(command, str):
                self.read(command, self.dialect)
            else:
                for word in command:
                    check(word)
                if command:
                    self.program(tuple(command), ())
                else:
                    self.facts.ask("there is no command")
            self._conclude()
        except Unreadable as reason:
            self.facts.ask(f"the text cannot be read with certainty: {reason}")
        except TooComplex as reason:
            self.facts.ask(f"the text is too complex to decide: {reason}")
        except RecursionError:
            self.facts.ask("the text is nested too deeply")

    def read(self, text: str, dialect: Dialect) -> None:
        """Read a text and walk it."""
        check(text)
        self._ascii = self._ascii and text.isascii()
        outer = self.facts.starts, self.dialect
        self.facts.starts, self.dialect = set(), dialect
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise Unreadable("scripts inside scripts are nested too deeply")
        block = commands.read(text, self.facts, dialect)
        from carrel.policy.shell import cross_check  # loads a grammar, and a list of arguments needs none

        for objection in cross_check.objections(text, self.facts.starts, self.facts.budget):
            self.facts.ask(objection)
        self._block(block)
        self._depth -= 1
        self.facts.starts, self.dialect = outer

    def text(self, text: str, *, later: bool = False) -> None:
        """Walk a text that `eval` runs in this shell, or remember one that `trap` runs later."""
        if later:
            self._spend_on_functions()
            self._later.append((text, dict(self.functions), self.dialect))
            return
        kept = dict(self.functions), self._directories
        self.read(text, self.dialect)
        self._rejoin(*kept)

    def _conclude(self) -> None:
        """After the text: walk its traps and the functions that may not have been called, then check its variables."""
        done = 0
        named: set[Argument] = set()
        seen = 0
        while self._later or done < len(self._definitions):
            self._directories = None
            if self._later:
                text, self.functions, dialect = self._later.pop()
                self.read(text, dialect)
                continue
            function, self.functions = self._definitions[done]
            done += 1
            self._spend()
            named.update(command.arguments[0] for command in self.commands[seen:])
            seen = len(self.commands)
            if function.name in named or id(function) not in self._walked_once:
                self._body(function)
        for name, count in self.facts.changed.items():
            if count > self._excused[name]:
                self._assigned(name)
        for name in sorted(self.facts.evaluated):
            self._assigned(name)  # arithmetic can assign
        self.facts.conclude()

    # --- nodes

    def _block(self, block: Block) -> None:
        self._spend_on_functions()
        functions, directories, seen = dict(self.functions), self._directories, len(self.files)
        self._redirects(block.redirects)
        uncertain = _UncertainFunctions(block)
        for number, node in enumerate(block.nodes):
            for name in uncertain.before(number, self.functions):
                self.functions.pop(name, None)
            if isinstance(node, Block) and node.given and number and _is_cd(block.nodes[number - 1]):
                left, self._directories = self._directories, self._entered
                self._node(node)
                self._rejoin(self.functions, left)
            else:
                self._node(node)
        if block.scope == "sub":
            self.functions, self._directories = functions, directories
        elif block.scope in {"maybe", "loop"}:
            if block.scope == "loop" and self._directories != directories:
                self._directories = None
                if len(self.files) > seen:
                    self.facts.ask("files are opened in a loop that changes the directory")
            self._rejoin(functions, directories)

    def _spend_on_functions(self) -> None:
        """Spend the steps that copying the known functions costs."""
        self._spend(2 + len(self.functions) // 8)

    def _rejoin(self, functions: dict[str, Function], directories: frozenset[str] | None) -> None:
        """After a block that may not have run: keep only what is certain in both cases."""
        self._spend_on_functions()
        self.functions = {name: each for name, each in functions.items() if name in self.functions}
        if directories is None or self._directories is None:
            self._directories = None
        else:
            self._directories |= directories
            if len(self._directories) > MOST_DIRECTORIES:
                self._directories = None

    def _node(self, node: Node) -> None:
        self._spend()
        match node:
            case Simple():
                self._simple(node)
            case Bare():
                self._words(node.words)
            case Function():
                self._define(node)
            case Block():
                self._block(node)

    def _define(self, function: Function) -> None:
        if function.name in SHELL_WORDS | RUNNERS | COUNTERS:
            self.facts.ask(f"a function replaces a command of the same name: {function.name}")
        if function.name not in self._unset_anywhere:
            self.functions[function.name] = function
        self._spend_on_functions()
        self._definitions.append((function, dict(self.functions)))

    def _body(self, function: Function) -> None:
        if function.name in self._calling:
            self.facts.ask(f"a function calls itself: {function.name}")
            return
        self._spend_on_functions()
        # Walk it again only if the known functions or directories have changed.
        known = frozenset((name, id(each)) for name, each in self.functions.items())
        key = (id(function), known, self._directories)
        if key in self._walked:
            return
        self._walked.add(key)
        self._walked_once.add(id(function))
        self._calling.append(function.name)
        self._block(function.body)
        self._calling.pop()

    def _words(self, words: Iterable[Word]) -> None:
        for word in words:
            for program in word.programs:
                self._block(program)

    def _assignments(self, assignments: Sequence[Assignment]) -> None:
        for each in assignments:
            self._words(each.values)
            for program in each.programs:
                self._block(program)
            if is_evaluated(each.name):
                for word in each.values:
                    for part in word.parts:
                        if isinstance(part, Expansion):
                            self.facts.evaluate(part.names, part.source)
                        elif may_run(part.text):
                            self.facts.ask(f"the shell evaluates what is assigned to {each.name}")

    def _redirects(self, redirects: Sequence[Redirect]) -> None:
        for redirect in redirects:
            self._words((redirect.target,))
            for program in programs_of(redirect.body):
                self._block(program)
            self._opened(redirect)

    def _opened(self, redirect: Redirect) -> None:
        operator = redirect.operator
        if operator in {"<<", "<<-", "<<<"}:
            return
        parts = redirect.target.parts
        if len(parts) == 1 and isinstance(parts[0], Expansion) and parts[0].source[:2] in {"<(", ">("}:
            return
        target = value(redirect.target)
        if operator in {"<&", ">&"} and isinstance(target, str) and re.fullmatch(r"[0-9]*-?", target):
            return
        if operator in {"<&", ">&"}:
            self._expanded_twice(redirect.target)
            if operator == "<&":
                return  # it duplicates a descriptor, and opens no file
        if ">" in operator:
            self._open_all("write", target, redirect.target.source)
        if ">" not in operator or operator == "<>":
            self._open_all("read", target, redirect.target.source)

    def _expanded_twice(self, target: Word) -> None:
        """Bash expands the file name after `>&` a second time, even if it is quoted."""
        for part in target.parts:
            if isinstance(part, Expansion):
                self.facts.evaluate(part.names, part.source)
            elif set(part.text) & set("$`\\'\"*?[~{"):
                self.facts.ask(f"the shell expands this file name twice: {target.source[:80]}")

    def _open_all(self, operation: Literal["read", "write", "delete"], target: Argument, source: str) -> None:
        for path in self._paths(target):
            if path is not None and (found := _SOCKET.fullmatch(path)):
                self.hosts.append(HostUse(found[1], found[2]))
            elif path is None or not _HARMLESS_DEVICE.fullmatch(path):
                self.files.append(FileUse(operation, path, source))

    def _paths(self, target: Argument) -> list[str | None]:
        if isinstance(target, Unknown):
            return [None]
        if target.startswith("/"):
            return [normal(target)]
        if self._directories is None:
            return [None]
        return [normal(f"{directory}/{target}") for directory in sorted(self._directories)]

    def enter(self, directory: Argument | None) -> None:
        """Change the directory; None means an unknown one."""
        self._entered = None
        if isinstance(directory, str) and (directory.startswith("/") or self._directories is not None):
            self._entered = frozenset(path for path in self._paths(directory) if path is not None)
        # `cd` may fail and leave the shell in its directory.
        if self._entered is None or self._directories is None or len(self._directories) > MOST_DIRECTORIES:
            self._directories = None
        else:
            self._directories |= self._entered

    # --- commands

    def _simple(self, node: Simple) -> None:
        self._assignments(node.assignments)
        self._assignments(node.arrays)
        self._words(node.words)
        self._redirects(node.redirects)
        pairs = expanded(node.words, self.dialect, self.facts.budget)
        if not node.words:
            return
        names = tuple(each.name for each in node.assignments)
        if not pairs or not isinstance(pairs[0][0], str):
            source = node.words[0].source
            self.facts.ask(f"which command runs is known only at run time: {source[:80]}")
            return
        name = pairs[0][0]
        for each in names:
            if belongs_to(each, base(name)):
                self._excused[each] += 1
        self._command(pairs, names, node.redirects, plain=node.words[0].plain is not None)

    def _command(
        self,
        pairs: list[tuple[Argument, Word]],
        names: tuple[str, ...],
        redirects: Sequence[Redirect],
        *,
        plain: bool,
        functions: bool = True,
        prefixes: int = 0,
    ) -> None:
        """Walk a function, a builtin or a program. `prefixes` counts the `command` and `builtin` before it."""
        self._spend(1 + len(pairs))
        argv = tuple(argument for argument, _ in pairs)
        name = argv[0]
        assert isinstance(name, str)
        if functions and name in self.functions:
            positional(argv[1:], self.facts)
            self._body(self.functions[name])
            return
        if name in {"exec", "command", "builtin"}:
            self._note(argv, names)
            if prefixes == MAX_NESTING:
                raise Unreadable(_TOO_MANY_PROGRAMS)
            self._prefix(name, pairs, redirects, prefixes)
            return
        if name in {"source", "."}:
            self.opaque.append(joined(argv))
        if name in BUILTINS:
            self._note(argv, names)
            words = tuple(word for _, word in pairs[1:])
            BUILTINS[name](BuiltinCall(name, argv[1:], words, plain and self.dialect == "bash"), self)
            return
        self.program(argv, self._via, names, redirects)

    def _prefix(
        self, name: str, pairs: list[tuple[Argument, Word]], redirects: Sequence[Redirect], prefixes: int
    ) -> None:
        """Walk the command after `exec`, `command` or `builtin`."""
        at = 1
        while at < len(pairs):
            option = pairs[at][0]
            if isinstance(option, Unknown):
                self.facts.ask(f"the command that {name} runs is known only at run time: {option.source}")
                return
            if option == "--":
                at += 1
                break
            if not option.startswith("-") or len(option) < 2:
                break
            if name == "command" and set(option[1:]) & set("vV"):
                return
            if name == "exec" and option == "-a" and self.dialect == "bash":
                at += 1
            elif not (name == "command" and option == "-p") and not (
                name == "exec" and set(option[1:]) <= set("cl") and self.dialect == "bash"
            ):
                self.facts.ask(f"option {option} of {name} is unknown to this reader")
                return
            at += 1
        rest = pairs[at:]
        if not rest:
            return
        if not isinstance(rest[0][0], str):
            self.facts.ask(f"the command that {name} runs is known only at run time: {rest[0][0].source}")
        elif name == "exec":
            self.program(tuple(argument for argument, _ in rest), (*self._via, name), (), redirects)
        else:
            self._command(rest, (), redirects, plain=False, functions=False, prefixes=prefixes + 1)

    def _note(self, argv: tuple[Argument, ...], names: tuple[str, ...]) -> None:
        if len(self.commands) >= MOST_COMMANDS:
            raise Unreadable(f"it contains more than {MOST_COMMANDS} commands")
        self.commands.append(FoundCommand(argv, self._via, names))

    def program(
        self,
        argv: tuple[Argument, ...],
        via: tuple[str, ...],
        names: tuple[str, ...] = (),
        redirects: Sequence[Redirect] = (),
    ) -> None:
        """Walk a program and the commands that it runs."""
        if len(via) > MAX_NESTING:
            raise Unreadable(_TOO_MANY_PROGRAMS)
        self._spend(1 + len(argv))
        outer = self._via
        self._via = via
        self._note(argv, names)
        found = unwrap(argv)
        if found is not None:
            assert isinstance(argv[0], str)
            self._via = (*via, base(argv[0]))
            self._wrapped(argv, found, redirects)
        self._via = outer

    def _wrapped(self, argv: tuple[Argument, ...], found: Wrapped, redirects: Sequence[Redirect]) -> None:
        for reason in found.asks:
            self.facts.ask(reason)
        for operation, target in found.files:
            self._open_all(operation, target, shown(target))
        functions, directories = self.functions, self._directories
        self.functions = {}
        if found.moves:
            self._directories = None
        elif found.directory is not None:
            self._directories = frozenset(path for path in self._paths(found.directory) if path) or None
        for run in found.runs:
            program = run[0] if isinstance(run[0], str) else ""
            for name in found.assigned:
                if not belongs_to(name, base(program)):
                    self._assigned(name)
            self.program(run, self._via)
        if not found.runs:
            for name in found.assigned:
                self._assigned(name)
        for text, dialect, more in found.scripts:
            positional(more, self.facts)
            self.read(text, dialect)
        if found.file:
            self.opaque.append(joined(argv))
        if found.reads_commands is not None:
            self._standard_input(argv, found.reads_commands, redirects)
        self.functions, self._directories = functions, directories

    def _assigned(self, name: str) -> None:
        if changes_what_runs(name) or (name in LOCALE and not self._ascii):
            self.facts.ask(f"the variable {name} changes what commands run")

    def _standard_input(self, argv: tuple[Argument, ...], dialect: Dialect, redirects: Sequence[Redirect]) -> None:
        """Walk the commands that a shell reads from its standard input, if a here-document contains them."""
        given = [each for each in redirects if "<" in each.operator]
        if not given or given[-1].operator not in {"<<", "<<-", "<<<"}:
            self.opaque.append(joined(argv))
            return
        last = given[-1]
        text = literal(last.target.parts if last.operator == "<<<" else last.body)
        if text is None:
            self.facts.ask(f"the commands that {shown(argv[0])} reads are known only at run time")
        else:
            self.read(text, dialect)


def _is_cd(node: Node) -> bool:
    return isinstance(node, Simple) and bool(node.words) and node.words[0].plain == "cd"


class _UncertainFunctions:
    """Finds the functions that may be undefined when the next line of a text runs.

    After an error in an expansion Bash drops the rest of the line, including definitions, and continues with the next.
    """

    def __init__(self, block: Block):
        self._block = block
        self._line = -1
        self._risky = False
        self._names: set[str] = set()

    def before(self, number: int, functions: Collection[str]) -> set[str]:
        """Return the functions that may be undefined when this node begins."""
        if not self._block.lines:
            return set()
        gone: set[str] = set()
        if self._block.lines[number] != self._line:
            gone, self._names = self._names, set()
            self._line, self._risky = self._block.lines[number], False
        node = self._block.nodes[number]
        if isinstance(node, Function):
            if self._risky:
                self._names.add(node.name)
        else:
            self._risky = self._risky or not _is_plain(node, functions)
        return gone


def _is_plain(node: Node, functions: Collection[str]) -> bool:
    """Whether a node is a command without expansions, so that no error can occur before it runs."""
    if not isinstance(node, Simple) or node.assignments or node.arrays or not node.words:
        return False
    every = [*node.words, *(each.target for each in node.redirects)]
    texts = all(isinstance(part, LiteralText) for word in every for part in word.parts)
    name = node.words[0].plain
    return texts and name is not None and name not in functions and name not in SHELL_WORDS


def normal(path: str) -> str:
    """Remove `.`, `..` and doubled slashes from an absolute path. It resolves no symbolic links."""
    return "/" + posixpath.normpath(path).lstrip("/")
