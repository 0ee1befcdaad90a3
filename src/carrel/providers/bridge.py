"""User-mode NAT for sandboxes with a network `bridge`: a `slirp4netns` each, between its namespace and the host's.

Connections of a sandbox leave the host as connections of the user who runs carrel. The host's loopback is blocked and
there is no IPv6. But slirp4netns has no list of forbidden ranges: the sandbox can reach everything else that this user
can reach, including private networks and metadata services, without policy and without logs. That is why an operator
has to enable it. It runs confined by its own mounts and seccomp filter. It watches a pipe whose other end the zygote
holds, so it ends with its sandbox whatever else dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess

from carrel.errors import PlatformError
from carrel.isolation import cgroups, probe
from carrel.providers import foreign_processes
from carrel.providers.base import Handle

RESOLVER = "nameserver 10.0.2.3\n"
"""The text of `/etc/resolv.conf`: slirp4netns forwards queries to the host's resolver."""

DEADLINE_S = 20.0
PATIENCE_S = 5.0
_LOG_SIZE = 4096
_PID, _START = "bridge_pid", "bridge_start_time"


class Bridges:
    """The bridges of a provider."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    async def build(self, network: int, lifeline: int, users: int) -> Handle:
        """Connect a network namespace, and return fields for the handle. The descriptors stay the caller's."""
        loop = asyncio.get_running_loop()
        ready, ready_end = os.pipe()
        log = _bounded_log()
        answered: asyncio.Future[bytes] = loop.create_future()
        process: subprocess.Popen[bytes] | None = None
        try:
            process = _spawn(network, lifeline, users, ready_end, log)
            os.close(ready_end)
            ready_end = -1
            loop.add_reader(ready, lambda: None if answered.done() else answered.set_result(os.read(ready, 8)))
            async with asyncio.timeout(DEADLINE_S):
                if not await answered:
                    raise PlatformError(f"slirp4netns did not start: {_read(log)}")
            self._children[process.pid] = process
            return {_PID: process.pid, _START: cgroups.start_time(process.pid)}
        except BaseException as error:
            if process is not None:
                process.kill()
                process.wait()
            if isinstance(error, TimeoutError):
                raise PlatformError(f"slirp4netns was not ready in time: {_read(log)}") from None
            if isinstance(error, OSError):
                raise PlatformError(f"slirp4netns could not be run: {error}") from error
            raise
        finally:
            loop.remove_reader(ready)
            for descriptor in (ready, log, *((ready_end,) if ready_end >= 0 else ())):
                os.close(descriptor)

    async def gone(self, handle: Handle) -> None:
        """Wait until the bridge of an ended sandbox has ended too, if it had one."""
        pid, start_time = handle.get(_PID), handle.get(_START)
        if isinstance(pid, int) and isinstance(start_time, int):
            try:
                await foreign_processes.end(pid, start_time, patience_s=PATIENCE_S)
            except TimeoutError:
                raise PlatformError(f"the bridge of sandbox {handle['id']} could not be ended") from None
            process = self._children.pop(pid, None)
            if process is not None:
                process.wait()

    def close(self) -> None:
        """Forget the bridges. Those that run end with their sandboxes."""
        for process in self._children.values():
            if process.poll() is None:
                process.returncode = 0  # keeps subprocess from waiting for it
        self._children.clear()


def _spawn(network: int, lifeline: int, users: int, ready: int, log: int) -> subprocess.Popen[bytes]:
    command = [
        "slirp4netns",
        "--configure",
        "--mtu=65520",
        "--disable-host-loopback",
        "--enable-sandbox",
        "--enable-seccomp",
        f"--exit-fd={lifeline}",
        f"--ready-fd={ready}",
        "--netns-type=path",
        f"/proc/self/fd/{network}",
        "tap0",
    ]
    if os.geteuid() != 0:  # root of the zygote's user namespace may enter the sandbox's namespaces and confine itself
        command = ["nsenter", "--preserve-credentials", f"--user=/proc/self/fd/{users}", "--", *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[network, lifeline, users, ready],
        env={"PATH": os.pathsep.join(probe.PATH), "LANG": "C.UTF-8"},
        cwd="/",
        start_new_session=True,
    )


def _bounded_log() -> int:
    """Return a file in memory of a fixed size: a sandbox can make slirp4netns log forever."""
    log = os.memfd_create("slirp4netns", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(log, _LOG_SIZE)
    fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return log


def _read(log: int) -> str:
    words = os.pread(log, _LOG_SIZE, 0).rstrip(b"\0").decode(errors="replace")
    return "; ".join(line for line in words.splitlines()[-5:] if line.strip()) or "no reason given"
