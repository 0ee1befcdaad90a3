"""Decides operations by a policy: on the event loop if that is quick, in a thread if it may take long.

Knows which arguments of an operation are decided and how. Stores no policies.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from carrel.control.operations.call import Call
from carrel.isolation.inside import WORKSPACE
from carrel.policy.rules.decide import (
    decide_environment,
    decide_file,
    decide_mcp,
    decide_network,
    decide_port,
    decide_shell,
    decide_tree,
)
from carrel.policy.rules.layers import Policy
from carrel.policy.shell import Dialect, size_of
from carrel.policy.verdict import ALLOWED, Verdict, strictest
from carrel.primitives.walk import Directories, open_for_reading
from carrel.threads import run_to_end

DIALECT: Dialect = "sh"
"""A command that is a text runs under `/bin/sh -c`."""
MOST_REQUIREMENTS = 1 << 20
QUICK_CHARACTERS, QUICK_RULES = 1_000, 1_000
"""A decision about this much text by this many rules takes the event loop at most about 40 ms; larger ones use a
thread.
"""
LONG_DECISIONS = 2
"""How many long decisions run at once: each uses a processor for a second or two."""
_DECIDED = ("command", "cwd", "env", "files", "install", "path", "destination", "host", "server", "tool")
"""The arguments that decisions read."""


class Decider:
    """Makes decisions, only a few long ones at once."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(LONG_DECISIONS)

    async def decide(self, policy: Policy, call: Call, workspace: str | None, own_path: str | None = None) -> Verdict:
        """Return the verdict of a policy on a call. `workspace` is the path of its files on this server, `own_path`
        their second path in the sandbox.
        """
        policy = policy if own_path is None else replace(policy, also_at=own_path)
        if _is_quick(policy, _given(call)):
            with suppress(_WouldBlock):
                return verdict_of(policy, call, _refuse_to_read)
        async with self._long:
            return await run_to_end(lambda: verdict_of(policy, call, partial(_read, workspace)))

    async def explain(self, policy: Policy, command: str | list[str], cwd: str | None) -> Verdict:
        """Return the verdict of a policy on a command, part by part; reads no file."""
        place = _absolute(cwd)
        if _is_quick(policy, [command]):
            return decide_shell(policy, command, cwd=place, dialect=DIALECT)
        async with self._long:
            return await run_to_end(lambda: decide_shell(policy, command, cwd=place, dialect=DIALECT))


class _WouldBlock(Exception):
    """A decision needs a file of the workspace."""


def _refuse_to_read(_path: str) -> str | None:
    raise _WouldBlock


def _read(workspace: str | None, path: str) -> str | None:
    return None if workspace is None else read_below(workspace, path)


def _given(call: Call) -> list[str | Sequence[str]]:
    """Return the texts of a call that are decided."""
    found: list[str | Sequence[str]] = []
    for name in _DECIDED:
        value = call.arguments.get(name)
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list | tuple | Mapping):
            found += [each if isinstance(each, str) else [str(word) for word in each] for each in value]
    return found


def _is_quick(policy: Policy, texts: Sequence[str | Sequence[str]]) -> bool:
    return policy.size <= QUICK_RULES and sum(map(size_of, texts)) <= QUICK_CHARACTERS


def verdict_of(policy: Policy, call: Call, read: Callable[[str], str | None]) -> Verdict:
    """Return the verdict of a policy on a call. `read` returns the text of a file of the workspace.
    May block for long.
    """
    arguments, decides = call.arguments, call.operation.decides
    if decides == "command":
        verdict = _of_command(policy, arguments, read)
        if verdict.asks and not call.operation.asks:
            return Verdict("allow", "it was allowed when it was added")
        return verdict
    if decides == "host":
        port = arguments.get("port")
        return decide_network(policy, str(arguments.get("host", "")), port if isinstance(port, int) else None)
    if decides == "port":
        number = arguments.get("port")
        verdict = decide_port(policy, number if isinstance(number, int) else 0)
        if verdict.asks and not call.operation.asks:
            return Verdict("allow", "it was allowed when its URL was made")
        return verdict
    if decides == "tool":
        return decide_mcp(policy, str(arguments.get("server", "")), str(arguments.get("tool", "")))
    if decides == "deletions":
        return _of_deletions(policy, arguments)
    if isinstance(decides, str):  # nothing; or variables of a sandbox, which `Policies` decides
        return ALLOWED
    parts = []
    for each in decides:
        path = _absolute(str(arguments.get(each.argument, "")))
        if each.tree or arguments.get("recursive") is True:
            parts.append(decide_tree(policy, each.access, path, surely=each.surely))
        else:
            parts.append(decide_file(policy, each.access, path))
    return strictest(parts) or ALLOWED


def _of_deletions(policy: Policy, arguments: Mapping[str, object]) -> Verdict:
    most, count = policy.limits.delete_limit, arguments.get("count")
    if most is None or (isinstance(count, int) and count <= most):
        return ALLOWED
    reason = f"more than {most} files of the folder were deleted; `carrel undo` brings them back after the run"
    return Verdict("ask", reason, "runtime.delete_limit", policy.sources[-1][0], "delete less at once")


def _of_command(policy: Policy, arguments: Mapping[str, object], read: Callable[[str], str | None]) -> Verdict:
    command = arguments.get("command")
    given = command if isinstance(command, str) else [str(part) for part in command or ()]  # type: ignore[attr-defined]
    cwd = arguments.get("cwd")
    most, timeout = policy.limits.max_execution_time_seconds, arguments.get("timeout")
    if most is not None and isinstance(timeout, int | float) and not 0 < timeout <= most:
        reason = f"a command of this agent may take {most} seconds at most"
        hint = f"ask for {most} seconds or less, or leave the deadline out"
        return Verdict("deny", reason, "runtime.max_execution_time_seconds", policy.sources[-1][0], hint)
    place = _absolute(cwd if isinstance(cwd, str) else None)
    verdict = decide_shell(policy, given, cwd=place, dialect=DIALECT, read_file=read)
    env = arguments.get("env")
    parts = [verdict, decide_environment(policy, env if isinstance(env, Mapping) else ())]
    files = arguments.get("files")
    if isinstance(files, list):  # put into the workspace before the command runs
        parts += [decide_file(policy, "write", _absolute(str(path))) for path in files]
    installs = arguments.get("install")
    if isinstance(installs, list):  # installed before it runs
        parts += [decide_shell(policy, each, dialect=DIALECT, read_file=read) for each in installs]
    return strictest(parts) or ALLOWED


def _absolute(path: str | None) -> str:
    return WORKSPACE if not path else os.path.join(WORKSPACE, path)


def read_below(workspace: str, path: str) -> str | None:
    """Return the text of a small file of a workspace, by its path in the sandbox; None when it cannot be read. Follows
    no link in the tree of the agent.
    """
    absolute = os.path.normpath(_absolute(path))
    above = workspace if absolute.startswith(f"{workspace}/") else WORKSPACE
    relative = os.path.relpath(absolute, above)
    if relative.startswith(".."):
        return None
    folder, name = os.path.split(relative)
    with suppress(OSError):
        root = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            directories = Directories(root)
            try:
                number = 0
                for above in filter(None, folder.split("/")):
                    number = directories.add(number, above)
                file = open_for_reading(name, directories.get(number))
            finally:
                directories.close()
        finally:
            os.close(root)
        try:
            data = os.read(file, MOST_REQUIREMENTS + 1)
        finally:
            os.close(file)
        return None if len(data) > MOST_REQUIREMENTS else data.decode(errors="replace")
    return None
