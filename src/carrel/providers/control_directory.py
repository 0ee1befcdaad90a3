"""The directory that the server shares with a supervisor that is a program of its own.

The supervisor connects to a socket of the server there, gets its facts over that connection when the sandbox has an
owner, and says over it that it is ready. Then it listens for the server. For all that it is root of the sandbox, and
only root can enter the inner directory; later it is the agent, who cannot. The socket of the outbound
network is in the outer directory: the agent may connect to it, as it may to the port of the proxy, and cannot replace
it. So the socket is the identity of the sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import socket
import struct
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from carrel.errors import PlatformError
from carrel.isolation.budgets import LIMITS
from carrel.isolation.inside import CONTROL, HOME, PROXY_PORT, WORKSPACE
from carrel.isolation.sandbox import OPEN_FILES
from carrel.models import Network
from carrel.primitives.trees import remove_tree
from carrel.providers.base import Launch

LONGEST_SOCKET_PATH = 107
MOST_FACTS = 1024 * 1024
START_DEADLINE_S = 60.0
REPORT = f"{CONTROL}/private/report"
"""The path inside of the socket for the supervisor's connection, the argument of `carrel.providers.bundle.command`."""
SECRETS = f"{CONTROL}/private/secrets"
"""Where a provider mounts the secrets a second time, writable; the agent sees them read-only elsewhere."""
_PRIVATE, _SOCKET, _REPORT, _EGRESS = "private", "socket", os.path.basename(REPORT), "egress"
_BACKLOG = 4096
_LONGEST_REPORT = 4096
_CREDENTIALS = struct.Struct("=3i")  # of the process that has connected: PID, user, group


class ControlDirectory:
    """The control directory of one sandbox, on the host."""

    def __init__(self, path: str):
        self.path = path

    @property
    def socket_path(self) -> str:
        """The path on the host of the supervisor's socket."""
        return os.path.join(self.path, _PRIVATE, _SOCKET)

    def create(self) -> None:
        """Make the directory. Raises `PlatformError`. Blocking."""
        if len(os.fsencode(self.socket_path)) > LONGEST_SOCKET_PATH:
            raise PlatformError(
                f"the path of the sandbox's socket is longer than {LONGEST_SOCKET_PATH} bytes: {self.socket_path}",
                hint="use a data directory with a shorter path",
            )
        try:
            os.mkdir(self.path, 0o711)
            os.chmod(self.path, 0o711)  # noqa: S103 - the agent connects to a socket in it
            private = os.path.join(self.path, _PRIVATE)
            os.mkdir(private, 0o700)
            os.mkdir(os.path.join(private, os.path.basename(SECRETS)), 0o700)
        except OSError as error:
            raise PlatformError(f"the control directory of a sandbox cannot be made: {error}") from error

    def listen_for_supervisor(self) -> socket.socket:
        """Return a listening socket for the supervisor's connection. The caller closes it."""
        return _listen(os.path.join(self.path, _PRIVATE, _REPORT), 0o600)

    def listen_for_egress(self) -> socket.socket:
        """Return a new listening socket for outbound connections, in the place of an earlier one of another server.

        Connections that are made meanwhile wait in the supervisor.
        """
        return listen_anew(os.path.join(self.path, _EGRESS), 0o666)

    def remove(self) -> None:
        """Remove the directory. It may be gone already. Blocking."""
        remove_tree(self.path)


def facts_of(
    launch: Launch, *, uid: int, gid: int, secrets: bool, user: str = "", seccomp: bytes = b""
) -> dict[str, Any]:
    """Return the facts of a sandbox for its supervisor. `user` is the name of the agent in its image; `seccomp` is a
    filter of system calls besides that of the runtime.
    """
    image = launch.image
    return {
        "socket": f"{CONTROL}/{_PRIVATE}/{_SOCKET}",
        "egress": f"{CONTROL}/{_EGRESS}",
        "secrets": SECRETS if secrets else "",
        "uid": uid,
        "gid": gid,
        "workspace": WORKSPACE,
        "home": HOME,
        "network": _network(launch.network),
        "proxy_port": PROXY_PORT,
        "env": dict(launch.env),
        "memory_mb": launch.memory_mb,
        "limits": _limits(launch),
        "seccomp": base64.b64encode(seccomp).decode(),
        "trust": launch.trust,
        "image": None
        if image is None
        else {
            "user": user,
            "environment": dict(image.environment),
            "working_directory": image.working_directory,
        },
    }


def _limits(launch: Launch) -> dict[str, int]:
    """Return the resource limits by their names. The kernel counts processes per user, whom other sandboxes share."""
    names = {number: name for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    limits = {names[number]: value for number, value in LIMITS.items()} | {"RLIMIT_NOFILE": OPEN_FILES}
    return limits if launch.disk_mb is None else limits | {"RLIMIT_FSIZE": launch.disk_mb << 20}


def _network(network: Network) -> str:
    if network is Network.NONE:
        return "none"
    return "allowlist" if network.proxied else "direct"


@dataclass(frozen=True)
class WaitingSupervisor:
    """A supervisor that has started and waits for its facts. It ends if this connection ends before it has them."""

    connection: socket.socket

    @property
    def pid(self) -> int:
        """The process that has connected, as this process sees it; 0 if it cannot see it."""
        credentials = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0])

    async def begin(self, facts: Mapping[str, Any]) -> None:
        """Send the facts, and wait until it is ready for the sandbox's owner. Raises `PlatformError`."""
        text = json.dumps(facts).encode()
        if len(text) > MOST_FACTS:
            raise PlatformError("the request to start a sandbox is too large", hint="pass a smaller environment")
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                said = await self._exchange(text)
        except TimeoutError:
            said = f"it did not answer in {START_DEADLINE_S:.0f} s"
        except OSError as error:
            said = f"it ended: {error}"
        if said != "ready":
            raise PlatformError(
                f"the supervisor did not start: {said.removeprefix('failed: ')[:1000] or 'it ended at once'}"
            )

    async def _exchange(self, text: bytes) -> str:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.connection, text)
        self.connection.shutdown(socket.SHUT_WR)
        said = bytearray()
        while len(said) < _LONGEST_REPORT and (part := await loop.sock_recv(self.connection, _LONGEST_REPORT)):
            said += part
        return said.decode(errors="replace")

    def close(self) -> None:
        """End the connection. A supervisor that has no facts yet ends too."""
        self.connection.close()


async def waiting_supervisor(
    listener: socket.socket, ended: Awaitable[str], deadline_s: float = START_DEADLINE_S
) -> WaitingSupervisor:
    """Wait until the supervisor connects. `ended` tells why it has ended, if it ends before. Raises `PlatformError`."""
    listener.setblocking(False)
    connecting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
    end = asyncio.ensure_future(ended)
    try:
        await asyncio.wait((connecting, end), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            said = end.result() if end.done() else f"it did not connect in {deadline_s:.0f} s"
            raise PlatformError(f"the supervisor did not start: {said[:1000] or 'it ended at once'}")
        connection, _ = connecting.result()
    except asyncio.CancelledError:
        if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
            connecting.result()[0].close()
        raise
    finally:
        for task in (connecting, end):
            task.cancel()
        await asyncio.gather(connecting, end, return_exceptions=True)
    connection.setblocking(False)
    return WaitingSupervisor(connection)


def listen_anew(path: str, mode: int) -> socket.socket:
    """Return a new listening socket in the place of an earlier one. Raises `PlatformError` or `OSError`. Blocking."""
    fresh = _listen(f"{path}.new", mode)
    try:
        os.rename(f"{path}.new", path)
    except OSError:
        fresh.close()
        raise
    return fresh


def _listen(path: str, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if os.path.lexists(path):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PlatformError(f"a socket of a sandbox cannot be made: {error}") from error
    return listener
