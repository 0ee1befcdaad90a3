"""Options with which an ordinary program runs another program, writes another file or loads code: one table.

Rules allow a program by its name, so what such an option names must be decided too: the command that it runs by the
shell rules, the file that it writes by the file rules. Any other option that could run or write something is a reason
to ask. Knows nothing of rules.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from carrel.policy.shell.arguments import Argument, Unknown, shown, word_set
from carrel.policy.shell.sed_awk import Effects, awk_reasons, read_sed

Does = Literal["text", "program", "file", "setting", "script", "asks"]
"""What the value of an option is. `text`: a text that a shell runs. `program`: a program that runs. `file`: a file that
is written. `setting`: a setting of git. `script`: a script that `_sed` or `_awk` reads. `asks`: anything else that
could run or write something.
"""


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """The options with which a program runs or writes something.

    `options` maps names to what they do; names of several letters follow two dashes and may be abbreviated. `valued`
    are other letters that always take a value, and `long_valued` other names: without them the next option would be
    taken for an operand. `flags` are the `options` that take no value, or only one that is joined to them.
    """

    options: dict[str, Does]
    valued: str = ""
    long_valued: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    operand: int | None = None
    """The operands from this one on, counted from 0, are files that the program writes."""
    prefix: str = ""
    """An operand that names a file to write begins with this."""
    asking: re.Pattern[str] | None = None
    """Operands that may run or write something."""
    plain: dict[str, re.Pattern[str]] = field(default_factory=dict)
    """For an option that asks, the values that are harmless."""


def _does(does: Does, names: str) -> dict[str, Does]:
    return dict.fromkeys(names.split(), does)


_GIT_TRANSPORT = _does("text", "upload-pack exec")
_GIT_SHOWS = ProgramOptions(_does("file", "output") | _does("asks", "ext-diff"), "GSLOnlU", flags=word_set("ext-diff"))
GIT = {
    "clone": ProgramOptions(
        _GIT_TRANSPORT | _does("text", "u") | _does("setting", "c config") | _does("asks", "template bundle-uri"),
        "objb",
        word_set("branch origin depth jobs reference filter shallow-since separate-git-dir server-option"),
    ),
    "fetch": ProgramOptions(_GIT_TRANSPORT, "jo"),
    "pull": ProgramOptions(_GIT_TRANSPORT, "josX"),
    "ls-remote": ProgramOptions(_GIT_TRANSPORT, "o"),
    "push": ProgramOptions(_does("text", "receive-pack exec"), "o"),
    "archive": ProgramOptions(_does("file", "o output") | _does("text", "exec") | _does("asks", "remote")),
    "rebase": ProgramOptions(_does("text", "x exec"), "sX"),
    "difftool": ProgramOptions(_does("text", "x extcmd"), "t"),
    "grep": ProgramOptions(
        _does("program", "O open-files-in-pager"), "efABCm", flags=word_set("O open-files-in-pager")
    ),
    "commit": ProgramOptions(_does("asks", "e edit"), "mFCct", flags=word_set("e edit")),
    "add": ProgramOptions(_does("asks", "e edit"), flags=word_set("e edit")),
    "branch": ProgramOptions(_does("asks", "edit-description"), "u"),
    "init": ProgramOptions(_does("asks", "template"), "b"),
    **dict.fromkeys(("log", "diff", "show", "whatchanged", "format-patch", "stash"), _GIT_SHOWS),
}
"""The commands of git. `_GIT_GLOBAL` has the options before the command."""
_GIT_ASKS = word_set(
    "filter-branch send-email instaweb daemon difftool--helper mergetool for-each-repo hook shell cvsserver "
    "fast-import imap-send maintenance p4 svn gui citool web--browse credential remote-ext remote-fd bundle"
)
"""Commands of git that run programs which a file or a setting names."""
_GIT_GLOBAL = ProgramOptions(
    _does("setting", "c") | _does("asks", "config-env exec-path git-dir work-tree super-prefix"), "C",
    word_set("namespace"),
)  # fmt: skip
_COMMANDS = re.compile(r"\+")
_EDITOR = ProgramOptions(_does("asks", "c S s u U i w W cmd startuptime"), "tT", asking=_COMMANDS)

_FORMAT = re.compile(r"(?!@)(?!.*%output\{).*", re.DOTALL)
"""Formats of `curl --write-out` that neither read nor write a file."""

PROGRAMS: dict[str, ProgramOptions] = {
    "sort": ProgramOptions(
        _does("file", "o output") | _does("program", "compress-program"),
        "kStT",
        word_set("key field-separator buffer-size temporary-directory parallel batch-size files0-from"),
    ),
    "shuf": ProgramOptions(_does("file", "o output"), "in"),
    "uniq": ProgramOptions({}, "fsw", word_set("skip-fields skip-chars check-chars"), operand=1),
    "tee": ProgramOptions({}, operand=0),
    "dd": ProgramOptions({}, operand=0, prefix="of="),
    "tree": ProgramOptions(_does("file", "o"), "LPIHT", word_set("filelimit charset timefmt sort")),
    "sdiff": ProgramOptions(_does("file", "o output") | _does("program", "diff-program"), "Iw"),
    "diff3": ProgramOptions(_does("program", "diff-program"), "L"),
    "split": ProgramOptions(_does("text", "filter"), "abClnt"),
    "iconv": ProgramOptions(_does("file", "o output"), "ft"),
    "patch": ProgramOptions(_does("file", "o output r reject-file"), "pdiFVYBzDg"),
    "file": ProgramOptions(_does("asks", "C compile"), "fmeFP", flags=word_set("C compile")),
    "tar": ProgramOptions(
        _does("text", "I use-compress-program F info-script new-volume-script to-command rsh-command rmt-command")
        | _does("asks", "checkpoint-action T files-from")
        | _does("file", "index-file g listed-incremental volno-file"),
        "fCXKLNVbH",
        word_set("file directory exclude exclude-from transform xform owner group mode mtime strip-components"),
    ),
    "zip": ProgramOptions(_does("text", "TT unzip-command") | _does("file", "O output-file lf logfile-path"), "bntxiP"),
    "cpio": ProgramOptions(_does("asks", "rsh-command") | _does("file", "O"), "CEFHIMR"),
    "rsync": ProgramOptions(
        _does("text", "e rsh rsync-path")
        | _does("file", "log-file write-batch only-write-batch")
        | _does("asks", "M remote-option"),
        "fTB",
        word_set("exclude include files-from exclude-from include-from port bwlimit timeout chmod"),
    ),
    "ssh": ProgramOptions(_does("asks", "o F S E P D L R W J I"), "bceilmpQw"),
    "scp": ProgramOptions(_does("asks", "o F S D J"), "ciPlX"),
    "sftp": ProgramOptions(_does("asks", "o F S D J b"), "BciPlRsX"),
    "man": ProgramOptions(
        _does("text", "P pager H html browser") | _does("asks", "C config-file"),
        "LmMSsepErR",
        flags=word_set("H html browser"),
    ),
    "less": ProgramOptions(
        _does("file", "o log-file O LOG-FILE") | _does("asks", "k lesskey-file T"), "bhjpPtxyz", asking=_COMMANDS
    ),
    **dict.fromkeys(("vi", "vim", "vimdiff", "view", "ex", "nvim", "rvim"), _EDITOR),
    "rg": ProgramOptions(_does("program", "pre hostname-bin"), "efgABCjmtTErM", word_set("glob regexp file type")),
    "ag": ProgramOptions(_does("program", "pager"), "Gm"),
    **dict.fromkeys(("fd", "fdfind"), ProgramOptions(_does("asks", "x exec X exec-batch"), "deEtTSjg")),
    "fzf": ProgramOptions(_does("text", "preview bind"), "q"),
    "curl": ProgramOptions(
        _does("file", "o output D dump-header c cookie-jar trace trace-ascii stderr libcurl etag-save hsts alt-svc")
        | _does("file", "output-dir")
        | _does("asks", "K config O remote-name remote-name-all engine w write-out"),
        "AbCdeEFHmPQrtTuUxXyYz",
        word_set("url data header user proxy request max-time form cacert cert"),
        flags=word_set("O remote-name remote-name-all"),
        plain=dict.fromkeys(("w", "write-out"), _FORMAT),
    ),
    "wget": ProgramOptions(
        _does("file", "O output-document o output-file a append-output save-cookies rejected-log warc-file")
        | _does("file", "P directory-prefix")
        | _does("text", "use-askpass")
        | _does("asks", "e execute config i input-file"),
        "tTUABDIXRlQ",
    ),
    "sqlite3": ProgramOptions(_does("asks", "cmd init"), asking=re.compile(r"\s*\.")),
    "pip install": ProgramOptions(
        _does("file", "log report") | _does("program", "python"),
        "irtcef",
        word_set("index-url extra-index-url requirement target constraint prefix root src cache-dir find-links"),
    ),
    "pip list": ProgramOptions(_does("file", "log") | _does("program", "python"), "if"),
    "pip config": ProgramOptions(_does("text", "editor")),
}
"""Programs with such options. Git, sed, awk and find are read by functions of their own."""
PIP = re.compile(r"pip(\d+(\.\d+)*)?")
_SED = ProgramOptions(
    _does("script", "e expression i in-place") | _does("asks", "f file"),
    "l",
    word_set("line-length"),
    word_set("i in-place"),
)
_AWK = ProgramOptions(
    _does("script", "e source") | _does("asks", "f file i include l load E exec W")
    | _does("file", "d dump-variables p profile o pretty-print"),
    "Fv", word_set("field-separator assign"), word_set("d dump-variables p profile o pretty-print"),
)  # fmt: skip
_SAFE_CONFIG = re.compile(
    r"(user\.(name|email)|color\..*|advice\..*|init\.defaultbranch|pull\.(rebase|ff)|core\.(quotepath|autocrlf|longpaths)"
    r"|commit\.gpgsign|tag\.gpgsign|merge\.conflictstyle|diff\.(algorithm|renames)|push\.default|log\..*|safe\.directory)",
    re.IGNORECASE,
)


def is_safe_config(setting: Argument) -> bool:
    """Whether a setting of git, `key` or `key=value`, cannot change what git runs or connects to."""
    text = setting if isinstance(setting, str) else setting.prefix
    return ("=" in text or isinstance(setting, str)) and bool(_SAFE_CONFIG.fullmatch(text.partition("=")[0]))


def effects(name: str, rest: Sequence[Argument]) -> Effects | None:
    """Return what the options of a program make it run or write; None if they do neither."""
    found = Effects()
    if name == "git":
        _git(rest, found)
    elif name in {"sed", "gsed"}:
        _sed(name, rest, found)
    elif name in {"awk", "gawk", "mawk", "nawk"}:
        _awk(name, rest, found)
    else:
        if PIP.fullmatch(name):
            name = "pip"
        if rest and f"{name} {rest[0]}" in PROGRAMS:
            name, rest = f"{name} {rest[0]}", rest[1:]
        if name not in PROGRAMS:
            return None
        _OptionReader(name, PROGRAMS[name], found).read(_without_old_style(rest) if name == "tar" else rest)
    return found if found.texts or found.programs or found.writes or found.asks else None


class _OptionReader:
    """Reads the options of a program as `getopt_long` does: combined letters, abbreviated names, `--`."""

    def __init__(self, name: str, program: ProgramOptions, found: Effects):
        self._name = name
        self._program = program
        self._found = found
        self.options: list[tuple[str, Argument]] = []
        """The options of `ProgramOptions.options` that were given, with their values, in order."""

    def read(self, rest: Sequence[Argument], *, stop: bool = False) -> list[Argument]:
        """Record what the options do and return the operands; with `stop`, everything from the first operand on."""
        operands: list[Argument] = []
        at = 0
        while at < len(rest):
            argument = rest[at]
            if argument == "--":
                operands += rest[at + 1 :]
                break
            if isinstance(argument, Unknown):
                self._unknown(argument)
            if isinstance(argument, Unknown) or not argument.startswith("-") or argument == "-":
                if stop:
                    operands += rest[at:]
                    break
                operands.append(argument)
                at += 1
                continue
            following = rest[at + 1] if at + 1 < len(rest) else ""
            at += self._long(argument[2:], following) if argument.startswith("--") else self._short(argument, following)
        self._operands(operands)
        return operands

    def _unknown(self, argument: Unknown) -> None:
        """Ask about an argument that may be such an option at run time. File names that a pattern expands to may be
        one too, but those files exist already, and a person who reads the command could not see it either.
        """
        harmful = any(does != "asks" for does in self._program.options.values())
        begins = argument.prefix and not argument.prefix.startswith("-")
        if harmful and argument.count != "each" and not begins:
            self._found.asks.append(
                f"an argument of {self._name} known only at run time may be an option that runs or writes something: "
                f"{argument.source[:80]} (put it after -- if it is not an option)"
            )

    def _long(self, text: str, following: Argument) -> int:
        key, equals, given = text.partition("=")
        if key in self._program.long_valued:
            return 1 if equals else 2
        named = key if key in self._program.options else None
        if named is None and key:
            named = next((each for each in self._program.options if len(each) > 1 and each.startswith(key)), None)
        if named is None:
            return 1
        if equals or named in self._program.flags:
            self._note(named, given)
            return 1
        self._note(named, following)
        return 2

    def _short(self, argument: str, following: Argument) -> int:
        if argument[1:] in self._program.options and len(argument) > 2:  # a name behind one dash, as `zip -TT`
            self._note(argument[1:], following)
            return 2
        for index, letter in enumerate(argument[1:], start=2):
            behind = argument[index:]
            if letter in self._program.options:
                if letter in self._program.flags:
                    self._note(letter, behind)
                    if self._program.options[letter] != "asks":
                        return 1
                    continue
                self._note(letter, behind or following)
                return 1 if behind else 2
            if letter in self._program.valued:
                return 1 if behind else 2
        return 1

    def _note(self, option: str, value: Argument) -> None:
        self.options.append((option, value))
        does = self._program.options[option]
        if does == "script":
            return
        dashed = f"-{option}" if len(option) == 1 else f"--{option}"
        if does == "file" and value in {"", "-"}:
            return  # standard output
        if does == "file":
            self._found.writes.append(value)
        elif does == "setting":
            if not is_safe_config(value):
                self._found.asks.append(f"a setting may change what {self._name} runs: {shown(value)[:80]}")
        elif does in {"text", "program"} and isinstance(value, str):
            if value:
                (self._found.texts if does == "text" else self._found.programs).append(value)
        elif (plain := self._program.plain.get(option)) and isinstance(value, str) and plain.fullmatch(value):
            return
        elif value != "" or does == "asks":
            self._found.asks.append(f"option {dashed} of {self._name} may run or write something else")

    def _operands(self, operands: list[Argument]) -> None:
        first, prefix, asking = self._program.operand, self._program.prefix, self._program.asking
        for operand in operands if asking is not None else ():
            if isinstance(operand, str) and asking is not None and asking.match(operand):
                self._found.asks.append(f"{shown(operand)[:80]} may make {self._name} run or write something")
        if first is None:
            return
        for operand in operands[first:]:
            if not prefix:
                self._found.writes.append(operand)
            elif isinstance(operand, str) and operand.startswith(prefix):
                self._found.writes.append(operand[len(prefix) :])
            elif isinstance(operand, Unknown) and (not operand.prefix or operand.prefix.startswith(prefix)):
                self._found.writes.append(operand)


def _without_old_style(rest: Sequence[Argument]) -> list[Argument]:
    """Write the letters of tar that have no dash, as in `tar xIf prog file`, as options."""
    first = rest[0] if rest else ""
    if not isinstance(first, str) or not first or first.startswith("-"):
        return list(rest)
    tar, left = PROGRAMS["tar"], deque(rest[1:])
    made: list[Argument] = []
    for letter in first:
        made.append(f"-{letter}")
        if letter in tar.valued or letter in tar.options:
            made += [left.popleft()] if left else []
    return [*made, *left]


def _git(rest: Sequence[Argument], found: Effects) -> None:
    words = _OptionReader("git", _GIT_GLOBAL, found).read(rest, stop=True)
    if not words or not isinstance(words[0], str):
        if words:
            found.asks.append(f"the command of git is known only at run time: {shown(words[0])[:80]}")
        return
    command, behind = words[0], words[1:]
    if command in _GIT_ASKS:
        found.asks.append(f"git {command} runs programs that files or settings name")
    elif command == "bisect" and behind[:1] == ["run"]:
        found.texts.append(" ".join(shown(each) for each in behind[1:]))
    elif command == "submodule" and "foreach" in behind[:3]:
        texts = [each for each in behind[behind.index("foreach") + 1 :] if each not in {"--recursive", "--quiet", "-q"}]
        found.texts.append(" ".join(each if isinstance(each, str) else each.source for each in texts))
    elif command == "config":
        _git_config(behind, found)
    elif command in GIT:
        operands = _OptionReader(f"git {command}", GIT[command], found).read(behind)
        if any(isinstance(each, str) and re.match(r"(ext|fd)::", each) for each in operands):
            found.asks.append(f"git {command} has a remote that runs a program")


def _git_config(rest: Sequence[Argument], found: Effects) -> None:
    flags = {each for each in rest if isinstance(each, str) and each.startswith("-")}
    words = [each for each in rest if each not in flags]
    if words[:1] == ["set"]:
        words = words[1:]
    if flags & {"-e", "--edit"} or words[:1] == ["edit"]:
        found.asks.append("git config opens an editor")
    elif (len(words) > 1 and words[0] not in {"get", "list"} and not flags & {"--get", "--get-all", "--unset"}) and (
        not is_safe_config(words[0])
    ):
        found.asks.append(f"a setting may change what git runs: {shown(words[0])[:80]}")


def _sed(name: str, rest: Sequence[Argument], found: Effects) -> None:
    reader = _OptionReader(name, _SED, found)
    operands = reader.read(rest)
    scripts = [value for option, value in reader.options if option in {"e", "expression"}]
    if not scripts and operands and not any(option in {"f", "file"} for option, _ in reader.options):
        scripts.append(operands.pop(0))
    for script in scripts:
        if isinstance(script, Unknown):
            found.asks.append(
                f"a script of {name} that is known only at run time may run or write: {script.source[:80]}"
            )
        else:
            read_sed(script, found)
    if any(option in {"i", "in-place"} for option, _ in reader.options):
        found.writes += operands


def _awk(name: str, rest: Sequence[Argument], found: Effects) -> None:
    reader = _OptionReader(name, _AWK, found)
    words = reader.read(rest, stop=True)
    programs = [value for option, value in reader.options if option in {"e", "source"}]
    if not programs and not any(option in {"f", "file", "E", "exec"} for option, _ in reader.options):
        programs = words[:1]
    for program in programs:
        if isinstance(program, Unknown):
            found.asks.append(
                f"a program of {name} that is known only at run time may run or write: {program.source[:80]}"
            )
        else:
            found.asks += (f"a program of {name} {reason}" for reason in awk_reasons(program))
