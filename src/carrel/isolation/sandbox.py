"""How a forked child of the zygote becomes PID 1 of a sandbox, in two halves: before and after somebody asks for one.

Order matters: first what needs privilege, then every privilege is given up, then the supervisor runs. Agent code
starts long after the last line here. A failure at any step ends the child; nothing is skipped.
"""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from carrel.isolation import budgets, landlock, linux, mask_mounts, rootfs, seccomp
from carrel.primitives import libc

BASE = "/base"
COVERS = "/covers"
OPEN_FILES = 8192
MAX_MESSAGE = 256 * 1024
WAY_OUT_PORT = 3128
WAY_OUT_BACKLOG = 4096
WAY_OUT = b"way out"
NETWORK = b"network"
MEMORY = b"memory"


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
    network: str = "none"
    trust: bool = False
    resolver: str = ""


@dataclass
class Born:
    """The facts about its sandbox that the supervisor gets."""

    id: str
    listener: socket.socket
    workspace: str
    home: str
    env: dict[str, str]
    isolated: bool
    memory_mb: int | None
    oom_score_fd: int
    secrets_fd: int
    way_out_port: int | None
    """Where the proxy listens, or in a sandbox without a network the supervisor; None: there is no such port."""
    refusing: socket.socket | None
    """The listening socket at that port, where the supervisor itself has to refuse what comes."""
    trust: bool


def prepare(
    orders: socket.socket,
    *,
    root: bool,
    own_network: bool = True,
    notifications: Mapping[str, int] = MappingProxyType({}),
) -> tuple[int, socket.socket | None]:
    """The first half, before anybody has asked for a sandbox: called in the child, in its new namespaces.

    Without `own_network` it shares the host's, over which it never has a capability. `notifications` are the inotify
    limits of its user namespace.
    The parent sends the order `mapped` when the child's user ids are. Returns the descriptor that secrets are written
    through, and the listening socket of the way out, which the caller must close before it serves a sandbox that has a
    proxy: otherwise the supervisor could answer in the place of the proxy.
    """
    way_out = None
    if own_network:
        linux.bring_up_loopback()
        way_out = _hand_over_way_out(orders)
    socket.sethostname("carrel")
    if _order(orders, 16)[0] != b"mapped":
        raise OSError("the zygote gave up")
    budgets.hold_notifications(notifications)
    budgets.limit_process()
    if root:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    # Its own copy of the base root: what came from the zygote's namespace is locked and cannot be pivoted into.
    linux.mount(BASE, BASE, None, linux.MS_BIND | linux.MS_REC)
    rootfs.carry_out(rootfs.COMMON_PLAN, BASE, owner=rootfs.SANDBOX_UID)
    return rootfs.turn_read_only(BASE), way_out


def _hand_over_way_out(orders: socket.socket) -> socket.socket:
    """Listen at the one address through which the sandbox may reach anything, and give the zygote a copy.

    Whoever holds this socket is the sandbox's way out, and a connection that comes by it can only be this sandbox's.
    Made before anybody has asked for it, so that nobody waits for it; the zygote closes it where it is not wanted.
    """
    way_out = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    way_out.bind(("127.0.0.1", WAY_OUT_PORT))
    way_out.listen(WAY_OUT_BACKLOG)
    try:
        socket.send_fds(orders, [WAY_OUT], [way_out.fileno()])
    except BrokenPipeError:
        os._exit(0)  # as in `_order`: the zygote has gone
    return way_out


def hand_over_network(orders: socket.socket) -> None:
    """Give the zygote a descriptor of this network namespace: from outside nobody without privilege could open it."""
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(orders, [NETWORK], [descriptor])
    finally:
        os.close(descriptor)


def hand_over_memory(orders: socket.socket) -> None:
    """Give the zygote descriptors by which it sees what this sandbox keeps in memory outside of its processes."""
    paths = (rootfs.HOME, "/tmp", "/dev/shm")
    fds = [os.open("/proc/sysvipc/shm", os.O_RDONLY | os.O_CLOEXEC)]
    fds += [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in paths]
    try:
        socket.send_fds(orders, [MEMORY], fds)
    finally:
        for descriptor in fds:
            os.close(descriptor)


def settle(spec: Spec, workspace_fd: int, program: bytes, *, root: bool, order_fd: int = -1) -> None:
    """The second half: take what was asked for, then give up every privilege for good."""
    plan = rootfs.private_plan(spec.memory_mb, spec.resolver)
    rootfs.carry_out(plan, BASE, workspace_fd=workspace_fd, owner=rootfs.SANDBOX_UID)
    if spec.masked:
        mask_mounts.pivot_masked(BASE, mask_mounts.read(order_fd), COVERS)
    else:
        linux.pivot_into(BASE)
    if spec.watched and spec.network != "host":
        budgets.limit_tcp_buffers()
    _limit(spec)
    linux.drop_bounding_set()
    if root:
        os.setresgid(rootfs.SANDBOX_UID, rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
        os.setresuid(rootfs.SANDBOX_UID, rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
    linux.drop_capabilities()
    libc.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if landlock.abi() > 0:
        # The secrets too: a rule holds for a directory through every mount of it, and the agent's is read-only.
        landlock.restrict(read=["/"], write=(*rootfs.WRITABLE, rootfs.SECRETS))
    seccomp.install(program)


def receive(orders: socket.socket) -> tuple[Spec, list[int]]:
    """Wait for the request: what is asked for; the listening socket, the workspace and the masks as descriptors."""
    message, fds = _order(orders, MAX_MESSAGE, 3)
    for descriptor in fds:  # whoever inherits the listening socket can answer in the place of the supervisor
        os.set_inheritable(descriptor, False)
    return Spec(**json.loads(message)), fds


def _order(orders: socket.socket, size: int, most: int = 0) -> tuple[bytes, list[int]]:
    """What the zygote says next, with its descriptors. Once it has gone nobody will ask any more: then this ends."""
    try:
        message, fds, _flags, _address = socket.recv_fds(orders, size, most)
    except ConnectionResetError:  # it went without having read all that it was told
        os._exit(0)
    if not message:
        os._exit(0)
    return message, fds


def give_up_reach() -> int:
    """Make this process unreachable for those it will start; a descriptor that still sets its own OOM score."""
    libc.prctl(linux.PR_SET_DUMPABLE, 1)  # the owner of /proc/self follows it
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    libc.prctl(linux.PR_SET_DUMPABLE, 0)
    return descriptor


def _limit(spec: Spec) -> None:
    linux.lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    if spec.processes is not None:
        linux.lower_limit(resource.RLIMIT_NPROC, spec.processes)
    if spec.watched and spec.memory_mb is not None:  # no cgroup holds the sum, so each process is held
        linux.lower_limit(resource.RLIMIT_DATA, spec.memory_mb * 1024 * 1024)
    if spec.disk_mb is not None:
        linux.lower_limit(resource.RLIMIT_FSIZE, spec.disk_mb * 1024 * 1024)
