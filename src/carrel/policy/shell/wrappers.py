"""Programs that run another program: `env`, `timeout`, `xargs`, `find -exec`, `bash -c` and their like.

This module reads their arguments and returns what they run. An unknown option, or an argument that is known only at run
time and might be an option, is a reason to ask. Knows nothing of rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from posixpath import commonprefix
from typing import Literal

from carrel.policy.shell.arguments import Argument, Unknown, shown, word_set
from carrel.policy.shell.options import effects
from carrel.policy.shell.syntax import Dialect

Arguments = Sequence[Argument]


@dataclass(slots=True)
class Wrapped:
    """The programs (with their arguments) and shell texts that a wrapper runs, and the environment
    that it gives them.
    """

    runs: list[tuple[Argument, ...]] = field(default_factory=list)
    scripts: list[tuple[str, Dialect, tuple[Argument, ...]]] = field(default_factory=list)
    assigned: list[str] = field(default_factory=list)
    directory: Argument | None = None
    moves: bool = False
    """It runs them in an unknown directory."""
    reads_commands: Dialect | None = None
    """It reads commands from its standard input."""
    file: bool = False
    """It reads commands from a file."""
    files: list[tuple[Literal["write", "delete"], Argument]] = field(default_factory=list)
    """Files that its options make it write or delete."""
    asks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _WrapperOptions:
    """The options of a wrapper before the program that it runs: letters and names, without and with a value."""

    flags: str = ""
    valued: str = ""
    names: frozenset[str] = frozenset()
    valued_names: frozenset[str] = frozenset()
    operands: int = 0
    assignments: bool = False
    numbers: bool = False


class _NotKnown(Exception):
    """The commands of a wrapper are unknown; the message is the reason to ask."""


_PLAIN = _WrapperOptions()
_TABLE: dict[str, _WrapperOptions] = {
    "nice": _WrapperOptions(valued="n", valued_names=word_set("adjustment"), numbers=True),
    "nohup": _PLAIN,
    "setsid": _WrapperOptions("cfw", names=word_set("ctty fork wait")),
    "stdbuf": _WrapperOptions(valued="ioe", valued_names=word_set("input output error")),
    "timeout": _WrapperOptions(
        "v", "ks", word_set("foreground preserve-status verbose"), word_set("kill-after signal"), operands=1
    ),
    "time": _WrapperOptions("apqv", "fo", word_set("append portability quiet verbose"), word_set("format output")),
    "ionice": _WrapperOptions("t", "cn", word_set("ignore"), word_set("class classdata")),
    "taskset": _WrapperOptions("ac", names=word_set("all-tasks cpu-list"), operands=1),
    "chrt": _WrapperOptions("abfiorRv", "TPD", operands=1),
    "chroot": _WrapperOptions(names=word_set("skip-chdir"), valued_names=word_set("userspec groups"), operands=1),
    "unshare": _WrapperOptions(
        "muinpUCTrcf", "RwSG", word_set("mount uts ipc net pid user cgroup time fork map-root-user")
    ),
    "sudo": _WrapperOptions(
        "AbEHknPS", "ugpCDRTrth", word_set("askpass background preserve-env set-home non-interactive"),
        word_set("user group prompt chdir"), assignments=True,
    ),
    "doas": _WrapperOptions("n", "u"),
    "strace": _WrapperOptions("fFtTvVxqhirykzcCdDnY", "eoOPsSauEIXb", word_set("follow-forks summary-only")),
    "flock": _WrapperOptions(
        "sxneuoF", "wE", word_set("shared exclusive nonblock unlock close no-fork verbose"),
        word_set("timeout wait conflict-exit-code"), operands=1,
    ),
    "gosu": _WrapperOptions(operands=1),
    "su-exec": _WrapperOptions(operands=1),
    "cgexec": _WrapperOptions(valued="g"),
    "tini": _WrapperOptions("gsv"),
    "dumb-init": _WrapperOptions("cv"),
    "catchsegv": _PLAIN,
    "eatmydata": _PLAIN,
    "unbuffer": _WrapperOptions("p"),
    "busybox": _PLAIN,
    "toybox": _PLAIN,
    "poetry run": _PLAIN,
    "pipenv run": _PLAIN,
    "pdm run": _PLAIN,
    "bundle exec": _PLAIN,
    "uv run": _WrapperOptions(
        "qvn", "p",
        word_set("no-sync frozen locked isolated quiet verbose no-project no-dev all-extras active offline"),
        word_set("python extra group project directory env-file"),
    ),
}  # fmt: skip
_BESIDE = frozenset({"chroot", "sudo", "doas", "unshare", "flock"})
"""Wrappers that may run the program in another directory."""
_OTHER_SHELLS = frozenset({"zsh", "ksh", "mksh", "fish", "csh", "tcsh", "pwsh", "rbash", "yash", "rc", "nu", "xonsh"})
_OPAQUE = word_set(
    "parallel su runuser script nsenter setpriv systemd-run bwrap firejail start-stop-daemon entr at batch prlimit "
    "numactl ltrace rlwrap fakeroot faketime capsh machinectl proot chpst daemonize"
)
"""Programs that run others, whose arguments this module does not read."""
_LOADER = re.compile(r"ld(-linux.*|-musl.*|64)?\.so(\.\d+)*|ld-linux.*")
PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:%%|\(\))?)=", re.DOTALL)


def base(name: str) -> str:
    """The name of a program without its directory."""
    return name.rsplit("/", 1)[-1]


def unwrap(argv: Arguments) -> Wrapped | None:
    """Return what the program with these arguments runs; None if it is not known to run anything."""
    if not argv or not isinstance(argv[0], str):
        return None
    name, rest = base(argv[0]), tuple(argv[1:])
    found = Wrapped()
    try:
        if name in _SPECIAL:
            _SPECIAL[name](name, rest, found)
        elif name in _OTHER_SHELLS:
            if any(_may_begin(argument, "-") for argument in rest):
                raise _NotKnown(f"this reader does not support the language of {name}")
        elif name in _OPAQUE or _LOADER.fullmatch(name):
            _opaque(name, rest, found)
        elif name in _TABLE:
            _tabled(name, rest, found)
        elif PYTHON.fullmatch(name):
            if (module := module_of(rest)) is None or module[0] != "pip":
                return None
            found.runs.append(("pip", *module[1]))
        elif rest and isinstance(rest[0], str) and f"{name} {rest[0]}" in _TABLE:
            _tabled(f"{name} {rest[0]}", rest[1:], found)
        elif (effect := effects(name, rest)) is not None:
            found.runs += ((each, Unknown("…", "any")) for each in effect.programs)
            found.scripts += ((each, "sh", ()) for each in effect.texts)
            found.files += (("write", each) for each in effect.writes)
            found.asks += effect.asks
        else:
            return None
    except _NotKnown as reason:
        found.asks.append(str(reason))
    return found


def module_of(rest: Arguments) -> tuple[str, tuple[Argument, ...]] | None:
    """The module that `python -m` runs, with its arguments."""
    for index, argument in enumerate(rest):
        if isinstance(argument, Unknown) or not argument.startswith("-"):
            return None
        if option := re.fullmatch(r"-[A-Za-z]*?m(.*)", argument):
            if option[1]:
                return option[1], tuple(rest[index + 1 :])
            following = rest[index + 1] if index + 1 < len(rest) else None
            return (following, tuple(rest[index + 2 :])) if isinstance(following, str) else None
    return None


def _opaque(name: str, rest: Arguments, found: Wrapped) -> None:
    if _LOADER.fullmatch(name) and rest and isinstance(rest[0], str) and not rest[0].startswith("-"):
        found.runs.append(tuple(rest))
    elif rest:
        raise _NotKnown(f"{name} may run any program, and this reader does not support its arguments")


def _tabled(name: str, rest: Arguments, found: Wrapped) -> None:
    options = _TABLE[name]
    at = _skip(name, rest, options)
    found.moves = found.moves or name in _BESIDE
    operands = rest[at : at + options.operands]
    if any(isinstance(each, Unknown) and each.count != "one" for each in operands):
        raise _NotKnown(f"the program that {name} runs is known only at run time")
    at += options.operands
    at = _assignments(name, rest, at, found) if options.assignments else at
    if name == "flock" and at < len(rest) and rest[at] in {"-c", "--command"}:
        _script(name, rest[at + 1 : at + 2], found, "sh")
        return
    if name == "uv run" and at < len(rest):
        first = rest[at]
        if isinstance(first, str) and (first.endswith(".py") or first == "-"):
            return  # a Python script, which nothing here can read
    _run(name, rest[at:], found)


def _run(name: str, argv: Arguments, found: Wrapped) -> None:
    if not argv:
        return
    if not isinstance(argv[0], str):
        raise _NotKnown(f"the program that {name} runs is known only at run time: {shown(argv[0])}")
    found.runs.append(tuple(argv))


def _script(name: str, argv: Arguments, found: Wrapped, dialect: Dialect, more: Arguments = ()) -> None:
    if not argv or not isinstance(argv[0], str):
        raise _NotKnown(f"the text that {name} runs is known only at run time")
    found.scripts.append((argv[0], dialect, tuple(more)))


def _skip(name: str, rest: Arguments, options: _WrapperOptions) -> int:
    """The index of the first argument that is not an option."""
    at = 0
    while at < len(rest):
        argument = rest[at]
        if isinstance(argument, Unknown):
            if argument.count == "one" and argument.prefix and not argument.prefix.startswith("-"):
                return at
            raise _NotKnown(f"an option of {name} is known only at run time: {argument.source}")
        if argument == "--":
            return at + 1
        if not argument.startswith("-") or argument == "-":
            return at
        at += _width(name, argument, options)
    if at > len(rest):
        raise _NotKnown(f"an option of {name} has no value")
    return at


def _width(name: str, argument: str, options: _WrapperOptions) -> int:
    """The number of arguments that an option takes, including itself."""
    if argument.startswith("--"):
        key, equals, _ = argument[2:].partition("=")
        if key in options.valued_names:
            return 1 if equals else 2
        if key in options.names:
            return 1
        raise _unknown_option(argument, name)
    if options.numbers and argument[1:].isdigit():
        return 1
    for index, letter in enumerate(argument[1:], start=1):
        if letter in options.valued:
            return 1 if index + 1 < len(argument) else 2
        if letter not in options.flags:
            raise _unknown_option(argument, name)
    return 1


def _unknown_option(option: str, name: str) -> _NotKnown:
    return _NotKnown(f"option {option} of {name} is unknown to this reader")


def _assignments(name: str, rest: Arguments, at: int, found: Wrapped) -> int:
    while at < len(rest):
        argument = rest[at]
        text = _begin(argument)
        assigned = _ASSIGNED.match(text)
        if isinstance(argument, Unknown) and argument.count != "one":
            raise _NotKnown(f"the program that {name} runs is known only at run time: {argument.source}")
        if "=" not in text:
            break
        if not assigned:
            raise _NotKnown(f"{name} sets a variable with an unusual name")
        found.assigned.append(assigned[1])
        at += 1
    return at


def _may_begin(argument: Argument, text: str) -> bool:
    if isinstance(argument, str):
        return argument.startswith(text)
    return argument.count == "any" or argument.prefix.startswith(text) or text.startswith(argument.prefix)


# --- programs that need more than a table


_ENV = _WrapperOptions(
    "i0v",
    "uC",
    word_set("ignore-environment null debug list-signal-handling"),
    word_set("unset chdir"),
    assignments=True,
)
_SPLIT = re.compile(r"[A-Za-z0-9_./=:,+@%-]+(?: +[A-Za-z0-9_./=:,+@%-]+)*")
_MOST_SPLITS = 20


def _env(name: str, rest: Arguments, found: Wrapped) -> None:
    at, splits = 0, 0
    while at < len(rest):
        argument = rest[at]
        if not isinstance(argument, str):
            break
        text, width = None, 1
        if argument in {"-S", "--split-string"}:
            following = rest[at + 1] if at + 1 < len(rest) else None
            if not isinstance(following, str):
                raise _NotKnown("the text that env splits is known only at run time")
            text, width = following, 2
        elif argument.startswith("-S"):
            text = argument[2:]
        elif argument.startswith("--split-string="):
            text = argument.partition("=")[2]
        if text is not None:
            if not _SPLIT.fullmatch(text):
                raise _NotKnown("this reader cannot split the text as env does")
            splits += 1
            if splits > _MOST_SPLITS:
                raise _NotKnown("env has too many texts to split")
            rest = (*rest[:at], *text.split(), *rest[at + width :])
            continue
        if argument in {"-", "--"} or not argument.startswith("-"):
            break
        if argument in {"-C", "--chdir"}:
            found.directory = rest[at + 1] if at + 1 < len(rest) else None
            found.moves = found.directory is None
        elif argument.startswith(("-C", "--chdir=")):
            found.moves = True
        at += _width(name, argument, _ENV)
    at += _skip(name, rest[at:], _ENV) if at < len(rest) and rest[at] != "-" else 0
    if at < len(rest) and rest[at] == "-":
        at += 1
    _run(name, rest[_assignments(name, rest, at, found) :], found)


_XARGS = _WrapperOptions(
    "0rtpxo", "adEILnPs", word_set("null no-run-if-empty verbose interactive exit open-tty max-lines replace eof"),
    word_set("arg-file delimiter max-args max-procs max-chars process-slot-var"),
)  # fmt: skip


def _xargs(name: str, rest: Arguments, found: Wrapped) -> None:
    at = _skip(name, rest, _XARGS)
    mark = _mark(rest[:at])
    argv = rest[at:] or ("echo",)
    if mark == "":
        raise _NotKnown("the placeholder that xargs replaces is known only at run time")
    _run(name, (*argv, Unknown("…", "any")) if mark is None else _replaced(argv, mark), found)


def _mark(options: Arguments) -> str | None:
    """The placeholder of `xargs -I`; empty if it is known only at run time, None without `-I`."""
    mark, skip = None, False
    for number, option in enumerate(options):
        following = options[number + 1] if number + 1 < len(options) else ""
        if skip or not isinstance(option, str):
            skip = False
        elif option.startswith("--"):
            if option.startswith("--replace"):
                mark = option.partition("=")[2] or "{}"
            skip = option[2:] in _XARGS.valued_names
        else:
            for index, letter in enumerate(option[1:], start=2):
                if letter in _XARGS.valued:
                    skip = index == len(option)
                    if letter == "I":
                        mark = option[index:] or (following if isinstance(following, str) else "")
                    break
    return mark


def _replaced(argv: Arguments, mark: str, begin: str = "") -> tuple[Argument, ...]:
    """Make every argument that contains the placeholder unknown. Its replacements all begin with `begin`."""
    made: list[Argument] = []
    for argument in argv:
        text = argument if isinstance(argument, str) else argument.prefix + argument.suffix
        before, marked, _ = text.partition(mark)
        made.append(Unknown(shown(argument), "one", before + begin) if marked else argument)
    return tuple(made)


_FIND_WRITES = frozenset({"-fprint", "-fprint0", "-fprintf", "-fls"})
_FIND_RUNS = frozenset({"-exec", "-execdir", "-ok", "-okdir"})


def _find(name: str, rest: Arguments, found: Wrapped) -> None:
    at = 0
    behind = dropwhile(lambda each: isinstance(each, str) and bool(re.fullmatch(r"-[HLP]|-O\d|--", each)), rest)
    starts = list(takewhile(lambda each: not isinstance(each, str) or each[:1] not in {"-", "(", "!"}, behind)) or ["."]
    last = max((number for number, each in enumerate(rest) if _is(";", each) or _is("+", each)), default=-1)
    while at < len(rest):
        argument = rest[at]
        if isinstance(argument, Unknown):
            if _may_run(argument, rest[at + 1 : at + 2], ends=at < last):
                raise _NotKnown(f"an argument of find, known only at run time, may run a program: {argument.source}")
        elif argument in _FIND_RUNS:
            end = at + 1
            while end < len(rest) and not (
                rest[end] == ";" or (rest[end] == "+" and rest[end - 1] == "{}" and end > at + 1)
            ):
                if isinstance(rest[end], Unknown) and (_is(";", rest[end]) or _is("+", rest[end])):
                    raise _NotKnown(f"where the command of find ends is known only at run time: {shown(rest[end])}")
                end += 1
            if end == len(rest):
                return  # find refuses this
            found.moves = found.moves or argument in {"-execdir", "-okdir"}
            beneath = "./" if argument in {"-execdir", "-okdir"} else commonprefix([_begin(each) for each in starts])
            _run(name, _replaced(rest[at + 1 : end], "{}", beneath), found)
            at = end
        elif argument in _FIND_WRITES and at + 1 < len(rest):
            at += 1
            found.files.append(("write", rest[at]))
        elif argument == "-delete":
            found.files += (("delete", each) for each in starts)
        at += 1


def _may_run(argument: Unknown, following: Arguments, *, ends: bool) -> bool:
    """Whether an argument of find may be an `-exec` that a program and an end (`ends`) follow."""
    if not any(argument.may_be(each) for each in _FIND_RUNS):
        return False
    if argument.count != "one":
        return True
    # An argument that begins with a dash is a test of find; no program has such a name.
    named = bool(following) and not (isinstance(following[0], str) and following[0].startswith("-"))
    return named and ends


def _begin(argument: Argument) -> str:
    return argument if isinstance(argument, str) else argument.prefix


def _is(text: str, argument: Argument) -> bool:
    return argument == text if isinstance(argument, str) else argument.may_be(text)


_SHELL_FLAGS = frozenset("efhmnuvxCEPTbl")
_SAFE_SHELL_NAMES = frozenset({"--norc", "--noprofile", "--login", "--verbose"})


def _shell(name: str, rest: Arguments, found: Wrapped) -> None:
    dialect: Dialect = "bash" if name == "bash" else "sh"
    at, text, stdin = 0, False, False
    while at < len(rest):
        argument = rest[at]
        if isinstance(argument, Unknown):
            raise _NotKnown(f"an argument of {name} is known only at run time: {argument.source}")
        if argument in {"--", "-"}:
            at += 1
            break
        if argument.startswith("--"):
            if argument not in _SAFE_SHELL_NAMES:
                raise _unknown_option(argument, name)
        elif argument[:1] in {"-", "+"} and len(argument) > 1:
            for letter in argument[1:]:
                if letter == "c" and argument[0] == "-":
                    text = True
                elif letter == "s":
                    stdin = True
                elif letter == "o":
                    at += 1
                    if at >= len(rest) or rest[at] not in SAFE_OPTIONS:
                        raise _unknown_option("-o", name)
                elif letter not in _SHELL_FLAGS:
                    raise _unknown_option(argument, name)
        else:
            break
        at += 1
    if text:
        _script(name, rest[at : at + 1], found, dialect, rest[at + 2 :])
    elif stdin or at >= len(rest):
        found.reads_commands = dialect
    else:
        found.file = True


SAFE_OPTIONS = word_set(
    "errexit nounset xtrace noglob verbose noexec noclobber errtrace functrace pipefail physical notify monitor hashall"
)
"""Names for `set -o` that do not change how the shell reads text."""


def _watch(name: str, rest: Arguments, found: Wrapped) -> None:
    options = _WrapperOptions(
        "bcdegtwx", "nq", word_set("beep color differences errexit chgexit no-title no-wrap exec"), word_set("interval")
    )
    at = _skip(name, rest, options)
    if any(isinstance(each, str) and (each == "--exec" or re.fullmatch(r"-[a-z]*x[a-z]*", each)) for each in rest[:at]):
        _run(name, rest[at:], found)
        return
    if any(isinstance(each, Unknown) for each in rest[at:]):
        raise _NotKnown("the text that watch runs is known only at run time")
    if rest[at:]:
        _script(name, (" ".join(str(each) for each in rest[at:]),), found, "sh")


_SPECIAL: dict[str, Callable[[str, Arguments, Wrapped], None]] = {
    "env": _env,
    "xargs": _xargs,
    "find": _find,
    "bash": _shell,
    "sh": _shell,
    "dash": _shell,
    "ash": _shell,
    "watch": _watch,
}

RUNNERS = frozenset(_TABLE) | frozenset(_SPECIAL) - {"find"} | _OTHER_SHELLS | _OPAQUE
"""Programs whose purpose is to run others."""
