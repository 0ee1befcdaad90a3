"""The process on the host that keeps one virtual machine: it starts the machine's programs and carries its connections.

It is the main program of a process of root, like `carrel.isolation.staging`, whose order it carries out first. Then it
gives up everything: it has its own user id, which no other process of the host has, and sees nothing of the host but
the control directory of its sandbox. It is no child of the server and outlives it. When it ends, so does the machine;
when a program of the machine ends, so does it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from carrel.isolation import ids, linux, seccomp, staging
from carrel.isolation.machine import confined
from carrel.isolation.machine.confined import Confined
from carrel.isolation.machine.frames import BrokenLine, Place
from carrel.isolation.machine.line import Connect, Line
from carrel.isolation.staging import StageOrder
from carrel.primitives import libc
from carrel.primitives.kernel_files import write

_BACKLOG = 4096
_CONSOLE = 4096
"""The most bytes of the console that are kept."""
_CONTROL = "/control"
_REPORT, _EGRESS = f"{_CONTROL}/private/report", f"{_CONTROL}/egress"


@dataclass(frozen=True)
class MachineOrder:
    """What to keep: the root to build, and two programs that start in the empty directory `box`.

    `server` and `machine` are their commands, `packages` further directories of programs for both. The file server gets
    the root at `carrel.isolation.machine.confined.EXPORT` and a listening socket as descriptor 3; the machine gets
    `files`, a connection to the file server as 3 and the line as 4. `socket` is where the server reaches the
    supervisor; `control` is the control directory. `devices` are of the machine, each with its group.
    """

    stage: StageOrder
    box: str
    server: Sequence[str]
    machine: Sequence[str]
    files: Mapping[str, str]
    packages: Sequence[str]
    devices: Mapping[str, int]
    control: str
    socket: str
    egress: bool
    disk_mb: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))


def read(text: str) -> MachineOrder:
    fields = json.loads(text)
    return MachineOrder(**{**fields, "stage": staging.of(fields["stage"])})


def main() -> None:
    """Carry out the order whose path is read from standard input. Never returns."""
    try:
        path = sys.stdin.readline().rstrip("\n")
        if not path:
            os._exit(0)  # the server is gone, or needs no further sandbox
        with open(path, encoding="utf-8") as file:
            order = read(file.read())
        if os.fork():
            os._exit(0)  # the keeper is no child of the server, which may end before it
        os.setsid()
        with open(os.devnull, "r+b") as nothing:
            os.dup2(nothing.fileno(), 0)
        for group in order.stage.groups:
            write(group, "0")
        _keep(order)
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(staging.FAILED)


def _keep(order: MachineOrder) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    slot, lock = ids.HostIds().take()
    own, owner = ids.owner(slot), order.stage.owner
    users = linux.user_namespace(*(2 * [f"0 0 1\n{owner} {ids.agent(slot, idmap=True)} 1\n"]))  # masks are made by root
    mapped = staging.stage(order.stage, users)
    os.close(users)
    _own_control(order, own)
    listener = _listen(order.socket)
    console, line, programs = _start(order, own, ids.agent(slot, idmap=mapped))
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    _give_up(order, own)
    os.set_inheritable(lock, False)
    said = bytearray()

    def listen_to_console() -> None:
        part = os.read(console, _CONSOLE)
        if not part:
            raise BrokenLine("the machine ended")
        said.extend(part)
        del said[:-_CONSOLE]

    def report() -> socket.socket:
        connected = _connect(_REPORT)
        os.dup2(nothing, 2)  # from now on the supervisor answers, and the server has closed its end
        return connected

    places: dict[Place, Connect] = {Place.REPORT: report}
    if order.egress:
        places[Place.EGRESS] = partial(_connect, _EGRESS)
    carrier = Line(line.detach(), first=2, places=places)
    carrier.listen(listener, Place.SUPERVISOR)
    carrier.watch(console, listen_to_console)
    for name, program in programs.items():
        carrier.watch(os.pidfd_open(program), partial(_ended, name, program))
    try:
        carrier.run()
    except BrokenLine as error:
        os.set_blocking(console, False)
        try:
            said += os.read(console, _CONSOLE)
        except OSError:
            pass
        text = " ".join(said.decode(errors="replace").split())[-1000:]
        os.write(2, f"{error}{': ' if text else ''}{text}\n".encode())


def _own_control(order: MachineOrder, own: int) -> None:
    """Let this process connect to the sockets of the server in the control directory later, when it is not root."""
    private = f"{order.control}/private"
    for path in (private, f"{private}/report"):
        os.chown(path, own, own)


def _listen(path: str) -> socket.socket:
    """Listen where only root can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    umask = os.umask(0o177)
    listener.bind(path)
    os.umask(umask)
    listener.listen(_BACKLOG)
    return listener


def _start(order: MachineOrder, own: int, agent: int) -> tuple[int, socket.socket, dict[str, int]]:
    """Start both programs; return what reads the machine's console, this end of the line, and the processes. The file
    server is the user `agent` of the host.
    """
    files = {path: path for path in order.packages}
    console, output = os.pipe()
    here, there = socket.socketpair()
    path = f"{order.box}.files"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asked,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking,
        there,
    ):
        asked.bind(path)
        asked.listen(1)
        asking.connect(path)
        os.unlink(path)
        owner = order.stage.owner
        server = Confined(
            order.server,
            owner,
            owner,
            {**files, confined.EXPORT: order.stage.root},
            descriptors=(asked.fileno(),),
            served_as=agent,
            file_size=order.disk_mb << 20,
        )
        machine = Confined(
            order.machine,
            own,
            own,
            {**files, **order.files},
            devices=tuple(order.devices),
            groups=tuple(order.devices.values()),
            descriptors=(asking.fileno(), there.fileno()),
        )
        pair = {"the file server": server, "QEMU": machine}
        programs = {name: confined.start(each, order.box, output) for name, each in pair.items()}
    os.close(output)
    return console, here, programs


def _ended(name: str, process: int) -> None:
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    raise BrokenLine(f"{name} ended with status {code}" if code >= 0 else f"{name} was ended by signal {-code}")


def _give_up(order: MachineOrder, own: int) -> None:
    """Leave everything of the host but the control directory, and become an unknown user."""
    linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    linux.mount("tmpfs", order.box, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, "size=64k,mode=0755")
    os.mkdir(order.box + _CONTROL)
    tree = linux.open_tree(order.control)
    linux.set_mount_attributes(tree, linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
    linux.move_mount(tree, order.box + _CONTROL)
    os.close(tree)
    linux.pivot_into(order.box)
    os.umask(0o077)
    linux.drop_bounding_set()
    os.setgroups([])
    os.setresgid(own, own, own)
    os.setresuid(own, own, own)
    linux.drop_capabilities()
    libc.prctl(linux.PR_SET_DUMPABLE, 0)
    seccomp.install(seccomp.build())


def _connect(path: str) -> socket.socket:
    """Connect without waiting."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return connected


if __name__ == "__main__":
    main()
