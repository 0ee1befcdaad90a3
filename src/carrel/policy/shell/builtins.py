"""Commands of the shell itself that change what later words mean, or run text: one rule for each.

They see the state of the reading through `State` and note there what they find; they decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from carrel.policy.shell.arguments import Argument, Unknown, arguments, shown
from carrel.policy.shell.commands import DECLARATIONS, after, skeleton
from carrel.policy.shell.step_budget import StepBudget
from carrel.policy.shell.syntax import Dialect, Expansion, Facts, Function, Unreadable, Word
from carrel.policy.shell.words import NAME
from carrel.policy.shell.wrappers import SAFE_OPTIONS


class State(Protocol):
    """What a builtin may look at and change."""

    facts: Facts
    dialect: Dialect
    functions: dict[str, Function]
    unset: set[str]

    def text(self, text: str, *, later: bool = False) -> None:
        """Read a text as commands of this shell, now or at a later time."""

    def enter(self, directory: Argument | None) -> None:
        """Change the directory; None is one that is not known."""


@dataclass(frozen=True, slots=True)
class Call:
    """A builtin with its arguments, and the words they come from while they are still the same in number."""

    name: str
    arguments: tuple[Argument, ...]
    words: tuple[Word, ...] = ()
    plain: bool = True
    """Written as it is, so that its assignments are not split."""


Builtin = Callable[[Call, State], None]

_FLAGS_OF_SET = frozenset("eufxvnCETbmPh")
_SAFE_SHOPT = frozenset({"globstar", "dotglob", "nocaseglob", "nocasematch", "inherit_errexit", "checkwinsize"})


def _eval(call: Call, state: State) -> None:
    words = list(call.arguments)
    if words and words[0] == "--":
        words = words[1:]
    if any(isinstance(word, Unknown) for word in words):
        state.facts.ask(f"the text eval runs is known only at run time: {_line(call)}")
        return
    state.text(" ".join(str(word) for word in words))


def _trap(call: Call, state: State) -> None:
    words = list(call.arguments)
    if words and words[0] in {"-l", "-p", "-P"}:
        return
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        return
    if isinstance(words[0], Unknown) or any(isinstance(word, Unknown) and word.count == "any" for word in words):
        state.facts.ask(f"the text trap keeps is known only at run time: {_line(call)}")
        return
    if len(words) > 1 and words[0] not in {"-", ""}:
        state.text(words[0], later=True)


def _asks(reason: str) -> Builtin:
    def builtin(call: Call, state: State) -> None:
        state.facts.ask(f"{reason}: {_line(call)}")

    return builtin


def _alias(call: Call, state: State) -> None:
    if call.arguments and call.arguments != ("-p",):
        state.facts.ask(f"an alias changes what later words mean: {_line(call)}")


def _shopt(call: Call, state: State) -> None:
    flags = [word for word in call.arguments if isinstance(word, str) and word.startswith("-")]
    names = [word for word in call.arguments if word not in flags]
    if set(flags) <= {"-p", "-q"} and all(isinstance(name, str) for name in names):
        return
    if set(flags) <= {"-s", "-u", "-q"} and all(name in _SAFE_SHOPT for name in names):
        return
    state.facts.ask(f"an option changes how text is read: {_line(call)}")


def _set(call: Call, state: State) -> None:
    words = list(call.arguments)
    while words:
        word = words.pop(0)
        if isinstance(word, Unknown):
            state.facts.ask(f"options of set are known only at run time: {_line(call)}")
            return
        if word in {"--", "-"}:
            break
        if word[:1] not in {"-", "+"} or len(word) < 2:
            words.insert(0, word)
            break
        for letter in word[1:]:
            if letter == "o":
                name = words.pop(0) if words else "errexit"
                if name not in SAFE_OPTIONS:
                    state.facts.ask(f"an option changes how text is read: {_line(call)}")
                    return
            elif letter not in _FLAGS_OF_SET:
                state.facts.ask(f"an option changes how text is read: {_line(call)}")
                return
    positional(words, state.facts)


def positional(words: Sequence[Argument], facts: Facts) -> None:
    """Note the arguments a function or a text is given."""
    for word in words:
        if isinstance(word, Unknown):
            facts.assign_anything("@", word.source)
        elif "$" in word or "`" in word:
            facts.assign_anything("@", word)


def _hash(call: Call, state: State) -> None:
    if any(isinstance(word, Unknown) or word.startswith("-p") for word in call.arguments):
        state.facts.ask(f"hash changes which program a name stands for: {_line(call)}")


def _jobs(call: Call, state: State) -> None:
    if any(isinstance(word, Unknown) or word.startswith("-x") for word in call.arguments):
        state.facts.ask(f"jobs -x runs a command: {_line(call)}")


def _variable(argument: Argument, call: Call, state: State, why: str) -> None:
    """Note that a builtin writes to the variable an argument names."""
    if isinstance(argument, Unknown) or "[" in argument:
        state.facts.ask(f"the variable {call.name} writes to is known only at run time: {_line(call)}")
    elif NAME.fullmatch(argument):
        state.facts.assign_anything(argument, why)


def _options(call: Call, valued: str) -> tuple[list[tuple[str, Argument]], list[Argument]]:
    """The options of a builtin with their values, and its operands."""
    found: list[tuple[str, Argument]] = []
    words = list(call.arguments)
    while words:
        word = words[0]
        if not isinstance(word, str) or not word.startswith("-") or word == "-":
            break
        words.pop(0)
        if word == "--":
            break
        for index, letter in enumerate(word[1:], start=2):
            if letter in valued:
                found.append((letter, word[index:] or (words.pop(0) if words else "")))
                break
            found.append((letter, ""))
    return found, words


def _read(call: Call, state: State) -> None:
    options, names = _options(call, "adinNptu")
    for name in [*names, *(value for letter, value in options if letter == "a")] or ["REPLY"]:
        _variable(name, call, state, "read")


def _printf(call: Call, state: State) -> None:
    options, _ = _options(call, "v")
    first = call.arguments[0] if call.arguments else ""
    if isinstance(first, Unknown) and (first.count == "any" or first.may_be("-v")) and len(call.arguments) > 1:
        if first.count == "any":
            state.facts.ask(f"an option of printf is known only at run time: {_line(call)}")
        return
    for letter, value in options:
        if letter == "v":
            _variable(value, call, state, "printf")


def _getopts(call: Call, state: State) -> None:
    for name in (*call.arguments[1:2], "OPTARG"):
        _variable(name, call, state, "getopts")


def _mapfile(call: Call, state: State) -> None:
    options, names = _options(call, "dnOsuCc")
    if any(letter == "C" for letter, _ in options) or any(isinstance(word, Unknown) for word in call.arguments):
        state.facts.ask(f"mapfile may run a command for every line: {_line(call)}")
    for name in names or ["MAPFILE"]:
        _variable(name, call, state, call.name)


def _let(call: Call, state: State) -> None:
    for word in call.words:
        for part in word.parts:
            if isinstance(part, Expansion):
                state.facts.evaluate(part.names, part.source)
            elif "$" in part.text or "`" in part.text:
                state.facts.ask(f"arithmetic on text that holds a command: {_line(call)}")
            else:
                state.facts.evaluate_text(part.text)


def _unset(call: Call, state: State) -> None:
    for word in call.arguments:
        if isinstance(word, Unknown) or "[" in word:
            state.facts.ask(f"what unset removes is known only at run time: {_line(call)}")
        elif not word.startswith("-"):
            state.unset.add(word)
            state.functions.pop(word, None)
            state.facts.changed[word] += 1


def _declare(call: Call, state: State) -> None:
    for word, argument in zip(call.words, call.arguments, strict=True):
        mark = skeleton(word)
        if isinstance(argument, str) and argument[:1] in {"-", "+"}:
            if set(argument) & set("inI"):
                state.facts.ask(f"a declaration that evaluates or renames later values: {_line(call)}")
            if "f" in argument and (call.name == "export" or "x" in argument):
                state.facts.ask(f"a function that other shells will know: {_line(call)}")
            continue
        found = re.match(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=|$)", mark)
        if not found or (isinstance(argument, Unknown) and argument.count == "any" and not call.plain):
            if isinstance(argument, str) and re.fullmatch(r"[A-Za-z_]\w*(\[\w+\])?(=[^$`]*)?", argument, re.ASCII):
                state.facts.assign_anything(argument.partition("=")[0].partition("[")[0], argument)
                continue
            state.facts.ask(f"the variable {call.name} writes to is known only at run time: {_line(call)}")
        elif found[2]:
            state.facts.assign(found[1], after(word, found.end()))
        elif call.name not in {"export", "readonly"}:
            state.facts.changed[found[1]] += 1  # a new variable of that name, without a value


def _test(call: Call, state: State) -> None:
    known: Argument | None = None
    for word, argument in zip(call.words, call.arguments, strict=True):
        many = isinstance(argument, Unknown) and argument.count != "one"
        beside = isinstance(argument, Unknown) and isinstance(known, Unknown)
        named = known in {"-v", "-R"} and (isinstance(argument, Unknown) or "[" in argument)
        if many or beside or named:
            for part in word.parts:
                if isinstance(part, Expansion):
                    state.facts.evaluate(part.names, f"{part.source} in {call.name}, where quotes would help")
                elif named and ("$" in part.text or "`" in part.text):
                    state.facts.ask(f"a test that evaluates text: {_line(call)}")
                else:
                    state.facts.evaluate_text(part.text)
        known = argument


def _cd(call: Call, state: State) -> None:
    words = [word for word in call.arguments if word not in {"-L", "-P", "--", "-e"}]
    target = words[0] if len(words) == 1 else None
    state.enter(None if target == "-" else target)


def _nowhere(call: Call, state: State) -> None:
    state.enter(None)


def _wait(call: Call, state: State) -> None:
    options, _ = _options(call, "p")
    for letter, value in options:
        if letter == "p":
            _variable(value, call, state, "wait")


def _line(call: Call) -> str:
    return " ".join([call.name, *(shown(each) for each in call.arguments)])[:120]


BUILTINS: dict[str, Builtin] = {
    "eval": _eval,
    "trap": _trap,
    "alias": _alias,
    "shopt": _shopt,
    "set": _set,
    "hash": _hash,
    "jobs": _jobs,
    "read": _read,
    "printf": _printf,
    "getopts": _getopts,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "let": _let,
    "unset": _unset,
    "test": _test,
    "[": _test,
    "cd": _cd,
    "pushd": _nowhere,
    "popd": _nowhere,
    "wait": _wait,
    "enable": _asks("enable changes which builtins there are"),
    "complete": _asks("completion runs commands"),
    "compgen": _asks("completion runs commands"),
    "bind": _asks("bind can run commands"),
    "fc": _asks("fc runs earlier commands again"),
    **dict.fromkeys(DECLARATIONS, _declare),
}

SHELL_WORDS = frozenset(BUILTINS) | frozenset(
    {"exec", "command", "builtin", "source", ".", ":", "exit", "return", "break", "continue", "shift", "times", "true"}
    | {"false", "echo", "pwd", "type", "kill", "umask", "ulimit", "disown", "bg", "fg", "suspend", "caller", "dirs"}
    | {"history", "help", "logout", "unalias", "local"}
)
"""Every command of the shell itself: a function of such a name changes what later words mean."""


def expanded(words: Sequence[Word], dialect: Dialect, budget: StepBudget) -> list[tuple[Argument, Word]]:
    """The arguments of words, each with the word it comes from."""
    made = []
    for word in words:
        found = arguments(word, budget)
        if dialect != "bash" and (len(found) != 1 or "{" in skeleton(word)):
            raise Unreadable("braces are read differently by sh and by Bash")
        made += [(argument, word) for argument in found]
    return made
