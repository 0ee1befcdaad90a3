"""Kernel calls for namespaces, mounts and capabilities; each function raises `OSError` with the name of the call.

The callers are single-threaded processes between a fork and a pivot_root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
from collections.abc import Callable, Collection, Mapping

from carrel.primitives import kernel_files, libc

ARCH = platform.machine()
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NR_KCMP, _KCMP_FILES = {"x86_64": 312, "aarch64": 272}, 2
_NR_CAPGET = {"x86_64": 125, "aarch64": 90}
_NR_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
# The calls of 2019 and later have one number on every architecture.
_NR_OPEN_TREE, _NR_MOVE_MOUNT, _NR_CLONE3, _NR_MOUNT_SETATTR = 428, 429, 435, 442
_NR_FSOPEN, _NR_FSCONFIG, _NR_FSMOUNT = 430, 431, 432

CLONE_FS = 0x00000200
CLONE_PARENT = 0x00008000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_INTO_CGROUP = 0x200000000
ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 32, 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2

AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_IDMAP = 1, 2, 4, 8, 0x00100000
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 1, 1, 6

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, _PR_CAP_AMBIENT_RAISE = 47, 4, 2

FOR_INSTALLING = (0, 1, 3, 4, 5, 6, 7, 18)
"""The capabilities of root in a RUN line: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SYS_CHROOT."""

_SIOCSIFFLAGS = 0x8914
_LOOPBACK_UP = struct.pack("16sh14x", b"lo", 0x1 | 0x8 | 0x40)  # IFF_UP, IFF_LOOPBACK, IFF_RUNNING


def fork_into(namespaces: int, cgroup_fd: int = -1, *, sibling: bool = False) -> int:
    """Fork a child that is in new namespaces (and a version 2 cgroup) from its first instruction on; 0 in the child.

    With `sibling` the new process is a child of the caller's parent, which is notified of its end. Only for a process
    that has never had a second thread: libc's fork takes no flags, so this is the bare system call, and it runs no fork
    hooks of the interpreter. They repair locks and thread lists, which only threads can break, and they write to 160
    memory pages that each sandbox would then have for itself.
    """
    flags = namespaces | (CLONE_INTO_CGROUP if cgroup_fd >= 0 else 0) | (CLONE_PARENT if sibling else 0)
    exit_signal = 0 if sibling else signal.SIGCHLD  # the kernel wants 0 for a sibling, which has that of the caller
    # flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup
    arguments = struct.pack("=11Q", flags, 0, 0, 0, exit_signal, 0, 0, 0, 0, 0, max(cgroup_fd, 0))
    return libc.system_call("clone3", _NR_CLONE3, arguments, len(arguments))


def fork_owned(owner: int, namespaces: int, cgroup_fd: int = -1, *, sibling: bool = False) -> int:
    """Like `fork_into`, for root: the new user namespace belongs to the user id `owner`.

    The kernel makes the caller's effective user id the owner, so the caller takes that id during the fork. It keeps its
    capabilities, which a host may require for creating a user namespace or entering a cgroup.
    """
    capabilities = libc.capabilities(_NR_CAPGET[ARCH], _CAPABILITY_HEADER)
    os.seteuid(owner)
    pid = -1
    try:
        libc.system_call("capset", _NR_CAPSET[ARCH], _CAPABILITY_HEADER, capabilities)
        pid = fork_into(namespaces, cgroup_fd, sibling=sibling)
    finally:
        if pid != 0:  # the child takes the ids of its own namespace once they are mapped
            os.seteuid(0)
    return pid


def unshare(flags: int) -> None:
    libc.call("unshare", flags)


def enter_namespace(descriptor: int) -> None:
    libc.call("setns", descriptor, 0)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    data = None if options is None else options.encode()
    fstype = None if kind is None else kind.encode()
    name = f"mount {kind or source} on {target}"
    libc.call("mount", os.fsencode(source), os.fsencode(target), fstype, flags, data, name=name)


def unmount(target: str, flags: int = 0) -> None:
    libc.call("umount2", os.fsencode(target), flags, name=f"unmount {target}")


def pivot_into(root: str, meanwhile: Callable[[], None] | None = None) -> None:
    """Make `root` (a mount point) the root of this mount namespace, and unmount the old one.

    `meanwhile` is called in between: paths are those of the new root, and mounts of the old one can still be copied by
    descriptor. It must not change the working directory.
    """
    os.chdir(root)
    libc.system_call("pivot_root", _NR_PIVOT_ROOT[ARCH], b".", b".")
    if meanwhile is not None:
        meanwhile()
    unmount(".", MNT_DETACH)
    os.chdir("/")


def open_tree(path: str, *, recursive: bool = False, dir_fd: int = AT_FDCWD) -> int:
    """Return the descriptor of a detached copy of the mount at `path`."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    if not path:
        flags |= AT_EMPTY_PATH
    return libc.system_call(f"open_tree {path}", _NR_OPEN_TREE, dir_fd, os.fsencode(path), flags)


def move_mount(tree_fd: int, target: str | int) -> None:
    """Mount a detached tree at a path, whose last name may be a link, or at an open file or directory."""
    name = f"move_mount to {target}"
    path, place = (b"", target) if isinstance(target, int) else (os.fsencode(target), AT_FDCWD)
    flags = MOVE_MOUNT_F_EMPTY_PATH | (0 if path else MOVE_MOUNT_T_EMPTY_PATH)
    libc.system_call(name, _NR_MOVE_MOUNT, tree_fd, b"", place, path, flags)


def new_file_system(kind: str, options: Mapping[str, str], attributes: int) -> int:
    """Return the descriptor of a detached mount of a new file system."""
    context = libc.system_call(f"fsopen {kind}", _NR_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC)
    try:
        for name, value in options.items():
            words = name.encode(), value.encode()
            libc.system_call(f"mount option {name}", _NR_FSCONFIG, context, _FSCONFIG_SET_STRING, *words, 0)
        libc.system_call(f"make {kind}", _NR_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return libc.system_call(f"fsmount {kind}", _NR_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def set_mount_attributes(
    tree_fd: int,
    attributes: int,
    user_namespace_fd: int = 0,
    *,
    clear: int = 0,
    recursive: bool = False,
    private: bool = False,
) -> None:
    """Set mount attributes, and clear others. With `MOUNT_ATTR_IDMAP`, owners on disk are mapped by the given user
    namespace. With `private`, mounts made beneath it are seen nowhere else.
    """
    packed = struct.pack("=QQQQ", attributes, clear, MS_PRIVATE if private else 0, user_namespace_fd)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    libc.system_call("mount_setattr", _NR_MOUNT_SETATTR, tree_fd, b"", flags, packed, len(packed))


def drop_bounding_set(but: Collection[int] = ()) -> None:
    """Drop capabilities from the bounding set, so that no exec can bring one back."""
    for capability in range(64):
        if capability in but:
            continue
        try:
            libc.prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # the first number that the kernel does not know


def drop_capabilities(but: Collection[int] = ()) -> None:
    """Drop capabilities for good. None of those that stay is inherited by programs of ordinary users."""
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    low, high = (sum(1 << (each - first) for each in but if 0 <= each - first < 32) for first in (0, 32))
    # effective, permitted and inheritable ones, the lower half of each first
    packed = struct.pack("=6I", low, low, 0, high, high, 0)
    libc.system_call("capset", _NR_CAPSET[ARCH], _CAPABILITY_HEADER, packed)


def pass_on_capabilities(only: Collection[int]) -> None:
    """Keep only these capabilities, and pass them on to the program that this process becomes."""
    low, high = (sum(1 << (each - first) for each in only if 0 <= each - first < 32) for first in (0, 32))
    packed = struct.pack("=6I", low, low, low, high, high, high)
    libc.system_call("capset", _NR_CAPSET[ARCH], _CAPABILITY_HEADER, packed)
    for each in only:
        libc.call("prctl", PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, each, 0, 0, name="ambient capability")


def bring_up_loopback() -> None:
    """Bring up loopback: it is the only interface of a new network namespace, and it starts down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, _LOOPBACK_UP)


def write_id_maps(proc: str, users: str, groups: str | None = None) -> None:
    """Map the user and group ids of the process at `proc` (`/proc/PID`); each line is `inside outside count`."""
    kernel_files.write(f"{proc}/uid_map", users)
    kernel_files.write(f"{proc}/gid_map", users if groups is None else groups)


def user_namespace(users: str, groups: str, proc: str = "/proc") -> int:
    """Return the descriptor of a user namespace with these id maps and without a process.

    `proc` lists the processes of the caller's PID namespace.
    """
    read_end, write_end = os.pipe()
    pid = fork_into(CLONE_NEWUSER)
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        write_id_maps(f"{proc}/{pid}", users, groups)
        return os.open(f"{proc}/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(pid, 0)


def lower_limit(which: int, wanted: int) -> None:
    """Set a resource limit, hard and soft, as far as the current hard limit allows."""
    _soft, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(which, (wanted, wanted))


def raise_limit(which: int) -> None:
    """Set a soft resource limit to the hard one."""
    _soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (hard, hard))


def attempt(action: Callable[[], object], timeout_s: int = 5) -> str | None:
    """Run `action` in a child process. Returns None when it works, else the reason."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout_s)
        words = b""
        try:
            action()
        except OSError as error:
            words = (error.strerror or str(error)).encode()
        except BaseException as error:
            words = repr(error).encode()
        os.write(write_end, words[:400])
        os._exit(1 if words else 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        words = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status == 0:
        return None
    return words.decode(errors="replace") or f"the probe died with status {status}"


def share_descriptors(pid: int, other: int) -> bool:
    """Whether two threads share one table of descriptors; also true where the kernel does not say."""
    try:
        return libc.system_call("kcmp", _NR_KCMP[ARCH], pid, other, _KCMP_FILES, 0, 0) == 0
    except OSError:
        return True


def close_all_but(keep: set[int]) -> None:
    last = -1
    for descriptor in sorted(descriptor for descriptor in keep if descriptor >= 0):
        if descriptor > last + 1:  # an empty range at 0 would mean everything
            os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, 2**31 - 1)
