"""The supervisor as a program: PID 1 of a container, a gVisor sandbox or a virtual machine.

`carrel.isolation` forks the supervisor into a sandbox that it has built itself. Here another runtime has built it, and
starts this module from the bundle (see `carrel.providers.bundle`). It connects to a socket in the control directory,
which the server shares with it, and waits for its facts. The server may send them much later: until then the sandbox is
nobody's. It is root of the sandbox, so that it can listen in that directory, which the agent cannot enter; with the
facts it becomes the agent and gives up everything else. The server gets `ready`, or the reason why not, before any code
of an agent runs. When the server goes away before that, this process ends.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from carrel.primitives import libc
from carrel.primitives.kernel_files import write
from carrel.supervisor import app
from carrel.supervisor.memory_watch import watch_memory
from carrel.supervisor.relay import Carry, relay_all, to_socket
from carrel.supervisor.reset import PLACES

MOST_FACTS = 1024 * 1024
"""The most bytes of the facts."""
BACKLOG, PROXY_BACKLOG = 128, 4096
_CHUNK = 65536
READY = b"ready"
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 24, 36, 38
_MS_BIND, _MNT_DETACH = 4096, 2
_CAPABILITY_HEADER = b"\x22\x05\x08\x20" + bytes(4)
_NO_CAPABILITIES = bytes(24)


@dataclass(frozen=True)
class ProgramImage:
    """How a sandbox uses its image; see `carrel.isolation.sandbox.ImageSpec`."""

    user: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    working_directory: str = ""
    writable: bool = False
    """Whether the root can be changed, which no runtime but our own can do."""
    home: str = ""
    """The home of a build; others have that of every sandbox."""


@dataclass(frozen=True)
class ProgramFacts:
    """The facts about a sandbox, as the server sends them.

    `socket` is where to listen for the server; empty where that is known already. `secrets` is a directory that the
    agent sees elsewhere and cannot change; empty where there is none. `network` is `none`, `allowlist` or `direct`.
    With an allow list, `egress` is the socket behind the port of the proxy, if one can be shown. `limits` are resource
    limits by their names; `seccomp` is a filter of system calls in base64, besides that of the runtime.
    """

    socket: str
    uid: int
    gid: int
    workspace: str
    home: str
    network: str
    proxy_port: int
    egress: str = ""
    secrets: str = ""
    env: dict[str, str] = field(default_factory=dict)
    memory_mb: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    seccomp: str = ""
    trust: bool = False
    image: Mapping[str, Any] | None = None
    watch_memory: bool = False
    """Whether the supervisor has to hold the sandbox to `memory_mb`."""
    late: str = ""
    """The directory below which the workspace was mounted at its usual path; empty where it is at its place already."""
    kernel_files: dict[str, str] = field(default_factory=dict)
    """Files of the sandbox's kernel that root writes, each with its text: limits that the agent cannot change."""


@dataclass
class ProgramDetails:
    """The facts as the supervisor's own code wants them; see `carrel.supervisor.app.SandboxFacts`."""

    listener: socket.socket
    workspace: str
    home: str
    env: dict[str, str]
    memory_mb: int | None
    oom_score_fd: int
    secrets_fd: int
    proxy_port: int | None
    refusing: socket.socket | None
    trust: bool
    image: ProgramImage | None
    isolated: bool = True
    own_path: str = ""


def receive_facts(connection: socket.socket) -> ProgramFacts | None:
    """Wait for the facts, which end where the server stops writing; None if it goes away without any.

    Raises `ValueError`, `TypeError` or `OSError`.
    """
    text = bytearray()
    while part := connection.recv(_CHUNK):
        text += part
        if len(text) > MOST_FACTS:
            raise ValueError(f"the facts of the sandbox have more than {MOST_FACTS} bytes")
    return ProgramFacts(**json.loads(text)) if text else None


def main(arguments: list[str]) -> None:
    """Become the supervisor of this sandbox. Never returns."""
    server: socket.socket | None = None
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would end PID 1
        os.chdir("/")
        prepared = app.prepare()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        server.connect(arguments[1])
        facts = receive_facts(server)
        if facts is None:
            os._exit(0)
        accept = app.on_unix_socket(set())
        take_charge(facts, prepared, lambda: _listen(facts.socket), accept, to_socket(facts.egress))
        server.sendall(READY)
        server.close()
        prepared.loop.run_forever()
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:2000]
        if server is not None and server.fileno() >= 0:
            server.sendall(f"failed: {words}".encode())
        else:
            os.write(2, f"carrel supervisor: {words}\n".encode())
    finally:
        os._exit(1)


def take_charge(
    facts: ProgramFacts,
    prepared: app.Prepared,
    listen: Callable[[], socket.socket],
    accept: app.Accept,
    carry: Carry,
) -> None:
    """Become the agent, and accept connections. `listen` is called for as long as this is root. `carry` takes the
    outbound connections.
    """
    if facts.late:
        take_workspace(facts)
    for path, text in facts.kernel_files.items():
        write(path, text)
    os.umask(0o077)
    listener = listen()
    secrets = os.open(facts.secrets, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if facts.secrets else -1
    port = None if facts.network == "direct" else _listen_locally(facts.proxy_port)
    if os.getpid() == 1:
        hold_proc()
    become_agent(facts)
    os.umask(0o022)  # the agent's files are as on every host
    if facts.network == "allowlist" and port is not None:
        relaying = prepared.loop.create_task(relay_all(port, carry))
        relaying.add_done_callback(lambda _: os._exit(1))  # it only ends by a mistake of ours
    if facts.watch_memory and facts.memory_mb is not None:
        places = (*PLACES, facts.home)
        watching = prepared.loop.create_task(watch_memory(facts.memory_mb << 20, places))
        watching.add_done_callback(lambda _: os._exit(1))
    oom_score = libc.hide_from_children()
    if facts.watch_memory:  # the kernel of this sandbox ends nothing for lack of memory
        os.close(oom_score)
        oom_score = -1
    details = ProgramDetails(
        listener,
        facts.workspace,
        facts.home,
        dict(facts.env),
        facts.memory_mb,
        oom_score,
        secrets,
        None if port is None else facts.proxy_port,
        port if facts.network == "none" else None,
        facts.trust,
        None if facts.image is None else ProgramImage(**facts.image),
    )
    libc.hide_arguments()
    app.serve(details, prepared, accept)


def take_workspace(facts: ProgramFacts) -> None:
    """Mount the workspace at its place, and unmount the directory in which it came."""
    source, target = os.fsencode(facts.late + facts.workspace), os.fsencode(facts.workspace)
    libc.call("mount", source, target, None, _MS_BIND, None, name=f"mounting {facts.workspace}")
    libc.call("umount2", os.fsencode(facts.late), _MNT_DETACH, name=f"unmounting {facts.late}")


def _listen(path: str) -> socket.socket:
    """Listen for the server. The socket belongs to root, as the directory does, so the agent can neither connect to it
    nor replace it. The kernel shows everybody the name that it is bound to: so that is not the path.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    os.chdir(os.path.dirname(path))
    listener.bind(os.path.basename(path))
    os.chdir("/")
    listener.listen(BACKLOG)
    return listener


def _listen_locally(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(("127.0.0.1", port))
    listener.listen(PROXY_BACKLOG)
    return listener


def hold_proc() -> None:
    """Open the lists of this process's descriptors while it is root; they stay open for good.

    The kernel of gVisor gives such a list to the user that its process is when it is first looked at, and remembers
    that for as long as it is open. So the agent, as who this process goes on, cannot read them.
    """
    for place in ("/proc/1/fd", "/proc/1/fdinfo", "/proc/1/task/1/fd", "/proc/1/task/1/fdinfo"):
        os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def become_agent(facts: ProgramFacts) -> None:
    """Give up every privilege for good. Raises `OSError` if one is left."""
    if os.getpid() != 1:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for name, value in facts.limits.items():
        _lower_limit(getattr(resource, name), value)
    if os.geteuid() == 0:
        _drop_bounding_set()
        os.setgroups([])
        os.setresgid(facts.gid, facts.gid, facts.gid)
        os.setresuid(facts.uid, facts.uid, facts.uid)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if facts.seccomp:
        libc.filter_system_calls(base64.b64decode(facts.seccomp))
    libc.call("capset", _CAPABILITY_HEADER, _NO_CAPABILITIES)
    if os.getresuid() != (facts.uid,) * 3 or os.getresgid() != (facts.gid,) * 3:
        raise OSError("the supervisor could not become the user of the agent")


def _drop_bounding_set() -> None:
    """Drop all capabilities from the bounding set, so that no exec could bring one back. A runtime that does not let us
    do it has set no_new_privs, which means the same.
    """
    for capability in range(64):
        try:
            libc.prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            return  # the first number that the kernel does not know, or not permitted


def _lower_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main(sys.argv)
