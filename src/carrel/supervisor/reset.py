"""Resets a sandbox between two calls that must not affect one another.

The first request records the state of the sandbox. Every later one kills all commands, removes added files, and reports
whether everything else is unchanged. Changed files are not repaired: then the sandbox must not be used again. The check
uses only what the supervisor itself sees, nothing that a process of the agent reports.
"""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carrel.errors import CarrelError, Unsupported
from carrel.primitives import libc
from carrel.primitives.backoff import Backoff
from carrel.primitives.trees import remove_live_tree
from carrel.supervisor.commands import Commands
from carrel.supervisor.conditions import Conditions, conditions
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, Json, json_response
from carrel.supervisor.load import SandboxLoad
from carrel.supervisor.python.calls import Python
from carrel.supervisor.python.cells import CodeContexts

PLACES = ("/tmp", "/dev/shm")
"""Directories that every process may write, besides the workspace and the home. `/var/tmp` is a link to the first."""
MOST_KEPT = 2000
"""How many files and directories a new sandbox may have."""
TIME_S = 2.0
"""How long a reset may take. A new sandbox is faster than a longer reset."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BREATH = 256


class _Changed(Exception):
    """Something in the sandbox was changed."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A file or directory of the recorded state. A file that was changed has another `stamp`."""

    stamp: tuple[int, ...]
    attributes: tuple[str, ...]
    times: tuple[int, int]
    below: dict[bytes, _Recorded] | None


class Reset:
    """`/empty`."""

    def __init__(
        self,
        commands: Commands,
        contexts: CodeContexts,
        python: Python,
        load: Callable[[], SandboxLoad],
    ):
        self._commands = commands
        self._contexts = contexts
        self._python = python
        self._load = load
        self._places: Sequence[str] = ()
        self._kept: list[tuple[int, _Recorded]] | None = None
        self._conditions: Conditions | None = None
        self._busy = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def configure(self, places: Sequence[str]) -> None:
        """Set the directories to reset. Without any, a reset is refused."""
        self._places = places

    def routes(self, router: HttpRouter) -> None:
        router.add("POST", "/empty", self._empty)

    async def _empty(self, _request: HttpRequest) -> HttpResponse:
        if not self._places:
            raise Unsupported("a sandbox without isolation cannot be reset, because it uses the host's files")
        async with self._busy:
            reason = self._record_all() if self._kept is None else await self._reset()
        load = self._load()
        if reason is None and load.stopped:
            reason = "a process is stopped"
        answer: Json = {"clean": reason is None, "reason": reason}
        return json_response({**answer, "processes": load.processes, "memory_bytes": load.memory_bytes})

    def _record_all(self) -> str | None:
        """Record the state, as nothing has run yet, and start Python, so that no caller waits for it."""
        # A POSIX message queue outlives its creator and cannot be listed here, so none may be created.
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
        self._conditions = conditions()
        self._kept = []
        try:
            for place in self._places:
                top = os.open(place, _OPEN)
                self._kept.append((top, _record(top, os.fstat(top), [MOST_KEPT])))
        except (_Changed, OSError) as error:
            return f"its state could not be recorded: {error}"
        task = asyncio.get_running_loop().create_task(self._warm())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def _warm(self) -> None:
        try:
            host = await self._python.host(None)
        except CarrelError:
            return  # the caller gets the error when it uses Python
        host.interpreter.give_back(host)

    async def _reset(self) -> str | None:
        assert self._kept is not None
        try:
            async with asyncio.timeout(TIME_S):
                await self._contexts.close()
                await self._end_commands()
                if conditions() != self._conditions:
                    raise _Changed("the limits or the priority of the supervisor were changed")
                _remove_shared_memory()
                for top, kept in self._kept:
                    os.fchmod(top, stat.S_IMODE(kept.stamp[0]))
                    # Opened again: btrfs lists only entries that existed when the descriptor was opened.
                    handle = os.open(".", _OPEN, dir_fd=top)
                    try:
                        await _restore(handle, kept)
                    finally:
                        os.close(handle)
        except TimeoutError:
            return "it took too long"
        except (_Changed, OSError) as error:
            return str(error)
        return None if len(self._kept) == len(self._places) else "its state was not recorded when it was new"

    async def _end_commands(self) -> None:
        for command in self._commands.all():
            self._commands.forget(command)
        backoff = Backoff(0.0005, 0.02)
        while self._commands.left_behind:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(backoff.next_pause())


def _record(handle: int, status: os.stat_result, left: list[int]) -> _Recorded:
    below: dict[bytes, _Recorded] = {}
    with os.scandir(handle) as found:
        names = [os.fsencode(entry.name) for entry in found]
    for name in names:
        left[0] -= 1
        if left[0] < 0:
            raise _Changed(f"there are more than {MOST_KEPT} files")
        inner = os.stat(name, dir_fd=handle, follow_symlinks=False)
        if stat.S_ISDIR(inner.st_mode):
            child = os.open(name, _OPEN, dir_fd=handle)
            try:
                below[name] = _record(child, inner, left)
            finally:
                os.close(child)
        else:
            below[name] = _Recorded(_stamp(inner), (), (0, 0), None)
    return _Recorded(_stamp(status), tuple(os.listxattr(handle)), (status.st_atime_ns, status.st_mtime_ns), below)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    stamp = (status.st_mode, status.st_uid, status.st_gid, status.st_ino)
    return stamp if stat.S_ISDIR(status.st_mode) else (*stamp, status.st_size, status.st_nlink, status.st_ctime_ns)


async def _restore(handle: int, kept: _Recorded) -> None:
    """Remove added entries from an open directory. Raises `_Changed` when a recorded entry is different."""
    assert kept.below is not None
    for attribute in set(os.listxattr(handle)).difference(kept.attributes):
        os.removexattr(handle, attribute)
    await _remove_others(handle, kept.below)
    for name, each in kept.below.items():
        status = os.stat(name, dir_fd=handle, follow_symlinks=False)
        if _stamp(status) != each.stamp:
            raise _Changed(f"{os.fsdecode(name)} was changed")
        if each.below is not None:
            child = os.open(name, _OPEN, dir_fd=handle)
            try:
                await _restore(child, each)
            finally:
                os.close(child)
    os.utime(handle, ns=kept.times)


async def _remove_others(handle: int, kept: dict[bytes, _Recorded]) -> None:
    more = True
    while more:  # removing entries while a directory is read may hide others from the reader
        more = False
        with os.scandir(handle) as found:
            for number, entry in enumerate(found, 1):
                if number % _BREATH == 0:
                    await asyncio.sleep(0)
                name = os.fsencode(entry.name)
                if name in kept:
                    continue
                more = True
                if entry.is_dir(follow_symlinks=False):
                    await remove_live_tree(handle, name)
                else:
                    os.unlink(name, dir_fd=handle)


def _remove_shared_memory() -> None:
    """Remove what System V calls left: it belongs to no process, and has no name in a file system."""
    for kind in ("shm", "msg", "sem"):
        try:
            with open(f"/proc/sysvipc/{kind}", "rb") as file:
                lines = file.readlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without them
        for line in lines:
            try:
                libc.remove_ipc(kind, int(line.split()[1]))
            except OSError as error:
                raise _Changed(f"a {kind} of System V could not be removed: {error.strerror}") from None
