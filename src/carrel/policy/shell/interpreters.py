"""Languages of `sources.json`: which interpreters a command may start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from carrel.policy.documents.sources import Runtime
from carrel.policy.shell.arguments import Argument
from carrel.policy.shell.wrappers import base
from carrel.policy.verdict import Verdict

_FAMILIES = {
    "python": re.compile(r"(python|pypy|ipython)(\d+(?:\.\d+)*)?"),
    "bash": re.compile(r"(bash|sh|dash)()"),
    "node": re.compile(r"(node|nodejs)(\d+)?"),
    "deno": re.compile(r"(deno)()"),
    "bun": re.compile(r"(bun)()"),
    "ruby": re.compile(r"(ruby|irb)(\d+(?:\.\d+)*)?"),
    "perl": re.compile(r"(perl)(\d+(?:\.\d+)*)?"),
    "php": re.compile(r"(php)(\d+(?:\.\d+)*)?"),
    "lua": re.compile(r"(lua|luajit)(\d+(?:\.\d+)*)?"),
    "java": re.compile(r"(java|jshell)()"),
    "r": re.compile(r"(R|Rscript)()"),
    "julia": re.compile(r"(julia)()"),
    "zsh": re.compile(r"(zsh)()"),
    "fish": re.compile(r"(fish)()"),
    "tcl": re.compile(r"(tclsh|expect|wish)(\d+(?:\.\d+)*)?"),
    "powershell": re.compile(r"(pwsh)()"),
}


def judge(runtime: Runtime, argv: Sequence[Argument], source: str) -> Iterator[Verdict]:
    """What `sources.json` says of a command that starts an interpreter."""
    if runtime.languages is None or not argv or not isinstance(argv[0], str):
        return
    name = base(argv[0])
    for family, shape in _FAMILIES.items():
        found = shape.fullmatch(name)
        if not found:
            continue
        declared = [each.lower() for each in runtime.languages if re.fullmatch(rf"{family}[\d.]*", each.lower())]
        if not declared:
            yield Verdict("deny", f"{name} is not among the languages of this agent", "runtime.languages", source)
        elif found[2] and not any(_same(found[2], each.removeprefix(family)) for each in declared):
            yield Verdict("deny", f"{name} is another version than this agent may use", "runtime.languages", source)
        return


def _same(asked: str, declared: str) -> bool:
    """Whether a version is the declared one, or says less."""
    return not declared or declared == asked or declared.startswith(asked + ".") or asked.startswith(declared + ".")
