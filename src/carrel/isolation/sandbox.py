"""Turns a forked child of the zygote into PID 1 of a sandbox, in two parts: before and after a sandbox is requested.

The order matters: first the steps that need privileges, then every privilege is dropped, then the supervisor runs.
Agent code starts long after that. A failure at any step ends the child; no step is skipped.
"""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from carrel.isolation import (
    budgets,
    folder_mounts,
    ids,
    image_root,
    inside,
    landlock,
    linux,
    mask_mounts,
    rootfs,
    seccomp,
)
from carrel.isolation.inside import MOST_DESCRIPTORS, PROXY_PORT
from carrel.primitives import libc
from carrel.primitives.kernel_files import write

AGENT = (rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
BASE = "/base"
COVERS = "/covers"
OPEN_FILES = 8192
MAX_MESSAGE = 256 * 1024
MOST_FOLDERS = 64
PROXY_BACKLOG = 4096
PROXY_LISTENER = b"proxy listener"
NETWORK = b"network"
MEMORY = b"memory"
IMAGE_USERS = b"image users"
MAPPED = b"mapped"


@dataclass(frozen=True)
class ImageSpec:
    """An image, by the path of its root in the directory of all images, and how a sandbox uses it: its user there,
    variables, and where a command starts that names no directory.
    """

    root: str
    identity: Sequence[int]
    uid: int
    gid: int
    user: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    working_directory: str = ""
    writable: bool = False
    """Whether the root can be changed, as for a RUN line of a build. The changes are kept in the volume."""
    home: str = ""
    """The home of the user in the image, if the root can be changed."""

    @property
    def owner(self) -> tuple[int, int]:
        """The user and group of the agent in the image."""
        return self.uid, self.gid

    @property
    def path(self) -> list[str]:
        """The absolute directories of the image's PATH."""
        return [folder for folder in self.environment.get("PATH", "").split(":")[:MOST_FOLDERS] if folder[:1] == "/"]


@dataclass(frozen=True)
class Spec:
    """The request for a new sandbox, from the control plane."""

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
    folder: str = ""
    """The path of the workspace on the host, if it is a folder there. Then its mount comes as a descriptor."""
    mounts: list[str] = field(default_factory=list)
    """Where further mounts belong, whose descriptors come last, in this order: the home, and what is read-only."""
    image: dict[str, Any] = field(default_factory=dict)
    """The fields of `ImageSpec`, if the sandbox runs from an image."""


@dataclass
class SandboxDetails:
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
    proxy_port: int | None
    """The port of the proxy, or of the supervisor in a sandbox without a network; None if there is no such port."""
    refusing: socket.socket | None
    """The listening socket of that port, if the supervisor itself has to refuse every request."""
    trust: bool
    own_path: str = ""
    """The second path of the workspace, if it is a folder of the host."""
    image: ImageSpec | None = None


@dataclass(frozen=True)
class ImageUsers:
    """A user namespace below that of a sandbox of root, in which the agent is `owner`, a user and group of an image.

    As the map of a mount it shows the owners that files have in the image. The agent enters it: for the kernel it stays
    the same ordinary user, who owns no other namespace. So its root, even without the limits that follow, could do
    nothing that the agent could not. The other ids are names only, which no process has and nobody can take.
    """

    owner: tuple[int, int]
    namespace: int

    @classmethod
    def make(cls, owner: tuple[int, int], proc: str) -> ImageUsers:
        """Called in the new sandbox while it has its privileges; `proc` lists its processes."""
        libc.prctl(linux.PR_SET_DUMPABLE, 1)  # the owner of /proc/PID follows it
        return cls(owner, linux.user_namespace(ids.image_map(owner[0]), ids.image_map(owner[1]), proc))

    def enter(self, kept: Collection[int] = ()) -> None:
        """Become the agent. `kept` are capabilities that it may have there."""
        linux.enter_namespace(self.namespace)
        os.close(self.namespace)
        linux.drop_bounding_set(kept)  # every user namespace begins with all of it
        _become(*self.owner)


@dataclass(frozen=True)
class PreparedSandbox:
    """The result of the first part: the descriptor for writing secrets, the listening egress socket, and the users of
    an image whose user the zygote expects.

    The caller must close the socket before it serves a sandbox that has a proxy: otherwise the supervisor could answer
    instead of the proxy.
    """

    secrets_fd: int = -1
    proxy_listener: socket.socket | None = None
    image_users: ImageUsers | None = None


def prepare(
    orders: socket.socket,
    *,
    root: bool,
    own_network: bool = True,
    notifications: Mapping[str, int] = MappingProxyType({}),
) -> PreparedSandbox:
    """Do the first part, before a sandbox is requested. Called in the child, in its new namespaces.

    Without `own_network` it shares the host's network, over which it never has a capability. `notifications` are the
    inotify limits of its user namespace. The parent sends `mapped` when the child's user ids are mapped, with the user
    of the image that it expects, if any.
    """
    proxy_listener = None
    if own_network:
        linux.bring_up_loopback()
        proxy_listener = _hand_over_proxy_listener(orders)
    socket.sethostname("carrel")
    word, *expected = _next_message(orders, 64)[0].split()
    if word != MAPPED:
        raise OSError("the zygote gave up")
    budgets.hold_notifications(notifications)
    budgets.limit_process()
    if root:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    # A separate mount of the base root: mounts from the zygote's namespace are locked and cannot become the root.
    linux.mount(BASE, BASE, None, linux.MS_BIND | linux.MS_REC)
    rootfs.apply_plan(rootfs.COMMON_PLAN, BASE, owner=rootfs.SANDBOX_UID)
    users = None
    if expected:
        users = ImageUsers.make((int(expected[0]), int(expected[1])), f"{BASE}/proc")
        _hand_over(orders, IMAGE_USERS, users.namespace)
    return PreparedSandbox(rootfs.protect_secrets(BASE), proxy_listener, users)


def _hand_over_proxy_listener(orders: socket.socket) -> socket.socket:
    """Create the egress socket, the only address through which the sandbox can reach anything; send it to the zygote.

    A connection that arrives at this socket can only come from this sandbox. It is created before a sandbox is
    requested, so that nobody waits for it; the zygote closes it where it is not needed.
    """
    proxy_listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    proxy_listener.bind(("127.0.0.1", PROXY_PORT))
    proxy_listener.listen(PROXY_BACKLOG)
    _hand_over(orders, PROXY_LISTENER, proxy_listener.fileno())
    return proxy_listener


def _hand_over(orders: socket.socket, word: bytes, descriptor: int) -> None:
    try:
        socket.send_fds(orders, [word], [descriptor])
    except BrokenPipeError:
        os._exit(0)  # the zygote is gone, as in `_next_message`


def hand_over_network(orders: socket.socket) -> None:
    """Send the zygote a descriptor of this network namespace, which it could not open without privileges."""
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(orders, [NETWORK], [descriptor])
    finally:
        os.close(descriptor)


def hand_over_memory(orders: socket.socket, spec: Spec) -> None:
    """Send the zygote descriptors for measuring the memory that this sandbox uses outside of its processes."""
    on_disk = {*spec.mounts, *(["/tmp"] if spec.image.get("writable") else [])}
    paths = [path for path in (inside.HOME, "/tmp", "/dev/shm") if path not in on_disk]
    fds = [os.open("/proc/sysvipc/shm", os.O_RDONLY | os.O_CLOEXEC)]
    fds += [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in paths]
    try:
        socket.send_fds(orders, [MEMORY], fds)
    finally:
        for descriptor in fds:
            os.close(descriptor)


def complete(spec: Spec, fds: Sequence[int], program: bytes, prepared: PreparedSandbox, *, root: bool) -> None:
    """Do the second part: set up what was requested, then drop every privilege for good.

    The descriptors are those of the workspace; of the masks, and of the image and the layers around it, if there are
    any; and of the further mounts.
    """
    workspace_fd, *more = fds
    plan_fd = more.pop(0) if spec.masked else -1
    image = ImageSpec(**spec.image) if spec.image else None
    writable = image is not None and image.writable
    if image is not None and writable:
        workspace_fd = image_root.keep_changes(workspace_fd, _root_of(image) if root else None)
    place = BASE
    if image is not None:
        place = image_root.mount(more.pop(0), more.pop(0), BASE, trust=spec.trust, writable=writable)
    covered = folder_mounts.cover(place, [spec.folder, *spec.mounts])
    kept_home = inside.HOME in spec.mounts
    plan = rootfs.private_plan(spec.memory_mb, spec.resolver, kept_home=kept_home, own_tmp=not writable)
    rootfs.apply_plan(plan, place, workspace_fd=workspace_fd, owner=rootfs.SANDBOX_UID)
    if spec.folder:
        folder_mounts.attach(place, spec.folder, list(zip(spec.mounts, more, strict=True)), covered)
    if spec.masked:
        mask_mounts.pivot_masked(place, mask_mounts.read(plan_fd), COVERS, image.path if image else ())
    else:
        linux.pivot_into(place)
    folder_mounts.show_workspace(spec.folder)
    if spec.watched and spec.network != "host":
        budgets.limit_tcp_buffers()
    _limit(spec)
    linux.drop_bounding_set()
    renamed = image.owner if image is not None and (image.owner != AGENT or writable) else None
    # Package managers use them. They hold for the namespace of the image's users, which owns no other: so they reach
    # the files and processes of these users, of whom there are none outside this sandbox, and nothing else.
    kept = linux.FOR_INSTALLING if root and writable and image is not None and image.uid == 0 else ()
    if root:
        users = prepared.image_users
        # The kernel holds all users of a namespace together to the limit of processes when it was made.
        if users is not None and (users.owner != renamed or writable):
            os.close(users.namespace)
            users = None
        if renamed is not None:
            (users or ImageUsers.make(renamed, "/proc")).enter(kept)
        else:
            _become(*AGENT)
    elif renamed is not None:
        _rename_agent(*renamed)
    linux.drop_capabilities(kept)
    libc.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if landlock.abi() > 0:
        # With the secrets: a rule applies to a directory through all its mounts, and the agent's mount is read-only.
        landlock.restrict(read=["/"], write=["/"] if writable else (*rootfs.WRITABLE, inside.SECRETS))
    seccomp.install(program)
    if image is not None and image.working_directory and not os.path.isdir(image.working_directory):
        raise OSError(f"the image's working directory {image.working_directory[:200]} is not a directory in it")


def _root_of(image: ImageSpec) -> tuple[int, int]:
    """Return the user and group ids that root of a build's image has in the sandbox."""
    uid, gid = (next(row[1] for row in ids.image_rows(each) if row[0] == 0) for each in image.owner)
    return uid, gid


def _become(uid: int, gid: int) -> None:
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _rename_agent(uid: int, gid: int) -> None:
    """In an ordinary user's sandbox, which has one id, enter a user namespace in which the agent has these ids.

    That only changes names, as in `ImageUsers`.
    """
    libc.prctl(linux.PR_SET_DUMPABLE, 1)  # the owner of /proc/self follows it
    linux.unshare(linux.CLONE_NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {rootfs.SANDBOX_UID} 1\n")
    write("/proc/self/gid_map", f"{gid} {rootfs.SANDBOX_UID} 1\n")
    linux.drop_bounding_set()  # every user namespace begins with all of it


def receive(orders: socket.socket) -> tuple[Spec, list[int]]:
    """Wait for the request. The descriptors are the listening socket, and those that `complete` gets."""
    message, fds = _next_message(orders, MAX_MESSAGE, MOST_DESCRIPTORS)
    for descriptor in fds:  # a process that inherits the listening socket could answer instead of the supervisor
        os.set_inheritable(descriptor, False)
    return Spec(**json.loads(message)), fds


def _next_message(orders: socket.socket, size: int, most: int = 0) -> tuple[bytes, list[int]]:
    """Return the next message of the zygote, with its descriptors. Exits when the zygote is gone."""
    try:
        message, fds, _flags, _address = socket.recv_fds(orders, size, most)
    except ConnectionResetError:  # it ended before it had read all messages
        os._exit(0)
    if not message:
        os._exit(0)
    return message, fds


def hide_from_children() -> int:
    """Keep child processes from tracing this one; return a descriptor that still sets its OOM score."""
    libc.prctl(linux.PR_SET_DUMPABLE, 1)  # the owner of /proc/self follows it
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    libc.prctl(linux.PR_SET_DUMPABLE, 0)
    return descriptor


def _limit(spec: Spec) -> None:
    linux.lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    if spec.processes is not None:
        linux.lower_limit(resource.RLIMIT_NPROC, spec.processes)
    if spec.watched and spec.memory_mb is not None:  # no cgroup limits the sum, so each process is limited
        linux.lower_limit(resource.RLIMIT_DATA, spec.memory_mb * 1024 * 1024)
    if spec.disk_mb is not None:
        linux.lower_limit(resource.RLIMIT_FSIZE, spec.disk_mb * 1024 * 1024)
