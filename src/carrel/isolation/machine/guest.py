"""PID 1 of a virtual machine: makes the sandbox in it, starts the supervisor there, and carries its connections.

It runs on the bundle's interpreter in the memory of the machine, before anything else. The files of the root come from
the host, which decides what of them can be written; this process adds what belongs to the machine: devices, memory
file systems, limits. The supervisor and the agent are in namespaces of their own, where this process and the threads of
the kernel cannot be seen. When the supervisor ends or the line breaks, the machine is switched off.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import time
from collections.abc import Sequence

from carrel.isolation import inside, linux
from carrel.isolation.machine.frames import Place
from carrel.isolation.machine.line import Line
from carrel.primitives import libc
from carrel.primitives.kernel_files import write

AGENT = 1000
"""The user id of the agent, the same as everywhere."""
MODULES, MODULE_ORDER = "/modules", "/modules/order"
PORT = "carrel"
TAG = "root"
_ROOT = "/root"
_CGROUP = "/cgroup"
_PRIVATE = f"{inside.CONTROL}/private"
_SUPERVISOR, _REPORT, _EGRESS = f"{_PRIVATE}/socket", f"{_PRIVATE}/report", f"{inside.CONTROL}/egress"
_BACKLOG = 1024
_PORT_DEADLINE_S = 30.0
_NR_FINIT_MODULE = {"x86_64": 313, "aarch64": 273}
_RESTART = 0x01234567  # with `-no-reboot` the machine ends, and that needs no power management
_HIDDEN = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
_PLAIN = linux.MS_NOSUID | linux.MS_NODEV
_BOUND = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}


def main(arguments: Sequence[str]) -> None:
    """Make the sandbox and serve it: MEMORY_MB PROCESSES SCRATCH_MB EGRESS COMMAND…, where 0 means no limit."""
    try:
        memory_mb, processes, scratch_mb = (int(each) for each in arguments[1:4])
        governed, command = arguments[4] == "egress", list(arguments[5:])
        os.umask(0o022)
        _kernel()
        line = os.open(_port(), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        _root(scratch_mb)
        group = _group(memory_mb, processes)
        carrier = Line(line, first=1, places={Place.SUPERVISOR: _to_supervisor})
        carrier.listen(_listen(_REPORT, 0o600), Place.REPORT)
        if governed:
            carrier.listen(_listen(_EGRESS, 0o666), Place.EGRESS)
        write("/proc/sys/kernel/modules_disabled", "1")
        supervisor = _start(command, group)
        carrier.watch(os.pidfd_open(supervisor), _off)
        carrier.run()
    except BaseException as error:
        _say(f"{type(error).__name__}: {error}")
    finally:
        _off()


def _kernel() -> None:
    """Mount what this process needs, and load the modules."""
    for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("cgroup2", _CGROUP)):
        os.makedirs(place, exist_ok=True)
        linux.mount(kind, place, kind, _HIDDEN if kind != "devtmpfs" else linux.MS_NOSUID)
    with open(MODULE_ORDER, encoding="utf-8") as order:
        names = order.read().split()
    for name in names:
        file = os.open(f"{MODULES}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        libc.system_call(f"load {name}", _NR_FINIT_MODULE[linux.ARCH], file, b"", 0)
        os.close(file)
        os.unlink(f"{MODULES}/{name}")
    linux.bring_up_loopback()
    socket.sethostname("carrel")


def _port() -> str:
    """Return the device of the line. The kernel makes it a moment after its module was loaded."""
    deadline = time.monotonic() + _PORT_DEADLINE_S
    ports = "/sys/class/virtio-ports"
    while time.monotonic() < deadline:
        for name in os.listdir(ports) if os.path.isdir(ports) else ():
            with open(f"{ports}/{name}/name", encoding="utf-8") as file:
                if file.read().strip() == PORT and os.path.exists(f"/dev/{name}"):
                    return f"/dev/{name}"
        time.sleep(0.005)
    raise OSError("the machine has no line to its host")


def _root(scratch_mb: int) -> None:
    """Mount the root of the sandbox at `/root`."""
    os.makedirs(_ROOT, exist_ok=True)
    linux.mount(TAG, _ROOT, "virtiofs", _PLAIN)
    os.listdir(_ROOT + inside.WORKSPACE)  # now it is a mount of its own, which stays writable
    workspace = linux.open_tree(_ROOT + inside.WORKSPACE)
    _protect("")
    linux.move_mount(workspace, _ROOT + inside.WORKSPACE)
    os.close(workspace)
    _memory("/dev", "size=64k,mode=0755", linux.MS_NOSUID | linux.MS_NOEXEC)
    os.umask(0)
    for name, numbers in _DEVICES.items():
        os.mknod(f"{_ROOT}/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(*numbers))
    os.umask(0o022)
    for name, target in _LINKS.items():
        os.symlink(target, f"{_ROOT}/dev/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{_ROOT}/dev/{name}")
    _protect("/dev")
    terminals = "newinstance,ptmxmode=0666,mode=0620,gid=5"
    linux.mount("devpts", f"{_ROOT}/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, terminals)
    own = f",uid={AGENT},gid={AGENT}"
    _memory("/dev/shm", f"size={max(8, scratch_mb // 4)}m,mode=1777{own}", _HIDDEN)
    _memory("/tmp", f"size={scratch_mb}m,mode=1777{own}", _PLAIN)
    _memory(inside.HOME, f"size={scratch_mb}m,mode=0755{own}", _PLAIN)
    _memory(inside.CONTROL, "size=1m,mode=0711", _HIDDEN)
    for path in (_PRIVATE, f"{_PRIVATE}/secrets"):
        os.mkdir(_ROOT + path, 0o700)
    _memory(f"{_PRIVATE}/secrets", f"size=8m,nr_inodes=2048,mode=0700{own}", _HIDDEN)
    _bind(f"{_ROOT}{_PRIVATE}/secrets", inside.SECRETS, _BOUND | linux.MOUNT_ATTR_NOEXEC)
    _bind(inside.BUNDLE, inside.BUNDLE, _BOUND)


def _protect(place: str) -> None:
    """Make a mount read-only. For the host's part of the root that is a second lock: the first is on the host."""
    mounted = os.open(_ROOT + place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    linux.set_mount_attributes(mounted, linux.MOUNT_ATTR_RDONLY)
    os.close(mounted)


def _memory(place: str, options: str, flags: int) -> None:
    linux.mount("tmpfs", _ROOT + place, "tmpfs", flags, options)


def _bind(source: str, target: str, attributes: int) -> None:
    tree = linux.open_tree(source)
    linux.set_mount_attributes(tree, attributes | linux.MOUNT_ATTR_RDONLY)
    linux.move_mount(tree, _ROOT + target)
    os.close(tree)


def _group(memory_mb: int, processes: int) -> int:
    """Return the group of the sandbox, with its limits."""
    write(f"{_CGROUP}/cgroup.subtree_control", "+memory +pids")
    path = f"{_CGROUP}/sandbox"
    os.mkdir(path)
    if memory_mb:
        write(f"{path}/memory.max", str(memory_mb << 20))
    if processes:
        write(f"{path}/pids.max", str(processes))
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _listen(path: str, mode: int) -> socket.socket:
    """Listen at a path, which the kernel does not show to the agent: only its last name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    folder, name = os.path.split(_ROOT + path)
    os.chdir(folder)
    listener.bind(name)
    os.chdir("/")
    os.chmod(_ROOT + path, mode)
    listener.listen(_BACKLOG)
    return listener


def _to_supervisor() -> socket.socket:
    """Connect to the supervisor. Its queue may be full for a moment."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        connected.connect(_ROOT + _SUPERVISOR)
    except BaseException:
        connected.close()
        raise
    return connected


def _start(command: list[str], group: int) -> int:
    """Start the supervisor in namespaces of its own; return its process."""
    spaces = linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    pid = linux.fork_into(spaces, group)
    if pid:
        return pid
    try:
        os.setsid()
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("proc", f"{_ROOT}/proc", "proc", _HIDDEN)
        os.chdir(_ROOT)
        linux.mount(_ROOT, "/", None, linux.MS_MOVE)
        os.chroot(".")
        os.chdir("/")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nothing = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1):
            os.dup2(nothing, number)
        os.execve(command[0], command, {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})  # noqa: S606 - the supervisor
    except BaseException as error:
        _say(f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


def _say(words: str) -> None:
    os.write(2, f"carrel: {words[:1000]}\n".encode())


def _off() -> None:
    """Switch the machine off: its kernel has nothing that must be written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        libc.call("reboot", _RESTART)
        time.sleep(1)
