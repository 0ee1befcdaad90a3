"""Warm interpreters and their hosts, as the supervisor has them: started on first use, taken for one call at a time,
replaced when they die or when what is installed changes, ended when nobody has used them for long.

Knows the protocol of `warm` and nothing of what is run.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from carrel.errors import CarrelError, Conflict, LimitExceeded
from carrel.supervisor.commands import Commands
from carrel.supervisor.conditions import Conditions, conditions
from carrel.supervisor.python import warm
from carrel.supervisor.reaper import Program, Reaper, Stdio, doomed, memory_file, resume

READY = 2
"""How many hosts are kept ready: while one ends a call and prepares the next, another has its turn."""
MOST_READY = 8
START_S = 60.0
ATTEMPTS = 3
REST_S = 600.0
ROOM_S, LOOK_S = 5.0, 0.02
"""How long a call waits when no process more can be started, and how often it looks: what was killed, such as the last
of a fork bomb, needs a moment to be gone.
"""
MOST_SAID = 4096


class Host(Reaper):
    """A process that has one spare ready for a call, and waits for what the call leaves behind."""

    def __init__(self, interpreter: Interpreter, ours: socket.socket):
        self.interpreter = interpreter
        self.socket = ours
        self.pid = 0
        self.spare = 0
        self.on_event = interpreter.on_host
        self.watcher: Callable[[Reaper, str, int], None] = interpreter.commands.on_reaper

    def run(self, order: dict[str, Any], directory: int, stdio: Stdio, *more: int) -> None:
        """Give the spare its work; `OSError` when it is gone."""
        memory = memory_file(json.dumps(order).encode())
        try:
            socket.send_fds(self.socket, [b"run"], [memory, directory, *stdio, *more])
        finally:
            os.close(memory)

    def fit(self) -> bool:
        """Whether a call can be had of it that has nothing of what ran before; goes on if it was stopped."""
        for pid in (self.pid, self.spare):
            resume(pid)
        if doomed(self.pid) or doomed(self.spare):
            return False  # code that killed all it could killed it too: its end is on the way to be heard of
        if conditions(self.spare) != self.interpreter.conditions:
            self.interpreter.dismiss(self)
            return False
        return True

    def prepare(self) -> None:
        """Ask for the next spare."""
        try:
            self.socket.send(b"prepare")
        except OSError:
            pass  # its end is on the way to be heard of

    def close(self) -> None:
        """End the host; the spare ends by itself when the socket does."""
        if self.pid:
            super().close()
        else:
            self.socket.close()

    def gone(self) -> None:
        """See `Reaper`."""
        self.interpreter.lost(self)


class Interpreter(Reaper):
    """One warm interpreter and its hosts."""

    def __init__(
        self,
        commands: Commands,
        python: str,
        script: str,
        env: dict[str, str],
        imports: list[str],
        on_gone: Callable[[], None],
    ):
        self.commands = commands
        self.on_event = commands.on_reaper
        self.python = python
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self.hosts: set[Host] = set()
        self._ready: deque[Host] = deque()
        self._waiting: deque[asyncio.Future[Host]] = deque()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._watched: dict[str, int | None] = {}
        self.conditions: Conditions | None = None
        """What it was ready with: modules that it imports may have changed something, and nobody else."""
        self._rest: asyncio.TimerHandle | None = None
        self.retired = False
        self._said = os.memfd_create("said", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        options = json.dumps({"imports": imports})
        argv = (python, "-c", warm.RUN % (script, script), script, options)
        try:
            self.pid = commands.spawn(Program(argv, env, (theirs.fileno(), null, self._said)), root)
        except OSError as error:
            ours.close()
            os.close(self._said)
            if error.errno in {errno.EAGAIN, errno.ENOMEM}:
                raise _no_room(error.errno) from None
            raise Conflict(
                f"{python} cannot be started: {error.strerror}",
                field="env",
                hint="repair the environment, or name another",
            ) from None
        finally:
            theirs.close()
            os.close(null)
            os.close(root)
        ours.setblocking(False)
        self.socket = ours
        commands.adopt(self)

    # being asked

    @property
    def greeted(self) -> bool:
        """Whether it ever was ready."""
        return self._hello.done() and self._hello.exception() is None

    async def take(self) -> Host:
        """A host with a spare that waits for work. The caller gives it some before it waits for anything."""
        if not self._hello.done():
            await asyncio.wait_for(asyncio.shield(self._hello), START_S)
        self._hello.result()
        room_until = self._loop.time() + ROOM_S
        while True:
            for host in list(self._ready):
                host.on_readable()  # it may have died just now
            self._rest_later()
            while self._ready:
                host = self._ready.popleft()
                if host.fit():
                    return host
            if self.retired:
                raise Conflict(f"{self.python} was ended", hint="call again")
            try:
                if (host := await self._next()).fit():  # what ran there before may have changed it as well
                    return host
            except LimitExceeded:
                if self._loop.time() > room_until:
                    raise
                await asyncio.sleep(LOOK_S)
                continue
            if self.stale():
                raise Conflict(f"{self.python} was changed", hint="call again")

    async def _next(self) -> Host:
        """The host that is ready next."""
        future: asyncio.Future[Host] = self._loop.create_future()
        self._waiting.append(future)
        self.grow()
        try:
            return await asyncio.wait_for(asyncio.shield(future), START_S)
        except (asyncio.CancelledError, TimeoutError):
            if not future.cancel() and future.exception() is None:
                self._offer(future.result())
            raise

    def give_back(self, host: Host) -> None:
        """A host that was taken and got no work."""
        if host.spare:
            self._offer(host)

    def stale(self) -> bool:
        """Whether something was installed or removed since it started, or its conditions are not what they were."""
        resume(self.pid)
        if any(_stamp(folder) != stamp for folder, stamp in self._watched.items()):
            return True
        return self.greeted and conditions(self.pid) != self.conditions

    def grow(self) -> None:
        """Ask for one host more."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        host = Host(self, ours)
        try:
            socket.send_fds(self.socket, [b"host"], [theirs.fileno()])
        except OSError:
            ours.close()
            return  # the interpreter is gone: whoever waits is told of that
        finally:
            theirs.close()
        self.hosts.add(host)
        self._loop.add_reader(ours, host.on_readable)

    def retire(self) -> None:
        """Take no more calls; end as soon as those under way have ended."""
        self.retired = True
        if self._rest is not None:
            self._rest.cancel()
        for host in list(self._ready):
            self.dismiss(host)
        self._ready.clear()
        self.commands.disown(self)

    # hearing

    def on_readable(self) -> None:
        """See `Reaper`: the only thing an interpreter ever says is that it is ready."""
        try:
            message = self.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        try:
            told = json.loads(message)["watch"]
        except (ValueError, KeyError, TypeError):
            self.commands.on_reaper(self, "dead", 0)
            return
        self._watched = {folder: _stamp(folder) for folder in told if isinstance(folder, str)}
        self.conditions = conditions(self.pid)
        if not self._hello.done():
            self._hello.set_result(None)

    def gone(self) -> None:
        """See `Reaper`. Its hosts go on as long as they have a call."""
        error = Conflict(
            f"{self.python} does not start or was ended: {self._words()}", hint="call again; repair the environment"
        )
        if not self._hello.done():
            self._hello.set_exception(error)
            self._hello.exception()  # nobody may be waiting
        self._refuse(error)
        for host in [host for host in self.hosts if host.pid == 0 or host in self._ready]:
            self.dismiss(host)
        self._ready.clear()
        self.retired = True
        if self._rest is not None:
            self._rest.cancel()
        os.close(self._said)
        self._on_gone()

    def _words(self) -> str:
        size = os.fstat(self._said).st_size
        said = os.pread(self._said, MOST_SAID, max(0, size - MOST_SAID)).decode(errors="replace").strip()
        return said.splitlines()[-1] if said else "it said nothing"

    def on_host(self, reaper: Reaper, event: str, value: int) -> None:
        """What a host tells."""
        assert isinstance(reaper, Host)
        if event == "hello":
            reaper.pid = value
            self._loop.remove_reader(reaper.socket)
            self.commands.adopt(reaper)
            reaper.prepare()
        elif event == "spare":
            reaper.spare = value
            self._offer(reaper)
        elif event == "failed":
            self._refuse(_no_room(value))
            self.dismiss(reaper)
        elif event == "dead" and reaper.pid == 0:
            self.dismiss(reaper)
        else:
            reaper.watcher(reaper, event, value)
            if event == "ended":
                reaper.spare = 0
                if reaper in self._ready:
                    self._ready.remove(reaper)
                elif len(self.hosts) < READY and not self.retired:
                    self.grow()
            elif event == "clean":
                reaper.watcher = self.commands.on_reaper
                if self.retired:
                    self.dismiss(reaper)
                else:
                    reaper.prepare()

    def _offer(self, host: Host) -> None:
        if self.retired:  # while it was getting ready
            self.dismiss(host)
            return
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(host)
                return
        self._ready.append(host)
        if len(self._ready) > MOST_READY:
            self.dismiss(self._ready.popleft())

    def _refuse(self, error: CarrelError) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    # ending

    def dismiss(self, host: Host) -> None:
        """End a host that has no call."""
        if host.pid:
            self.commands.disown(host)
        else:
            self._loop.remove_reader(host.socket)
            host.close()
            self.lost(host)

    def lost(self, host: Host) -> None:
        """A host has ended."""
        self.hosts.discard(host)
        host.spare = 0
        if host in self._ready:
            self._ready.remove(host)
        if self._waiting and not self.retired:
            self.grow()

    def _rest_later(self) -> None:
        if self.retired:
            return
        if self._rest is not None:
            self._rest.cancel()
        self._rest = self._loop.call_later(REST_S, self._end_resting)

    def _end_resting(self) -> None:
        if len(self._ready) == len(self.hosts):
            self.retire()
        else:
            self._rest_later()


class Interpreters:
    """The warm interpreters of a sandbox, by the path of their Python."""

    def __init__(self, commands: Commands, script: str):
        self._commands = commands
        self._script = script
        self._by_python: dict[str, Interpreter] = {}
        self.imports: Callable[[str], list[str]] = imports_of
        """What an interpreter imports before code comes."""

    async def host(self, python: str, env: dict[str, str]) -> Host:
        """A host of this Python, which is started if need be."""
        for attempt in range(ATTEMPTS):
            known = self._by_python.get(python)
            if known is not None and known.stale():
                known.retire()
            known = await self._started(python, env)
            try:
                return await known.take()
            except TimeoutError:
                known.retire()
                raise Conflict(
                    f"{python} was not ready within {START_S:.0f} seconds", hint="give the sandbox more CPU or memory"
                ) from None
            except Conflict:  # ended in the meantime, by an agent's process or for something newly installed
                if not known.greeted or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _started(self, python: str, env: dict[str, str]) -> Interpreter:
        """The interpreter that is there by now, or another; waits where no process more can be started."""
        loop = asyncio.get_running_loop()
        room_until = loop.time() + ROOM_S
        while (known := self._by_python.get(python)) is None:
            try:
                return self._start(python, env)
            except LimitExceeded:
                if loop.time() > room_until:
                    raise
                await asyncio.sleep(LOOK_S)
        return known

    def _start(self, python: str, env: dict[str, str]) -> Interpreter:
        interpreter = Interpreter(
            self._commands,
            python,
            self._script,
            env,
            self.imports(python),
            lambda: self._forget(python, interpreter),
        )
        self._by_python[python] = interpreter
        return interpreter

    def retire(self, *pythons: str) -> None:
        """Let these take no more calls: what they start with has changed."""
        for python in pythons:
            if (interpreter := self._by_python.pop(python, None)) is not None:
                interpreter.retire()

    def _forget(self, python: str, interpreter: Interpreter) -> None:
        if self._by_python.get(python) is interpreter:
            del self._by_python[python]


def _no_room(code: int) -> LimitExceeded:
    why = f"no process more can be started in this sandbox: {os.strerror(code)}"
    return LimitExceeded(why, hint="wait for something to end, or end it")


def imports_of(python: str) -> list[str]:
    """The modules that the environment of a Python wants to have imported."""
    try:
        with open(os.path.join(os.path.dirname(os.path.dirname(python)), "carrel-env.json"), "rb") as file:
            listed = json.loads(file.read(1 << 20)).get("imports", [])
    except (OSError, ValueError, AttributeError):
        return []
    return modules(listed)


def modules(listed: object) -> list[str]:
    """The names of modules in what may be anything."""
    found = listed if isinstance(listed, list) else []
    return [name for name in found if isinstance(name, str) and name.replace(".", "").isidentifier()][:64]


def _stamp(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None
