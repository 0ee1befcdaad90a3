"""Starts the programs of a virtual machine on the host, each confined so that taking it over gains little.

Each has its own namespaces, a root with the host's public programs and what it is given, no capability on the host, and
a system call filter before it starts. It is killed when the process that started it ends.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carrel.isolation import linux, seccomp
from carrel.isolation.seccomp import RET_ALLOW, ArgumentSwitch, Decision, refuse
from carrel.primitives import libc

_PUBLIC = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_READ_ONLY = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_SPACES = linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
_CLONE_FS = 0x200
_STARTING = frozenset({8, 18})
"""The capabilities that the file server needs until it has started: SETPCAP and SYS_CHROOT."""
_NAMESPACE, _HIGH = 199, 200
"""Descriptors that are free in a process that has just started."""
EXPORT = "/export"
FAILED = 96
"""The exit status of a program that could not be started. The reason is on its standard error."""


@dataclass(frozen=True)
class Confined:
    """A program to start. `command[0]` is its path. `files` are mounted read-only in its root, by their paths there;
    `devices` are devices of the host. Its first descriptors after the standard ones are `descriptors`.
    """

    command: Sequence[str]
    uid: int
    gid: int
    files: Mapping[str, str]
    devices: Sequence[str] = ()
    groups: Sequence[int] = ()
    descriptors: Sequence[int] = ()
    served_as: int = 0
    """For the file server, the user of the host that it is: its own namespace has no other, and there it is `uid`."""
    file_size: int = 0
    """The most bytes of a file that it may write; 0 for no limit."""


def start(program: Confined, stage: str, output: int) -> int:
    """Start a program; return its process. `stage` is an empty directory, which stays empty on the host. What it prints
    goes to the descriptor `output`. Only for a process that has never had a second thread.
    """
    namespace = -1
    if program.served_as:
        own = f"{program.uid} {program.served_as} 1\n"
        namespace = linux.user_namespace(own, f"{program.gid} {program.served_as} 1\n")
    pid = linux.fork_into(_SPACES)
    if pid:
        if namespace >= 0:
            os.close(namespace)
        return pid
    try:
        libc.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        _descriptors(program, output, namespace)
        _root(program, stage)
        _limits(program)
        _become(program)
        libc.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel forgets it when the user changes
        os.execve(program.command[0], list(program.command), {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})  # noqa: S606
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(FAILED)


def _descriptors(program: Confined, output: int, namespace: int) -> None:
    """Leave only the standard descriptors and those of the program, in their order."""
    high = [os.dup2(each, _HIGH + place) for place, each in enumerate((output, *program.descriptors))]
    if namespace >= 0:
        os.dup2(namespace, _NAMESPACE)
    nothing = os.open(os.devnull, os.O_RDWR)
    for place, each in enumerate((nothing, high[0], *high)):
        os.dup2(each, place)
    linux.close_all_but({*range(3 + len(program.descriptors)), *([_NAMESPACE] if namespace >= 0 else [])})


def _root(program: Confined, stage: str) -> None:
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", stage, "tmpfs", linux.MS_NOSUID, "size=1m,mode=0755")
    for path in _PUBLIC:
        if os.path.islink(path):
            os.symlink(os.readlink(path), stage + path)
        elif os.path.isdir(path):
            _show(path, stage + path, _READ_ONLY)
    for target, source in program.files.items():
        _show(source, stage + target, 0 if target == EXPORT else _READ_ONLY)
    for device in (*_DEVICES, *program.devices):
        _show(device, stage + device, linux.MOUNT_ATTR_NOSUID)
    os.mkdir(f"{stage}/proc")
    os.makedirs(f"{stage}/tmp", exist_ok=True)
    linux.mount("proc", f"{stage}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.mount("none", stage, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID)
    linux.pivot_into(stage)


def _show(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "xb"):
            pass
    tree = linux.open_tree(source, recursive=True)
    try:
        if attributes:
            linux.set_mount_attributes(tree, attributes, recursive=True)
        linux.move_mount(tree, target)
    finally:
        os.close(tree)


def _limits(program: Confined) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    linux.raise_limit(resource.RLIMIT_NOFILE)
    if program.file_size:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails, instead of ending the server
        resource.setrlimit(resource.RLIMIT_FSIZE, (program.file_size, program.file_size))


def _become(program: Confined) -> None:
    """Give up everything that the program does not need."""
    os.umask(0o022)
    os.setgroups(list(program.groups))
    if program.served_as:
        linux.enter_namespace(_NAMESPACE)
        os.close(_NAMESPACE)
    kept = _STARTING if program.served_as else frozenset()
    linux.drop_bounding_set(kept)
    os.setresgid(program.gid, program.gid, program.gid)
    os.setresuid(program.uid, program.uid, program.uid)
    if kept:
        linux.pass_on_capabilities(kept)
    else:
        linux.drop_capabilities()
    seccomp.install(seccomp.build(more=file_server_calls() if program.served_as else {}))


def file_server_calls() -> dict[str, Decision]:
    """Return the checks of system calls of the file server, besides the usual ones.

    It makes no set-user-ID file and no device, whatever the machine asks. It never changes who it is, and is told that
    it did: so all files belong to its user, and a machine that is taken over can choose no other.
    """
    changes = ("setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid")
    return {
        **seccomp.without_set_ids(),
        **dict.fromkeys(changes, refuse(0)),
        "chroot": RET_ALLOW,
        "unshare": ArgumentSwitch(0, ((_CLONE_FS, RET_ALLOW),), refuse(1)),
    }
