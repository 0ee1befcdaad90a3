"""The supervisor's side of warm interpreters and their hosts: started on first use, used for one call at a time,
replaced when they die or when the installed packages change, ended when they were not used for long.

Knows the protocol of `warm`, and nothing about the code that runs.
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
from carrel.supervisor.reaper import ProgramStart, Reaper, Stdio, is_ending, memory_file, resume

READY = 2
"""How many hosts are kept: while one finishes a call and prepares the next spare, another is used."""
MOST_READY = 8
START_S = 60.0
ATTEMPTS = 3
REST_S = 600.0
ROOM_S, LOOK_S = 5.0, 0.02
"""How long a call waits when no more processes can be started, and how often it tries: killed processes, such as the
rest of a fork bomb, need a moment to disappear.
"""
MOST_SAID = 4096


class PythonHost(Reaper):
    """A process that keeps one spare ready for a call, and waits for the processes that the call leaves behind."""

    def __init__(self, interpreter: Interpreter, ours: socket.socket):
        self.interpreter = interpreter
        self.socket = ours
        self.pid = 0
        self.spare = 0
        self.on_event = interpreter.on_host
        self.watcher: Callable[[Reaper, str, int], None] = interpreter.commands.on_reaper

    def run(self, order: dict[str, Any], directory: int, stdio: Stdio, *more: int) -> None:
        """Give work to the spare. Raises `OSError` when it is gone."""
        memory = memory_file(json.dumps(order).encode())
        try:
            socket.send_fds(self.socket, [b"run"], [memory, directory, *stdio, *more])
        finally:
            os.close(memory)

    def is_usable(self) -> bool:
        """Whether the spare can run a call that no earlier code has affected. Continues it if it was stopped."""
        for pid in (self.pid, self.spare):
            resume(pid)
        if is_ending(self.pid) or is_ending(self.spare):
            return False  # killed by some code; the event of its end is still on the way
        if conditions(self.spare) != self.interpreter.conditions:
            self.interpreter.dismiss(self)
            return False
        return True

    def prepare(self) -> None:
        try:
            self.socket.send(b"prepare")
        except OSError:
            pass  # the event of its end is still on the way

    def close(self) -> None:
        """Kill the host. The spare exits by itself when the socket is closed."""
        if self.pid:
            super().close()
        else:
            self.socket.close()

    def gone(self) -> None:
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
        self.hosts: set[PythonHost] = set()
        self._ready: deque[PythonHost] = deque()
        self._waiting: deque[asyncio.Future[PythonHost]] = deque()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._watched: dict[str, int | None] = {}
        self.conditions: Conditions | None = None
        """Its conditions when it was ready. Until then only the modules that it imports could change them."""
        self._rest: asyncio.TimerHandle | None = None
        self.retired = False
        self._said = os.memfd_create("said", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        options = json.dumps({"imports": imports})
        argv = (python, "-c", warm.RUN % (script, script), script, options)
        try:
            self.pid = commands.spawn(ProgramStart(argv, env, (theirs.fileno(), null, self._said)), root)
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
        """Whether it has ever been ready."""
        return self._hello.done() and self._hello.exception() is None

    async def take(self) -> PythonHost:
        """Return a host whose spare waits for work. The caller must give it work before it awaits anything."""
        if not self._hello.done():
            await asyncio.wait_for(asyncio.shield(self._hello), START_S)
        self._hello.result()
        room_until = self._loop.time() + ROOM_S
        while True:
            for host in list(self._ready):
                host.on_readable()  # it may just have died
            self._rest_later()
            while self._ready:
                host = self._ready.popleft()
                if host.is_usable():
                    return host
            if self.retired:
                raise Conflict(f"{self.python} was ended", hint="call again")
            try:
                if (host := await self._next()).is_usable():  # earlier code may have changed it too
                    return host
            except LimitExceeded:
                if self._loop.time() > room_until:
                    raise
                await asyncio.sleep(LOOK_S)
                continue
            if self.stale():
                raise Conflict(f"{self.python} was changed", hint="call again")

    async def _next(self) -> PythonHost:
        """Wait for the next host that is ready."""
        future: asyncio.Future[PythonHost] = self._loop.create_future()
        self._waiting.append(future)
        self.request_host()
        try:
            return await asyncio.wait_for(asyncio.shield(future), START_S)
        except (asyncio.CancelledError, TimeoutError):
            if not future.cancel() and future.exception() is None:
                self._offer(future.result())
            raise

    def give_back(self, host: PythonHost) -> None:
        """Return a host that was taken and got no work."""
        if host.spare:
            self._offer(host)

    def stale(self) -> bool:
        """Whether packages were installed or removed since it started, or its conditions were changed."""
        resume(self.pid)
        if any(_stamp(folder) != stamp for folder, stamp in self._watched.items()):
            return True
        return self.greeted and conditions(self.pid) != self.conditions

    def request_host(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        host = PythonHost(self, ours)
        try:
            socket.send_fds(self.socket, [b"host"], [theirs.fileno()])
        except OSError:
            ours.close()
            return  # the interpreter is gone; `gone` fails the waiting calls
        finally:
            theirs.close()
        self.hosts.add(host)
        self._loop.add_reader(ours, host.on_readable)

    def retire(self) -> None:
        """Accept no more calls, and end when the current ones have ended."""
        self.retired = True
        if self._rest is not None:
            self._rest.cancel()
        for host in list(self._ready):
            self.dismiss(host)
        self._ready.clear()
        self.commands.disown(self)

    # hearing

    def on_readable(self) -> None:
        """See `Reaper`. The only message of an interpreter is that it is ready."""
        try:
            message = self.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        try:
            folders = json.loads(message)["watch"]
        except (ValueError, KeyError, TypeError):
            self.commands.on_reaper(self, "dead", 0)
            return
        self._watched = {folder: _stamp(folder) for folder in folders if isinstance(folder, str)}
        self.conditions = conditions(self.pid)
        if not self._hello.done():
            self._hello.set_result(None)

    def gone(self) -> None:
        """See `Reaper`. Hosts with a call keep running."""
        error = Conflict(
            f"{self.python} does not start or was ended: {self._words()}", hint="call again; repair the environment"
        )
        if not self._hello.done():
            self._hello.set_exception(error)
            self._hello.exception()  # marks it as retrieved: perhaps nobody waits
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
        return said.splitlines()[-1] if said else "it printed nothing"

    def on_host(self, reaper: Reaper, event: str, value: int) -> None:
        assert isinstance(reaper, PythonHost)
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
                    self.request_host()
            elif event == "clean":
                reaper.watcher = self.commands.on_reaper
                if self.retired:
                    self.dismiss(reaper)
                else:
                    reaper.prepare()

    def _offer(self, host: PythonHost) -> None:
        if self.retired:  # since the host was requested
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

    def dismiss(self, host: PythonHost) -> None:
        if host.pid:
            self.commands.disown(host)
        else:
            self._loop.remove_reader(host.socket)
            host.close()
            self.lost(host)

    def lost(self, host: PythonHost) -> None:
        self.hosts.discard(host)
        host.spare = 0
        if host in self._ready:
            self._ready.remove(host)
        if self._waiting and not self.retired:
            self.request_host()

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

    def __init__(self, commands: Commands, script: str, imports: Callable[[str], list[str]]):
        """`imports` returns the modules that the interpreter at a path imports in advance."""
        self._commands = commands
        self._script = script
        self._imports = imports
        self._by_python: dict[str, Interpreter] = {}

    async def host(self, python: str, env: dict[str, str]) -> PythonHost:
        """Return a host of this Python, starting the interpreter if necessary."""
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
            except Conflict:  # ended meanwhile, by a process of the agent or because packages were installed
                if not known.greeted or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _started(self, python: str, env: dict[str, str]) -> Interpreter:
        """Return the interpreter, or start one. Waits while no more processes can be started."""
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
            self._imports(python),
            lambda: self._forget(python, interpreter),
        )
        self._by_python[python] = interpreter
        return interpreter

    def retire(self, *pythons: str) -> None:
        """Retire these interpreters, because their modules or variables have changed."""
        for python in pythons:
            if (interpreter := self._by_python.pop(python, None)) is not None:
                interpreter.retire()

    def _forget(self, python: str, interpreter: Interpreter) -> None:
        if self._by_python.get(python) is interpreter:
            del self._by_python[python]


def _no_room(code: int) -> LimitExceeded:
    why = f"this sandbox cannot start another process: {os.strerror(code)}"
    return LimitExceeded(why, hint="wait for something to end, or end it")


def imports_of(python: str) -> list[str]:
    """Return the modules that an environment wants to have imported in advance."""
    try:
        with open(os.path.join(os.path.dirname(os.path.dirname(python)), "carrel-env.json"), "rb") as file:
            listed = json.loads(file.read(1 << 20)).get("imports", [])
    except (OSError, ValueError, AttributeError):
        return []
    return modules(listed)


def modules(listed: object) -> list[str]:
    """Return the valid module names in a value that may be anything."""
    found = listed if isinstance(listed, list) else []
    return [name for name in found if isinstance(name, str) and name.replace(".", "").isidentifier()][:64]


def _stamp(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None
