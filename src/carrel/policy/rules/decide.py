"""Decides whether a policy allows a command, a file access, a connection or a tool call, and says why.

A deny rule beats an allow rule; without either the answer is ask. The strictest answer for a part of an operation is
the answer for the whole. Pure: a caller-supplied function reads files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from carrel.models.base import MAX_PATH
from carrel.policy.documents.sources import Runtime, Sources
from carrel.policy.rules import packages, remotes
from carrel.policy.rules.hosts import HostPolicy
from carrel.policy.rules.layers import Policy
from carrel.policy.rules.packages import ReadFile
from carrel.policy.rules.rules import Rule, behind_options, first, match_words
from carrel.policy.shell import (
    SPARE_STEPS,
    Argument,
    Dialect,
    StepBudget,
    TooComplex,
    Unknown,
    base,
    changes_what_runs,
    size_of,
)
from carrel.policy.shell.finder import FileUse, FoundCommand, HostUse, find, normal
from carrel.policy.verdict import ALLOWED, Decision, Verdict, VerdictPart, strictest

Operation = Literal["read", "write", "delete"]

STEPS_PER_RULE = 20
"""Additional steps that a decision may take for each rule of the policy."""
LONGEST_HOST = 255
"""DNS accepts no longer names, and deciding about one would take long."""

_VERSIONED = {
    "python": "python|pypy|ipython", "ruby": "ruby|irb", "perl": "perl", "php": "php", "lua": "lua|luajit",
    "tcl": "tclsh|expect|wish",
}  # fmt: skip
_UNVERSIONED = {
    "bash": "bash|sh|dash", "deno": "deno", "bun": "bun", "java": "java|jshell", "r": "R|Rscript", "julia": "julia",
    "zsh": "zsh", "fish": "fish", "powershell": "pwsh",
}  # fmt: skip
_INTERPRETERS = {
    **{family: re.compile(rf"({names})(\d+(?:\.\d+)*)?") for family, names in _VERSIONED.items()},
    **{family: re.compile(rf"({names})()") for family, names in _UNVERSIONED.items()},
    "node": re.compile(r"(node|nodejs)(\d+)?"),
}
"""For each language, the names of its interpreters and the version in them."""
_ASK_HINT = "write the command so that its text shows what it runs, or ask a person to approve it"
_NO_RULES = Verdict("allow", "no settings")


def decide_shell(
    policy: Policy,
    command: str | Sequence[str],
    *,
    cwd: str | None = None,
    dialect: Dialect = "bash",
    read_file: ReadFile | None = None,
) -> Verdict:
    """Decide about a shell text, or a program with its arguments.

    `cwd` is the directory it runs in, by default the workspace. `read_file` reads requirements files.
    """
    if not policy.governed and not policy.sources:
        return ALLOWED
    found = find(command, dialect=dialect, cwd=cwd or policy.workspace)
    reading = None if read_file is None else packages.limited_reader(read_file)
    budget = StepBudget(size_of(command), spare=SPARE_STEPS + STEPS_PER_RULE * policy.size)
    shown = command if isinstance(command, str) else " ".join(command)
    parts: list[VerdictPart] = []
    try:
        parts += (_command(policy, each, reading, budget) for each in found.commands)
        parts += (_file_use(policy, each, budget) for each in found.files)
        if found.hosts:
            hosts = HostPolicy(policy)
            parts += (_host_use(policy, each, hosts, budget) for each in found.hosts)
    except TooComplex as reason:
        asks = Verdict("ask", f"the command is too complex to decide: {reason}", hint=_ASK_HINT)
        parts.append(VerdictPart("shell", shown[:200], asks))
    if policy.governed:
        parts += [VerdictPart("shell", shown[:200], Verdict("ask", reason, hint=_ASK_HINT)) for reason in found.asks]
    return _whole(parts)


def decide_file(policy: Policy, operation: Operation, path: str) -> Verdict:
    """Decide about reading, writing or deleting an absolute path of the sandbox."""
    if not policy.governed:
        return ALLOWED
    return _whole([_file(policy, operation, normal(path))])


def decide_tree(policy: Policy, operation: Operation, path: str, *, surely: bool = False) -> Verdict:
    """Decide about reading or deleting a path with everything below it, if it is a folder.

    A deny rule for a path below it denies the whole. A deny rule whose pattern only may match something below it asks;
    with `surely` such a rule does not count.
    """
    if not policy.governed:
        return ALLOWED
    place = normal(path)
    parts, hint = [_file(policy, operation, place)], "name the files and folders in it one by one, without this one"
    for rule, at in ((rule, at) for at in policy.spellings(place) for rule in policy.deny.files_of(operation)):
        if rule.path is None or not rule.path.matches_below(at):
            continue
        within = rule.path.fixed == at or rule.path.fixed.startswith(f"{at.rstrip('/')}/")
        if within or not surely:
            reason = f"{rule.text} {'denies' if within else 'may deny'} something in {place[:200]}"
            decision: Decision = "deny" if within else "ask"
            parts.append(
                VerdictPart("file", f"{operation} {place}", Verdict(decision, reason, rule.text, rule.source, hint))
            )
    return _whole(parts)


def decide_network(policy: Policy, host: str, port: int | None = None) -> Verdict:
    """Decide about a connection to a host."""
    if not policy.governed and not policy.sources:
        return ALLOWED
    return _whole([_host(policy, HostPolicy(policy), host, port)])


def decide_port(policy: Policy, port: int) -> Verdict:
    """Decide about reaching a port of the sandbox from outside."""
    if not policy.governed:
        return ALLOWED
    verdict = _by_rules(
        first(policy.deny.inbound(port)), first(policy.allow.inbound(port)), f"reaching port {port} of the sandbox"
    )
    return _whole([VerdictPart("network", f"inbound:{port}", verdict)])


def decide_mcp(policy: Policy, server: str, tool: str) -> Verdict:
    """Decide about a call of a tool of an MCP server."""
    if not policy.governed:
        return ALLOWED
    verdict = _by_rules(
        first(policy.deny.mcp(server, tool)), first(policy.allow.mcp(server, tool)), f"the tool {server}:{tool}"
    )
    return _whole([VerdictPart("mcp", f"{server}:{tool}", verdict)])


def decide_environment(policy: Policy, names: Iterable[str]) -> Verdict:
    """Decide about the environment variables of a command. Some of them change what commands run."""
    if not policy.governed:
        return ALLOWED
    hint = "leave it out, or ask a person to approve it"
    return _whole(
        [
            VerdictPart("shell", name, Verdict("ask", f"the variable {name} changes what commands run", hint=hint))
            for name in names
            if changes_what_runs(name)
        ]
    )


# --- parts


def _whole(parts: Sequence[VerdictPart]) -> Verdict:
    worst = strictest(part.verdict for part in parts)
    return ALLOWED if worst is None else replace(worst, parts=tuple(parts))


def _by_rules(denied: Rule | None, allowed: Rule | None, what: str) -> Verdict:
    if denied is not None:
        return Verdict("deny", f"{what} is denied for this agent", denied.text, denied.source)
    if allowed is not None:
        return Verdict("allow", f"{what} is allowed", allowed.text, allowed.source)
    return Verdict("ask", f"no rule allows or denies {what}", hint="a person can approve it")


def _command(policy: Policy, command: FoundCommand, read_file: ReadFile | None, budget: StepBudget) -> VerdictPart:
    argv = command.arguments
    verdicts: list[Verdict] = []
    if policy.governed:
        verdicts.append(_by_shell_rules(policy, argv, budget))
    for name, sources in policy.sources:
        budget.spend(len(argv) * _length(sources))
        verdicts += packages.judge(sources, argv, name, read_file)
        verdicts += remotes.judge(sources.git, argv, name)
        verdicts += _by_languages(sources.runtime, argv, name)
    verdict = strictest(verdicts) or _NO_RULES
    return VerdictPart("shell", command.text[:500], verdict, command.via)


def _length(sources: Sources) -> int:
    """The number of entries that an argument may be compared with."""
    allowed = () if sources.git is None else sources.git.allowed_remotes or ()
    registries = [len(each.registries or ()) for _, each in sources.package_managers if each is not None]
    return 1 + len(allowed) + max(registries, default=0)


def _by_languages(runtime: Runtime, argv: Sequence[Argument], source: str) -> Iterator[Verdict]:
    """Check a command that starts an interpreter against `runtime.languages`."""
    if runtime.languages is None or not argv or not isinstance(argv[0], str):
        return
    name = base(argv[0])
    for family, shape in _INTERPRETERS.items():
        found = shape.fullmatch(name)
        if not found:
            continue
        declared = [each.lower() for each in runtime.languages if re.fullmatch(rf"{family}[\d.]*", each.lower())]
        if not declared:
            yield Verdict("deny", f"{name} is not one of this agent's languages", "runtime.languages", source)
        elif found[2] and not any(_same_version(found[2], each.removeprefix(family)) for each in declared):
            yield Verdict("deny", f"this agent may not use this version of {name}", "runtime.languages", source)
        return


def _same_version(asked: str, declared: str) -> bool:
    """Whether two versions are equal, or one is a prefix of the other."""
    return not declared or declared == asked or declared.startswith(asked + ".") or asked.startswith(declared + ".")


def _by_shell_rules(policy: Policy, argv: tuple[Argument, ...], budget: StepBudget) -> Verdict:
    name = str(argv[0]) if isinstance(argv[0], str) else "the command"
    denied: list[Rule] = []
    perhaps: list[Rule] = []
    width = len(argv) if any(isinstance(each, Unknown) and each.count != "one" for each in argv) else 1
    budget.spend(len(argv))
    for rule in policy.deny.shell(argv, gaps=True):
        budget.spend(2 + len(rule.words) * width)
        match match_words(rule, argv, deny=True):
            case "yes":
                denied.append(rule)
            case "maybe":
                perhaps.append(rule)
            case _ if len(rule.words) > 1 and behind_options(rule, argv):
                perhaps.append(rule)
    if not denied and perhaps:
        rule = min(perhaps, key=lambda each: each.order)
        return Verdict(
            "ask",
            f"{rule.text} may deny this command, depending on values known only at run time or on its options",
            rule.text,
            rule.source,
            "write every argument in full, or ask a person to approve it",
        )
    allowed: list[Rule] = []
    for rule in () if denied else policy.allow.shell(argv):
        budget.spend(2 + len(rule.words) * width)
        if match_words(rule, argv, deny=False) == "yes":
            allowed.append(rule)
    return _by_rules(first(denied), first(allowed), name)


def _file_use(policy: Policy, use: FileUse, budget: StepBudget) -> VerdictPart:
    text = f"{use.operation} {use.path or use.source}"
    if not policy.governed:
        return VerdictPart("file", text, _NO_RULES)
    budget.spend(1 + 8 * (use.path or "").count("/") + policy.size // 8)
    if use.path is None:
        reason = f"the file to {use.operation} is known only at run time: {use.source[:80]}"
        return VerdictPart(
            "file", text, Verdict("ask", reason, hint="write the path in full, or ask a person to approve it")
        )
    return _file(policy, use.operation, use.path)


def _file(policy: Policy, operation: Operation, path: str) -> VerdictPart:
    if len(path) > MAX_PATH:
        reason = f"the path is longer than {MAX_PATH} characters"
        return VerdictPart("file", f"{operation} {path[:200]}", Verdict("ask", reason, hint="use a shorter path"))
    spellings = policy.spellings(path)
    denied = first(rule for each in spellings for rule in policy.deny.file(operation, each))
    allowed = first(rule for each in spellings for rule in policy.allow.file(operation, each))
    verb = {"read": "reading", "write": "writing", "delete": "deleting"}[operation]
    return VerdictPart("file", f"{operation} {path}", _by_rules(denied, allowed, f"{verb} {path[:200]}"))


def _host_use(policy: Policy, use: HostUse, hosts: HostPolicy, budget: StepBudget) -> VerdictPart:
    budget.spend(1 + policy.size // 8)
    return _host(policy, hosts, use.host, int(use.port) if use.port.isdecimal() and use.port.isascii() else None)


def _host(policy: Policy, hosts: HostPolicy, host: str, port: int | None) -> VerdictPart:
    what = (host if port is None else f"{host}:{port}")[:200]
    if len(host) > LONGEST_HOST:
        reason = f"the name of the host is longer than {LONGEST_HOST} characters"
        return VerdictPart("network", what, Verdict("deny", reason))
    verdict = hosts.host(host, port)
    if verdict is None:
        verdict = _by_rules(None, None, f"connecting to {what}") if policy.governed else _NO_RULES
    return VerdictPart("network", what, verdict)
