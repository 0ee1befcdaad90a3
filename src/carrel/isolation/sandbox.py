"""How a forked child of the zygote becomes PID 1 of a sandbox, in two halves: before and after somebody asks for one.

Order matters: first what needs privilege, then every privilege is given up, then the supervisor runs. Agent code
starts long after the last line here. A failure at any step ends the child; nothing is skipped.
"""

from __future__ import annotations

import json
import os
import resource
import socket
from dataclasses import dataclass, field

from carrel.isolation import covers, landlock, linux, rootfs, seccomp

BASE = "/base"
COVERS = "/covers"
OPEN_FILES = 8192
MAX_MESSAGE = 256 * 1024


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
    watched: bool = False
    masked: bool = False


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
    secrets_fd: int


def hatch(orders: socket.socket, *, root: bool) -> int:
    """The first half, before anybody has asked for a sandbox: called in the child, in its new namespaces.

    The parent sends the order `mapped` when the child's user ids are. Returns the descriptor that secrets are written
    through.
    """
    linux.bring_up_loopback()
    socket.sethostname("carrel")
    if orders.recv(16) != b"mapped":
        raise OSError("the zygote gave up")
    if root:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    # Its own copy of the base root: what came from the zygote's namespace is locked and cannot be pivoted into.
    linux.mount(BASE, BASE, None, linux.MS_BIND | linux.MS_REC)
    rootfs.carry_out(rootfs.COMMON_PLAN, BASE, owner=rootfs.SANDBOX_UID)
    return rootfs.turn_read_only(BASE)


def settle(spec: Spec, workspace_fd: int, program: bytes, *, root: bool, order_fd: int = -1) -> None:
    """The second half: take what was asked for, then give up every privilege for good."""
    rootfs.carry_out(rootfs.private_plan(spec.memory_mb), BASE, workspace_fd=workspace_fd, owner=rootfs.SANDBOX_UID)
    if spec.masked:
        covers.pivot_masked(BASE, covers.read(order_fd), COVERS)
    else:
        linux.pivot_into(BASE)
    _limit(spec)
    linux.drop_bounding_set()
    if root:
        os.setresgid(rootfs.SANDBOX_UID, rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
        os.setresuid(rootfs.SANDBOX_UID, rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if landlock.abi() > 0:
        # The secrets too: a rule holds for a directory through every mount of it, and the agent's is read-only.
        landlock.restrict(read=["/"], write=(*rootfs.WRITABLE, rootfs.SECRETS))
    seccomp.install(program)


def receive(orders: socket.socket) -> tuple[Spec, list[int]]:
    """Wait for the request: what is asked for; the listening socket, the workspace and the masks as descriptors."""
    message, fds, _flags, _address = socket.recv_fds(orders, MAX_MESSAGE, 3)
    for descriptor in fds:  # whoever inherits the listening socket can answer in the place of the supervisor
        os.set_inheritable(descriptor, False)
    if not message:
        os._exit(0)  # the zygote has gone; nobody will ask any more
    return Spec(**json.loads(message)), fds


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
    if spec.watched and spec.memory_mb is not None:  # no cgroup holds the sum, so each process is held
        linux.lower_limit(resource.RLIMIT_DATA, spec.memory_mb * 1024 * 1024)
    if spec.disk_mb is not None:
        linux.lower_limit(resource.RLIMIT_FSIZE, spec.disk_mb * 1024 * 1024)
