"""Forks the processes that become sandboxes, and runs in each of them until the supervisor takes over.

It knows how a sandbox is created; the zygote's loop knows who requested it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import socket
import struct
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from carrel.errors import PlatformError
from carrel.isolation import (
    budgets,
    cgroups,
    folder_opener,
    ids,
    image_root,
    inside,
    linux,
    mask_mounts,
    rootfs,
    sandbox,
    seccomp,
    watchdog,
    zygote_root,
)
from carrel.isolation import masks as wire
from carrel.primitives import libc

# The cgroup namespace is created later: its root is the group that a process is in at that moment.
_AT_FORK = linux.ALL_NAMESPACES & ~linux.CLONE_NEWCGROUP
# A request to the forker: the slot of ids; whether to rehearse; whether the network is its own; whether there is a lock
# of the ids; whether there is a version 2 cgroup. With it come the descriptors: orders, that lock, that cgroup, and the
# version 1 cgroups. The answer is a pid, or a negative error number.
_FORK, _FORKED = struct.Struct("=q????"), struct.Struct("=i")
_FORK_FDS_SPACE = socket.CMSG_SPACE(8 * struct.calcsize("i"))
_KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit())
_IMAGE_ATTRIBUTES = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_IDMAPPED_OVERLAYS = (5, 19)
"""The first kernel that can use an idmapped mount as a layer of an overlay."""
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)


class SupervisorModule(Protocol):
    """The functions that the module of the supervisor must have."""

    def prepare(self) -> object:
        """Create what every sandbox will use. Called once, before the first fork."""

    def take_over(self, prepared: object, *, rehearse: bool) -> set[int]:
        """In a new process, make it this process's own; return the descriptors that must stay open."""

    def main(self, facts: sandbox.SandboxDetails, prepared: object) -> None:
        """Serve a sandbox; never returns."""

    def warm(self) -> None:
        """Load every module that Python would otherwise load late."""

    def end_below(self, pid: int) -> None:
        """End every process below `pid`."""


@dataclass(eq=False)
class Child:
    """A sandbox, from its fork until nothing of it is left. Without a name it is a spare."""

    group: str
    pid: int
    orders: socket.socket
    started: int
    slot: int = 0
    name: str = ""
    asked_by: socket.socket | None = None
    seq: int = 0
    deadline: float = math.inf
    ready: bool = False
    reaped: bool = False
    watched: watchdog.WatchedSandbox | None = None
    network: str = ""
    proxy_listener: socket.socket | None = None
    network_fd: int = -1
    lifeline: int = -1
    expected_owner: tuple[int, int] | None = None
    """The user of an image for which the child makes a user namespace ahead."""
    image_users: int = -1
    """The descriptor of that namespace."""
    folder: str = ""
    namespaces: tuple[int, ...] = ()
    """Of a sandbox with masks on a folder of the host: its user namespace and its mount namespace."""
    waiting: list[tuple[socket.socket, int]] = field(default_factory=list)

    def take_proxy_listener(self, descriptor: int) -> None:
        """Keep the egress socket as long as the child lives, unless its network has none."""
        self.proxy_listener = socket.socket(fileno=descriptor)
        if self.network:
            self.set_network(self.network)

    def set_network(self, network: str) -> None:
        """Set the requested network. Without a network, the child itself listens on its copy of the egress socket. On
        networks that bypass the proxy, the socket is shut down and the port is free.
        """
        self.network = network
        if self.proxy_listener is not None and network != "allowlist":
            if network != "none":
                # A child that is just being forked may have a copy: this shuts down all copies.
                self.proxy_listener.shutdown(socket.SHUT_RDWR)
            self.proxy_listener.close()
            self.proxy_listener = None

    def open_image_users(self, owner: tuple[int, int]) -> int:
        """Return a user namespace whose id maps are those of an image with this user; the caller closes it."""
        if owner == self.expected_owner and self.image_users >= 0:
            users, self.image_users = self.image_users, -1
            return users
        first = ids.owner(self.slot)
        return linux.user_namespace(*(ids.image_map(each, first) for each in owner))

    def take_memory(self, descriptors: Sequence[int]) -> None:
        """Keep the descriptors for measuring its memory: the System V segments first, then the file systems."""
        if self.watched is None:
            raise PlatformError("the memory of this sandbox is not watched")
        self.watched.segments, *self.watched.mounts = descriptors

    @contextmanager
    def network_descriptors(self) -> Iterator[tuple[int, ...]]:
        """Return, once, the descriptors for building a bridge to the child's network; none for other networks.

        They are the network namespace; a pipe that closes when the child is gone, which ends the bridge; and the
        zygote's user namespace, in which an ordinary user has the capabilities to build it.
        """
        if self.network_fd < 0:
            yield ()
            return
        end, self.lifeline = os.pipe()
        users = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield self.network_fd, end, users
        finally:
            for descriptor in (self.network_fd, end, users):
                os.close(descriptor)
            self.network_fd = -1

    def close(self) -> None:
        """Close the egress socket, the bridge and the descriptors of the memory."""
        if self.proxy_listener is not None:
            self.proxy_listener.close()
            self.proxy_listener = None
        if self.watched is not None:
            self.watched.close()
        for descriptor in (self.network_fd, self.lifeline, self.image_users, *self.namespaces):
            _close(descriptor)
        self.network_fd = self.lifeline = self.image_users = -1
        self.namespaces = ()

    def make_read_only_again(self, paths: Sequence[str]) -> None:
        """Protect paths again that were replaced on the host. Called in a fork, which enters the sandbox for good."""
        for descriptor in self.namespaces:
            linux.enter_namespace(descriptor)
        mask_mounts.make_read_only_again(paths, self.folder)


class SandboxForker:
    """Forks sandboxes through a separate process, the forker. Without `isolate` they are plain forks."""

    def __init__(self, supervisor: SupervisorModule, *, isolate: bool):
        self.cgroups = cgroups.Cgroups()
        self._supervisor = supervisor
        self._isolate = isolate
        self._root = os.geteuid() == 0
        self._count = 0
        self._program = self._folder_program = self._build_program = b""
        self._prepared: object = None
        self._ids: ids.HostIds | None = None
        self._workspaces = -1
        self._idmap = False
        self._notifications: Mapping[str, int] = {}
        self._covers: mask_mounts.CoverFiles | None = None
        self._requests: socket.socket | None = None
        self._forker_pid = 0
        self._opener: socket.socket | None = None
        self._images = -1
        self._last_owner: tuple[int, int] | None = None  # the user of the last image that is not the agent's own

    def prepare(
        self,
        workspaces: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        folder_roots: Sequence[str] = (),
        images: str = "",
    ) -> None:
        """Move to a small file system of our own and create there what all sandboxes share. See `zygote_root.enter`."""
        self._prepared = self._supervisor.prepare()
        if self._isolate:
            linux.raise_limit(resource.RLIMIT_NOFILE)  # each sandbox with an egress socket needs one
            self.cgroups = cgroups.Cgroups.open()
            checks = {} if "memory" in self.cgroups.controllers else seccomp.FIXED_BUFFERS
            self._program = seccomp.build(more=checks)
            self._folder_program = seccomp.build(more={**checks, **seccomp.without_set_ids()})
            self._build_program = seccomp.build(more={**checks, **seccomp.FOR_BUILDS})
            self._ids = ids.HostIds() if self._root else None
            self._opener = zygote_root.enter(
                workspaces, root=self._root, shared=shared, folder_roots=folder_roots, images=images
            )
            if not self._root:
                self._notifications = budgets.sandbox_notifications()
            self._covers = mask_mounts.CoverFiles(sandbox.COVERS, sandbox.BASE)
            workspaces = zygote_root.WORKSPACES
            if images:
                self._images = os.open(zygote_root.IMAGES, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._workspaces = os.open(workspaces, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._idmap = self._ids is not None and self._can_idmap()

    def _can_idmap(self) -> bool:
        """Try whether the file system of the workspaces supports idmapped mounts."""
        maps = ids.maps(0, root=True, idmap=True)
        try:
            users = linux.user_namespace(maps, maps)
            try:
                os.close(self._workspace_mount("", users))
            finally:
                os.close(users)
        except OSError:
            return False
        return True

    def describe(self) -> dict[str, Any]:
        """Return the features of the sandboxes that this forker creates."""
        return {
            "isolate": self._isolate,
            "controllers": sorted(self.cgroups.controllers),
            "cgroups": self.cgroups.version,
            "cgroups_reason": self.cgroups.reason,
            "idmap": self._idmap,
            "root": self._root,
            "folders": self._opener is not None,
            "images": self._images >= 0,
        }

    def open_folder(self, body: dict[str, object], answers: int) -> None:
        """Have a folder of the host opened; the mount is sent to the socket `answers`."""
        if self._opener is None:
            raise PlatformError("this zygote was started without folders")
        folder_opener.request(self._opener, body, answers)

    def held(self, child: Child) -> int:
        """Return the bytes of deleted workspace files that a sandbox's processes still have open."""
        return watchdog.deleted_open_bytes(child.pid, os.fstat(self._workspaces).st_dev)

    def configure(self, child: Child, spec: sandbox.Spec, listener: int, *given: int) -> None:
        """Send a forked child its limits, the socket that it will listen on, and its mounts.

        The other descriptors are the masks, the folder and the further mounts, as far as the request names them.
        """
        more = list(given)
        plan = self._mask_plan(more.pop(0), image=bool(spec.image)) if spec.masked else -1
        if self._isolate and spec.memory_mb is not None and "memory" not in self.cgroups.controllers:
            own_network = spec.network != "host"
            child.watched = watchdog.WatchedSandbox(child.pid, spec.memory_mb * 1024 * 1024, own_network=own_network)
            spec = replace(spec, watched=True)
        fds, mount = [listener], -1
        image: list[int] = []
        try:
            if self._isolate:
                self.cgroups.limit(child.group, spec.memory_mb, spec.cpus)
                wanted = sandbox.ImageSpec(**spec.image) if spec.image else None
                if wanted is not None:
                    self._mount_image(wanted, child, image)
                self._map_owners(more, child)
                if spec.folder:
                    mount = more.pop(0)
                elif wanted is not None and wanted.writable:
                    mount = self._build_mount(spec.workspace, child.slot)
                else:
                    mount = self._volume_mount(spec.workspace, child.pid)
                fds += [mount, *([plan] if plan >= 0 else []), *image, *more]
                if spec.folder and spec.masked:
                    child.folder = spec.folder
                    child.namespaces = tuple(  # now: an ordinary user cannot open them later
                        os.open(f"/proc/{child.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("user", "mnt")
                    )
            socket.send_fds(child.orders, [json.dumps(vars(spec)).encode()], fds)
        finally:
            for tree in image:
                os.close(tree)
            if not spec.folder:
                _close(mount)

    def _mount_image(self, image: sandbox.ImageSpec, child: Child, trees: list[int]) -> None:
        """Add read-only mounts to `trees`: the root of an image, which must still be the directory with that identity,
        and our layers around it.
        """
        if self._images < 0:
            raise PlatformError("this zygote was started without images")
        place = libc.open_without_links(image.root, self._images)
        try:
            status = os.fstat(place)
            if (status.st_dev, status.st_ino) != tuple(image.identity):
                raise PlatformError("the root of the image was replaced meanwhile")
            trees.append(linux.open_tree("", dir_fd=place))
        finally:
            os.close(place)
        trees.append(linux.open_tree(image_root.LAYERS))
        for tree in trees:
            linux.set_mount_attributes(tree, _IMAGE_ATTRIBUTES, private=True)
        self._map_image_owners(trees, image, child)

    def _map_image_owners(self, trees: Sequence[int], image: sandbox.ImageSpec, child: Child) -> None:
        """Show a sandbox of root the owners that files have in the image. Where the kernel or the file system cannot,
        they belong to nobody there. An ordinary user's image has one owner, who is the agent.
        """
        if not self._idmap or _KERNEL < _IDMAPPED_OVERLAYS:
            return
        if image.owner == sandbox.AGENT and not image.writable:
            users = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        else:
            users = child.open_image_users(image.owner)
            self._last_owner = image.owner
        try:
            for tree in trees:
                with suppress(OSError):
                    linux.set_mount_attributes(tree, linux.MOUNT_ATTR_IDMAP, users)
        finally:
            os.close(users)

    def _map_owners(self, trees: Sequence[int], child: Child) -> None:
        """Make the owner of each folder of the host the agent in one sandbox, and the other way round. The files of
        others belong to nobody there. An ordinary user's sandbox has that owner already.
        """
        if self._ids is None:
            return
        agent = ids.agent(child.slot, idmap=self._idmap)
        namespaces: dict[tuple[int, int], int] = {}
        try:
            if self._idmap:  # in the namespace of the sandbox itself, the user with the agent's id is the agent
                own = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
                namespaces[rootfs.SANDBOX_UID, rootfs.SANDBOX_UID] = own
            for tree in trees:
                found = os.fstat(tree)
                owner = found.st_uid, found.st_gid
                if owner not in namespaces:
                    users, groups = (f"{each} {agent} 1\n" for each in owner)
                    namespaces[owner] = linux.user_namespace(users, groups)
                try:
                    linux.set_mount_attributes(tree, linux.MOUNT_ATTR_IDMAP, namespaces[owner], recursive=True)
                except OSError as error:
                    if owner != (agent, agent):
                        raise PlatformError(
                            "the owner of a folder cannot be mapped: its file system, or one mounted in it, has "
                            f"no idmapped mounts ({error.strerror})"
                        ) from error
        finally:
            for users_fd in namespaces.values():
                os.close(users_fd)

    def _mask_plan(self, masks: int, *, image: bool) -> int:
        if self._covers is None:
            raise PlatformError("a sandbox without isolation cannot have masks")
        return self._covers.plan(wire.content(masks), image=image)

    def fork(self, *, rehearse: bool, own_network: bool = True) -> Child:
        """Fork a child that does the first part and then waits; `rehearse` when there is time for it."""
        self._count += 1
        group = f"s{self._count}"
        slot, lock = self._ids.take() if self._ids else (0, -1)
        try:
            entry = self.cgroups.make(group)
        except PlatformError:
            _close(lock)
            raise
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = self._ask_forker(
                _FORK.pack(slot, rehearse, own_network, lock >= 0, entry.into >= 0), theirs, lock, entry
            )
        except OSError:
            self.cgroups.remove(group)
            ours.close()
            raise
        finally:  # the sandbox has its own copy of the lock, which reserves its ids as long as it lives
            theirs.close()
            entry.close()
            _close(lock)
        child = Child(group, pid, ours, cgroups.start_time(pid), slot)
        if self._isolate:
            try:
                linux.write_id_maps(f"/proc/{pid}", ids.maps(slot, root=self._root, idmap=self._idmap))
            except OSError as error:
                kill(pid)
                os.waitpid(pid, 0)
                ours.close()
                self.cgroups.remove(group)
                raise PlatformError(f"the user ids of a sandbox could not be mapped: {error}") from error
            words = [sandbox.MAPPED]
            if rehearse and self._root and self._last_owner is not None:
                # There is time now: the next image may have the same user.
                child.expected_owner = self._last_owner
                words += [b"%d" % each for each in self._last_owner]
            ours.send(b" ".join(words))
        return child

    # the forker

    def _ask_forker(self, request: bytes, orders: socket.socket, lock: int, entry: cgroups.GroupEntry) -> int:
        """Have the forker fork a process; return its PID. It is a child of this process."""
        self._requests = self._requests or self._start_forker()
        fds = [descriptor for descriptor in (orders.fileno(), lock, entry.into, *entry.tasks) if descriptor >= 0]
        try:
            socket.send_fds(self._requests, [request], fds)
            answer = self._requests.recv(_FORKED.size)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            self._requests.close()
            self._requests = None  # the next request starts another
            raise OSError("the process that forks sandboxes has died")
        pid: int
        (pid,) = _FORKED.unpack(answer)
        if pid < 0:
            raise OSError(-pid, f"fork: {os.strerror(-pid)}")
        return pid

    def _start_forker(self) -> socket.socket:
        """Start the process that all sandboxes are forked from.

        A forked process shares a memory page with its parent until one of them writes to it. The zygote's loop writes
        to some 350 pages between two forks, and each sandbox would keep the old ones for itself. The forker does
        nothing else, so its pages stay shared. It also has no descriptor of any sandbox.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forker_pid = os.fork()
        if self._forker_pid == 0:
            try:
                kept = self._supervisor.take_over(self._prepared, rehearse=False)
                linux.close_all_but({0, 1, 2, theirs.fileno(), self._workspaces, *kept})
                while True:
                    self._fork_one(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        return ours

    def _fork_one(self, requests: socket.socket) -> None:
        """In the forker, fork one process as a sibling of this one."""
        message, ancillary, _flags, _address = requests.recvmsg(_FORK.size, _FORK_FDS_SPACE, _CLOSE_ON_EXEC)
        if not message:
            os._exit(0)  # the zygote is gone
        slot, rehearse, own_network, has_lock, has_cgroup = _FORK.unpack(message)
        received = ancillary[0][2]
        orders, *rest = fds = struct.unpack(f"{len(received) // 4}i", received)
        lock = rest.pop(0) if has_lock else -1
        into = rest.pop(0) if has_cgroup else -1
        namespaces = _AT_FORK if own_network else _AT_FORK & ~linux.CLONE_NEWNET
        try:
            if not self._isolate:
                pid = linux.fork_into(0, sibling=True)
            elif self._ids is None:
                pid = linux.fork_into(namespaces, into, sibling=True)
            else:
                pid = linux.fork_owned(ids.owner(slot), namespaces, into, sibling=True)
        except OSError as error:
            pid = -(error.errno or errno.EIO)
        if pid == 0:
            entry = cgroups.GroupEntry(tuple(rest), into)
            self._become(socket.socket(fileno=orders), lock, entry, rehearse=rehearse, own_network=own_network)
        for descriptor in fds:
            os.close(descriptor)
        requests.send(_FORKED.pack(pid))

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
            os.waitpid(self._forker_pid, 0)
        if self._opener is not None:
            self._opener.close()
        self.cgroups.close()

    def _volume_mount(self, name: str, pid: int) -> int:
        if not self._idmap:
            return self._workspace_mount(name, -1)
        users = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._workspace_mount(name, users)
        finally:
            os.close(users)

    def _build_mount(self, name: str, slot: int) -> int:
        """Return a mount of the volume of a build. Its files keep ids that no user of the host has, so a set-user-ID
        file there gives nobody anything.
        """
        if self._ids is not None:
            os.chown(name, ids.owner(slot), ids.owner(slot), dir_fd=self._workspaces, follow_symlinks=False)
        return self._workspace_mount(name, -1)

    def _workspace_mount(self, name: str, users: int) -> int:
        """Return a mount of a workspace; `users` is the user namespace of its sandbox, or -1 without idmapping."""
        mount = linux.open_tree(name, dir_fd=self._workspaces)
        try:
            attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
            if users >= 0:
                linux.set_mount_attributes(mount, attributes | linux.MOUNT_ATTR_IDMAP, users)
            else:
                linux.set_mount_attributes(mount, attributes)
        except OSError:
            os.close(mount)
            raise
        return mount

    def _become(
        self, orders: socket.socket, lock: int, entry: cgroups.GroupEntry, *, rehearse: bool, own_network: bool
    ) -> None:
        """In the child, become the sandbox. Never returns."""
        try:
            entry.enter()
            if self._isolate:
                linux.unshare(linux.CLONE_NEWCGROUP)
            kept = self._supervisor.take_over(self._prepared, rehearse=rehearse)
            workspaces = -1 if self._isolate else self._workspaces
            linux.close_all_but({0, 1, 2, orders.fileno(), lock, workspaces, *kept})
            prepared = sandbox.PreparedSandbox()
            if self._isolate:
                held = self._notifications
                prepared = sandbox.prepare(orders, root=self._root, own_network=own_network, notifications=held)
            proxy_listener = prepared.proxy_listener
            spec, fds = sandbox.receive(orders)
            if self._isolate:
                if spec.network == "bridge":
                    sandbox.hand_over_network(orders)
                program = self._folder_program if spec.folder else self._program
                if spec.image.get("writable"):
                    program = self._build_program
                sandbox.complete(spec, fds[1:], program, prepared, root=self._root)
                for descriptor in fds[1:]:
                    os.close(descriptor)
                if spec.watched:
                    sandbox.hand_over_memory(orders, spec)
                workspace, home = inside.WORKSPACE, inside.HOME
            else:
                os.setsid()
                libc.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
                os.fchdir(workspaces)
                os.chdir(spec.workspace)
                os.close(workspaces)
                workspace = home = os.getcwd()
            score = sandbox.hide_from_children()
            if proxy_listener is not None and spec.network != "none":
                proxy_listener.close()
                proxy_listener = None
            has_port = self._isolate and spec.network in {"none", "allowlist"}
            listener = socket.socket(fileno=fds[0])
            orders.send(b"ready")
            orders.close()
            facts = sandbox.SandboxDetails(
                spec.id,
                listener,
                workspace,
                home,
                spec.env,
                self._isolate,
                spec.memory_mb,
                score,
                prepared.secrets_fd,
                inside.PROXY_PORT if has_port else None,
                proxy_listener,
                spec.trust,
                spec.folder if self._isolate else "",
                sandbox.ImageSpec(**spec.image) if spec.image else None,
            )
            self._supervisor.main(facts, self._prepared)
        except BaseException as error:
            try:
                orders.send(f"failed: {error}".encode()[:2000])
            except OSError:
                traceback.print_exc()
        finally:
            os._exit(1)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
