"""The few milliseconds in which a forked child of the zygote becomes PID 1 of a sandbox.

Order matters: first what needs privilege, then every privilege is given up, then the supervisor runs. Agent code
starts long after the last line here. A failure at any step ends the child; nothing is skipped.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from dataclasses import dataclass, field

from carrel.isolation import landlock, linux, rootfs, seccomp

BASE = "/base"
OPEN_FILES = 8192


@dataclass(frozen=True)
class Spec:
    """What the control plane asks of a new sandbox."""

    id: str
    workspace: str
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    processes: int | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Born:
    """What the supervisor gets to know of the sandbox it runs in."""

    id: str
    listener: socket.socket
    workspace: str
    home: str
    env: dict[str, str]
    isolated: bool
    memory_mb: int | None
    oom_score_fd: int


def enter(spec: Spec, orders: socket.socket, program: bytes, *, root: bool) -> None:
    """Become PID 1 of a sandbox: called in the child, right after the fork, in its new namespaces.

    The parent sends two orders: `mapped`, with the workspace as a detached mount, and `go`, when the limits are set.
    """
    linux.bring_up_loopback()
    socket.sethostname("carrel")
    word, fds, _flags, _address = socket.recv_fds(orders, 16, 1)
    if word != b"mapped" or len(fds) != 1:
        raise OSError(f"the zygote gave up: {word!r}")
    if root:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    # Its own copy of the base root: what came from the zygote's namespace is locked and cannot be pivoted into.
    linux.mount(BASE, BASE, None, linux.MS_BIND | linux.MS_REC)
    rootfs.carry_out(rootfs.private_plan(spec.memory_mb), BASE, workspace_fd=fds[0], owner=rootfs.SANDBOX_UID)
    os.close(fds[0])
    linux.pivot_into(BASE)
    if orders.recv(16) != b"go":
        raise OSError("the zygote gave up before the limits were set")
    _limit(spec)
    if root:
        os.setresgid(rootfs.SANDBOX_UID, rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
        os.setresuid(rootfs.SANDBOX_UID, rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
    else:
        linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if landlock.abi() > 0:
        landlock.restrict(read=["/"], write=rootfs.WRITABLE)
    seccomp.install(program)


def give_up_reach() -> int:
    """Make this process unreachable for those it will start; a descriptor that still sets its own OOM score."""
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # the owner of /proc/self follows it
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    return descriptor


def _limit(spec: Spec) -> None:
    linux.lower_limit(resource.RLIMIT_CORE, 0)
    linux.lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    if spec.processes is not None:
        linux.lower_limit(resource.RLIMIT_NPROC, spec.processes)
    if spec.disk_mb is not None:
        linux.lower_limit(resource.RLIMIT_FSIZE, spec.disk_mb * 1024 * 1024)


def forget_signals() -> None:
    """PID 1 gets only the signals it has handlers for: so it must have none of the zygote's."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
