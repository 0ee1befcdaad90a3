"""The outbound connections of sandboxes on other machines, on the side of the server; see also
`carrel.supervisor.egress_lines`.

The proxy accepts the connections of each sandbox at a socket of its own, which is its identity. Here that is a Unix
socket of this machine. The server opens lines to the supervisor, which has one ID that only it can prove, and connects
whatever stream comes over them to that socket. Nothing of a stream is read here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Coroutine
from contextlib import suppress

from carrel.errors import CarrelError, PlatformError
from carrel.primitives import tasks
from carrel.primitives.backoff import Backoff
from carrel.primitives.relay_line import RelayLine
from carrel.primitives.trees import remove_tree
from carrel.primitives.unix_sockets import connect, short
from carrel.providers.control_directory import listen_anew
from carrel.providers.links import SupervisorLink

log = logging.getLogger("carrel.egress")

MOST_LINES = 256
"""Connections of a sandbox at a time; more wait in its supervisor."""
MOST_IDLE = 8
"""How many idle lines are kept after a burst."""
MOST_DIALS = 8
PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0


class WaysOut:
    """The ways out of the sandboxes of one provider. `folder` has their sockets. For one event loop."""

    def __init__(self, folder: str):
        self._folder = folder
        self._open: dict[str, WayOut] = {}

    async def open(self, sandbox: str, link: SupervisorLink) -> int:
        """Return a new listening socket for the connections of a sandbox, in the place of an earlier one of it. The
        caller closes it; when everybody has closed it, the lines end too. Raises `PlatformError`.
        """
        path = os.path.join(self._folder, hashlib.sha256(sandbox.encode()).hexdigest()[:16])
        await self.close(sandbox)
        try:
            listener = await asyncio.to_thread(self._listen, path)
        except OSError as error:
            raise PlatformError(f"the socket of a sandbox's outbound connections cannot be made: {error}") from error
        self._open[sandbox] = WayOut(sandbox, path, link)
        return listener.detach()

    def _listen(self, path: str) -> socket.socket:
        os.makedirs(self._folder, 0o700, exist_ok=True)
        return listen_anew(short(path), 0o600)

    async def close(self, sandbox: str) -> None:
        """End the lines of a sandbox. There may be none."""
        if (way := self._open.pop(sandbox, None)) is not None:
            await way.close()

    async def close_all(self) -> None:
        """End all lines, and remove the folder."""
        for sandbox in list(self._open):
            await self.close(sandbox)
        await asyncio.to_thread(remove_tree, self._folder)


class WayOut:
    """The lines to one supervisor."""

    def __init__(self, sandbox: str, path: str, link: SupervisorLink):
        self._sandbox = sandbox
        self._path = path
        self._link = link
        self._lines: set[RelayLine] = set()
        self._idle: set[RelayLine] = set()
        self._waiting = 0
        self._dialing = 0
        self._changed = asyncio.Event()
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Keep as many idle lines as connections wait, and one more."""
        while not self._ended:
            self._changed.clear()
            wanted = min(1 + self._waiting, MOST_IDLE) - len(self._idle) - self._dialing
            room = min(MOST_LINES - len(self._lines), MOST_DIALS) - self._dialing
            for _ in range(min(wanted, room)):
                self._dialing += 1
                self._start(self._dial())
            await self._changed.wait()

    async def _dial(self) -> None:
        line = RelayLine(self, begins=False)
        try:
            await self._link.connect(lambda: line)
        except (OSError, TimeoutError, CarrelError) as error:
            log.debug("no line to sandbox %s: %s", self._sandbox, error)
            await asyncio.sleep(self._backoff.next_pause())
        else:
            if line.hello():
                self._lines.add(line)
                self._keep(line)
        finally:
            self._dialing -= 1
            self._changed.set()

    # the owner of lines

    def idle(self, line: RelayLine) -> None:
        """Keep it for the next stream, or end it if there are enough."""
        self._backoff.reset()
        self._keep(line)

    def _keep(self, line: RelayLine) -> None:
        if self._ended or len(self._idle) >= MOST_IDLE:
            self._lines.discard(line)
            line.close()
        else:
            self._idle.add(line)

    def begun(self, line: RelayLine, waiting: int) -> None:
        """Connect a stream to the proxy."""
        self._idle.discard(line)
        self._waiting = waiting
        self._start(self._carry(line))
        self._changed.set()

    def lost(self, line: RelayLine) -> None:
        """Have another one, though not at once if this happens again and again."""
        self._idle.discard(line)
        if self._ended:
            self._lines.discard(line)
        elif line in self._lines:
            self._start(self._replace(line))

    async def _replace(self, line: RelayLine) -> None:
        """Make room for another line, after a pause: a sandbox that ends its lines must not keep this server busy."""
        await asyncio.sleep(self._backoff.next_pause())
        self._lines.discard(line)
        self._changed.set()

    async def _carry(self, line: RelayLine) -> None:
        try:
            proxy = await connect(short(self._path), PATIENCE_S)
        except (ConnectionRefusedError, FileNotFoundError):
            # Nobody has the listening socket any more: the sandbox has another server now, or ends.
            self._end()
            return
        except (OSError, TimeoutError):
            line.abort()
            return
        loop = asyncio.get_running_loop()
        with proxy, suppress(OSError, TimeoutError):
            # The transport closes its socket when it likes; this one must stay valid.
            await line.carry(lambda protocol: loop.create_unix_connection(protocol, sock=proxy.dup()))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        self._ended = True
        self._changed.set()
        for line in list(self._lines):
            line.abort()

    async def close(self) -> None:
        """End all lines."""
        self._end()
        await tasks.cancel((self._running, *self._tasks))
        self._end()  # lines that were made meanwhile
        with suppress(FileNotFoundError):
            os.unlink(self._path)
