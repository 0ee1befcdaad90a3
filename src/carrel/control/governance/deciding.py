"""Decides operations by a policy: on the event loop where that is quick, in a thread where it may be long.

Knows which arguments of an operation are decided and how. Keeps no policies.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from carrel.control.operations.door import Operation
from carrel.egress.threads import whole
from carrel.isolation.rootfs import WORKSPACE
from carrel.policy.rules.decide import (
    decide_environment,
    decide_file,
    decide_mcp,
    decide_network,
    decide_shell,
    decide_tree,
)
from carrel.policy.rules.layers import Policy
from carrel.policy.shell import Dialect, size_of
from carrel.policy.verdict import ALLOWED, Verdict, strictest
from carrel.workspaces.volumes.kernel import Directories, open_for_reading

DIALECT: Dialect = "sh"
"""A command that is a text runs under `/bin/sh -c`."""
MOST_REQUIREMENTS = 1 << 20
QUICK_CHARACTERS, QUICK_RULES = 1_000, 1_000
"""A decision about so much text by so many rules takes the event loop some 40 ms at most; longer ones get a thread."""
LONG_DECISIONS = 2
"""How many long decisions are made at once: each keeps a processor busy, for a second or two."""
_COMMANDS = frozenset(
    {
        "run_command", "start_command", "execute", "build_env", "attach_env", "python_exec", "start_python", "run_cell",
        "add_mcp_server", "start_mcp_server",
    }
)  # fmt: skip
_FILE_OPERATIONS = {
    "read": "read", "stat": "read", "list": "read", "filespace_read": "read", "filespace_list": "read",
    "export": "read",
    "write": "write", "edit": "write", "mkdir": "write", "filespace_write": "write",
    "delete": "delete", "filespace_delete": "delete", "filespace_forget": "delete",
}  # fmt: skip
_DECIDED = ("command", "cwd", "env", "files", "install", "path", "destination", "host", "server", "tool")
"""The arguments that decisions look at."""
_WHOLE = frozenset({"export", "filespace_forget"})
"""Operations on all files of a context."""


class Decider:
    """Makes decisions, few long ones at once."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(LONG_DECISIONS)

    async def decide(self, policy: Policy, operation: Operation, workspace: str | None) -> Verdict:
        """What a policy says of an operation. `workspace` is where its files lie on this server."""
        if _is_quick(policy, _given(operation)):
            with suppress(_WouldBlock):
                return verdict_of(policy, operation, _refuse_to_read)
        async with self._long:
            return await whole(lambda: verdict_of(policy, operation, partial(_read, workspace)))

    async def explain(self, policy: Policy, command: str | list[str], cwd: str | None) -> Verdict:
        """What a policy says of a command, part by part; no file is read."""
        place = _absolute(cwd)
        if _is_quick(policy, [command]):
            return decide_shell(policy, command, cwd=place, dialect=DIALECT)
        async with self._long:
            return await whole(lambda: decide_shell(policy, command, cwd=place, dialect=DIALECT))


class _WouldBlock(Exception):
    """A decision needs a file of the workspace."""


def _refuse_to_read(_path: str) -> str | None:
    raise _WouldBlock


def _read(workspace: str | None, path: str) -> str | None:
    return None if workspace is None else read_below(workspace, path)


def _given(operation: Operation) -> list[str | Sequence[str]]:
    """The texts of an operation that are decided."""
    found: list[str | Sequence[str]] = []
    for name in _DECIDED:
        value = operation.arguments.get(name)
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list | tuple | Mapping):
            found += [each if isinstance(each, str) else [str(word) for word in each] for each in value]
    return found


def _is_quick(policy: Policy, texts: Sequence[str | Sequence[str]]) -> bool:
    return policy.size <= QUICK_RULES and sum(map(size_of, texts)) <= QUICK_CHARACTERS


def verdict_of(policy: Policy, operation: Operation, read: Callable[[str], str | None]) -> Verdict:
    """What a policy says of an operation. `read` gives the text of a file of the workspace. May block for long."""
    arguments = operation.arguments
    if operation.kind == "shell" and operation.name in _COMMANDS:
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
        if isinstance(installs, list):  # what is installed before it runs
            parts += [decide_shell(policy, each, dialect=DIALECT, read_file=read) for each in installs]
        worst = strictest(parts) or ALLOWED
        if operation.name == "start_mcp_server" and worst.asks:
            return Verdict("allow", "it was let in when it was added")
        return worst
    if operation.kind == "file" and operation.name == "move":
        source = _absolute(str(arguments.get("path", "")))
        parts = [
            decide_tree(policy, "read", source, surely=True),  # what is moved can be read where it goes
            decide_tree(policy, "delete", source, surely=True),
            decide_file(policy, "write", _absolute(str(arguments.get("destination", "")))),
        ]
        return strictest(parts) or ALLOWED
    if operation.kind == "file":
        what = _FILE_OPERATIONS.get(operation.name, "write")
        whole = operation.name in _WHOLE or arguments.get("recursive") is True
        decide = decide_tree if whole else decide_file
        return decide(policy, what, _absolute(str(arguments.get("path", ""))))  # type: ignore[arg-type]
    if operation.kind == "network":
        port = arguments.get("port")
        return decide_network(policy, str(arguments.get("host", "")), port if isinstance(port, int) else None)
    if operation.kind == "mcp":
        return decide_mcp(policy, str(arguments.get("server", "")), str(arguments.get("tool", "")))
    return ALLOWED


def _absolute(path: str | None) -> str:
    return WORKSPACE if not path else os.path.join(WORKSPACE, path)


def read_below(workspace: str, path: str) -> str | None:
    """The text of a small file of a workspace, given its path in the sandbox; None when it cannot be had. No link in
    the agent's tree is followed.
    """
    relative = os.path.relpath(os.path.normpath(_absolute(path)), WORKSPACE)
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
