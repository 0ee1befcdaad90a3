"""Builtins of the shell that change what later words mean, or that run text: one function each.

They read the state of the finder through `FinderState` and record there what they find. They decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from carrel.policy.shell.arguments import Argument, Unknown, arguments, joined
from carrel.policy.shell.commands import DECLARATIONS, after, skeleton
from carrel.policy.shell.step_budget import StepBudget
from carrel.policy.shell.syntax import Dialect, Expansion, Function, TextFacts, Unreadable, Word, may_run
from carrel.policy.shell.words import NAME
from carrel.policy.shell.wrappers import SAFE_OPTIONS


class FinderState(Protocol):
    """The part of the finder that builtins read and change."""

    facts: TextFacts
    dialect: Dialect
    functions: dict[str, Function]
    unset: set[str]

    def text(self, text: str, *, later: bool = False) -> None:
        """Read a text as commands of this shell that run now or `later`."""

    def enter(self, directory: Argument | None) -> None:
        """Change the directory; None means an unknown one."""


@dataclass(frozen=True, slots=True)
class BuiltinCall:
    """A call of a builtin: its arguments and the words that they come from."""

    name: str
    arguments: tuple[Argument, ...]
    words: tuple[Word, ...] = ()
    plain: bool = True
    """The name is written literally, so Bash does not split the values of its assignments."""


Builtin = Callable[[BuiltinCall, FinderState], None]

_READING_OPTION = "an option changes how the shell reads text"
_FLAGS_OF_SET = frozenset("eufxvnCETbmPh")
_SAFE_SHOPT = frozenset({"globstar", "dotglob", "nocaseglob", "nocasematch", "inherit_errexit", "checkwinsize"})


def _ask(call: BuiltinCall, state: FinderState, reason: str) -> None:
    state.facts.ask(f"{reason}: {joined((call.name, *call.arguments))[:120]}")


def _eval(call: BuiltinCall, state: FinderState) -> None:
    words = list(call.arguments)
    if words and words[0] == "--":
        words = words[1:]
    if any(isinstance(word, Unknown) for word in words):
        _ask(call, state, "the text that eval runs is known only at run time")
        return
    state.text(" ".join(str(word) for word in words))


def _trap(call: BuiltinCall, state: FinderState) -> None:
    words = list(call.arguments)
    if words and words[0] in {"-l", "-p", "-P"}:
        return
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        return
    if isinstance(words[0], Unknown) or any(isinstance(word, Unknown) and word.count == "any" for word in words):
        _ask(call, state, "the text that trap runs later is known only at run time")
        return
    if len(words) > 1 and words[0] not in {"-", ""}:
        state.text(words[0], later=True)


def _asks(reason: str) -> Builtin:
    return lambda call, state: _ask(call, state, reason)


def _alias(call: BuiltinCall, state: FinderState) -> None:
    if call.arguments and call.arguments != ("-p",):
        _ask(call, state, "an alias changes what later words mean")


def _shopt(call: BuiltinCall, state: FinderState) -> None:
    flags = [word for word in call.arguments if isinstance(word, str) and word.startswith("-")]
    names = [word for word in call.arguments if word not in flags]
    if set(flags) <= {"-p", "-q"} and all(isinstance(name, str) for name in names):
        return
    if set(flags) <= {"-s", "-u", "-q"} and all(name in _SAFE_SHOPT for name in names):
        return
    _ask(call, state, _READING_OPTION)


def _set(call: BuiltinCall, state: FinderState) -> None:
    words = list(call.arguments)
    while words:
        word = words.pop(0)
        if isinstance(word, Unknown):
            _ask(call, state, "options of set are known only at run time")
            return
        if word in {"--", "-"}:
            break
        if word[:1] not in {"-", "+"} or len(word) < 2:
            words.insert(0, word)
            break
        for letter in word[1:]:
            if letter == "o":
                safe = (words.pop(0) if words else "errexit") in SAFE_OPTIONS
            else:
                safe = letter in _FLAGS_OF_SET
            if not safe:
                _ask(call, state, _READING_OPTION)
                return
    positional(words, state.facts)


def positional(words: Sequence[Argument], facts: TextFacts) -> None:
    """Record the positional parameters of a function or a text."""
    for word in words:
        if isinstance(word, Unknown):
            facts.assign_anything("@", word.source)
        elif may_run(word):
            facts.assign_anything("@", word)


def _hash(call: BuiltinCall, state: FinderState) -> None:
    if any(isinstance(word, Unknown) or word.startswith("-p") for word in call.arguments):
        _ask(call, state, "hash changes which program a name runs")


def _jobs(call: BuiltinCall, state: FinderState) -> None:
    if any(isinstance(word, Unknown) or word.startswith("-x") for word in call.arguments):
        _ask(call, state, "jobs -x runs a command")


def _variable(argument: Argument, call: BuiltinCall, state: FinderState, why: str) -> None:
    """Record that a builtin writes to the variable that an argument names."""
    if isinstance(argument, Unknown) or "[" in argument:
        _ask(call, state, f"the variable that {call.name} writes to is known only at run time")
    elif NAME.fullmatch(argument):
        state.facts.assign_anything(argument, why)


def _options(call: BuiltinCall, valued: str) -> tuple[list[tuple[str, Argument]], list[Argument]]:
    """Split the arguments of a builtin into options with their values, and operands."""
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


def _read(call: BuiltinCall, state: FinderState) -> None:
    options, names = _options(call, "adinNptu")
    for name in [*names, *(value for letter, value in options if letter == "a")] or ["REPLY"]:
        _variable(name, call, state, "read")


def _printf(call: BuiltinCall, state: FinderState) -> None:
    options, _ = _options(call, "v")
    first = call.arguments[0] if call.arguments else ""
    if isinstance(first, Unknown) and (first.count == "any" or first.may_be("-v")) and len(call.arguments) > 1:
        if first.count == "any":
            _ask(call, state, "an option of printf is known only at run time")
        return
    for letter, value in options:
        if letter == "v":
            _variable(value, call, state, "printf")


def _getopts(call: BuiltinCall, state: FinderState) -> None:
    for name in (*call.arguments[1:2], "OPTARG"):
        _variable(name, call, state, "getopts")


def _mapfile(call: BuiltinCall, state: FinderState) -> None:
    options, names = _options(call, "dnOsuCc")
    if any(letter == "C" for letter, _ in options) or any(isinstance(word, Unknown) for word in call.arguments):
        _ask(call, state, "mapfile may run a command for every line")
    for name in names or ["MAPFILE"]:
        _variable(name, call, state, call.name)


def _let(call: BuiltinCall, state: FinderState) -> None:
    for word in call.words:
        for part in word.parts:
            if isinstance(part, Expansion):
                state.facts.evaluate(part.names, part.source)
            elif may_run(part.text):
                _ask(call, state, "arithmetic on text that contains a command")
            else:
                state.facts.evaluate_text(part.text)


def _unset(call: BuiltinCall, state: FinderState) -> None:
    for word in call.arguments:
        if isinstance(word, Unknown) or "[" in word:
            _ask(call, state, "the name that unset removes is known only at run time")
        elif not word.startswith("-"):
            state.unset.add(word)
            state.functions.pop(word, None)
            state.facts.changed[word] += 1


def _declare(call: BuiltinCall, state: FinderState) -> None:
    for word, argument in zip(call.words, call.arguments, strict=True):
        mark = skeleton(word)
        if isinstance(argument, str) and argument[:1] in {"-", "+"}:
            if set(argument) & set("inI"):
                _ask(call, state, "a declaration that evaluates or renames later values")
            if "f" in argument and (call.name == "export" or "x" in argument):
                _ask(call, state, "a function is exported to other shells")
            continue
        found = re.match(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=|$)", mark)
        if not found or (isinstance(argument, Unknown) and argument.count == "any" and not call.plain):
            if isinstance(argument, str) and re.fullmatch(r"[A-Za-z_]\w*(\[\w+\])?(=[^$`]*)?", argument, re.ASCII):
                state.facts.assign_anything(argument.partition("=")[0].partition("[")[0], argument)
                continue
            _ask(call, state, f"the variable that {call.name} writes to is known only at run time")
        elif found[2]:
            state.facts.assign(found[1], after(word, found.end()))
        elif call.name not in {"export", "readonly"}:
            state.facts.changed[found[1]] += 1  # a new variable of that name, without a value


def _test(call: BuiltinCall, state: FinderState) -> None:
    known: Argument | None = None
    for word, argument in zip(call.words, call.arguments, strict=True):
        many = isinstance(argument, Unknown) and argument.count != "one"
        beside = isinstance(argument, Unknown) and isinstance(known, Unknown)
        named = known in {"-v", "-R"} and (isinstance(argument, Unknown) or "[" in argument)
        if many or beside or named:
            for part in word.parts:
                if isinstance(part, Expansion):
                    state.facts.evaluate(part.names, f"{part.source} in {call.name} (put it in quotes)")
                elif named and may_run(part.text):
                    _ask(call, state, "a test that evaluates text")
                else:
                    state.facts.evaluate_text(part.text)
        known = argument


def _cd(call: BuiltinCall, state: FinderState) -> None:
    words = [word for word in call.arguments if word not in {"-L", "-P", "--", "-e"}]
    target = words[0] if len(words) == 1 else None
    state.enter(None if target == "-" else target)


def _pushd(call: BuiltinCall, state: FinderState) -> None:
    state.enter(None)


def _wait(call: BuiltinCall, state: FinderState) -> None:
    options, _ = _options(call, "p")
    for letter, value in options:
        if letter == "p":
            _variable(value, call, state, "wait")


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
    "pushd": _pushd,
    "popd": _pushd,
    "wait": _wait,
    "enable": _asks("enable switches builtins on or off"),
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
"""All builtins of the shell. A function with such a name changes what later words mean."""


def expanded(words: Sequence[Word], dialect: Dialect, budget: StepBudget) -> list[tuple[Argument, Word]]:
    """Expand words to arguments, each with the word that it comes from."""
    made = []
    for word in words:
        found = arguments(word, budget)
        if dialect != "bash" and (len(found) != 1 or "{" in skeleton(word)):
            raise Unreadable("sh and Bash read braces differently")
        made += [(argument, word) for argument in found]
    return made
