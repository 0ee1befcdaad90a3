"""The zygote: a small single-threaded process that has imported the supervisor once and forks one sandbox per request.

It has no secrets and no network, it never runs agent code, and its own mount namespace has little more than the base
root of the sandboxes. It exchanges JSON and descriptors over a SEQPACKET socket. Run as `python -m
carrel.isolation.zygote`; the module of the supervisor is an argument, so this one does not import it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter
from types import MappingProxyType
from typing import Any, cast

from carrel.errors import CarrelError, PlatformError
from carrel.isolation import cgroups, inside, linux, sandbox, watchdog
from carrel.isolation.forker import Child, SandboxForker, SupervisorModule, kill
from carrel.primitives import libc

MAX_MESSAGE = sandbox.MAX_MESSAGE
SPARES = 2
QUIET_S = 0.01
LONG_S = 3600.0
LINGER_S = 30.0
RETRY_S = 0.002
SETUP_DEADLINE_S = 30.0
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
NETWORKS = frozenset({"none", "allowlist", "bridge", "host"})


class Zygote:
    """The event loop: takes requests, forks sandboxes, and removes what ended ones leave."""

    def __init__(self, listener: socket.socket, supervisor: SupervisorModule, isolate: bool):
        self._listener = listener
        self._supervisor = supervisor
        self._isolate = isolate
        self._forker = SandboxForker(supervisor, isolate=isolate)
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}  # by pid
        self._named: dict[str, Child] = {}
        self._spares: list[Child] = []
        self._spares_wanted = SPARES if isolate else 0
        self._connections: set[socket.socket] = set()
        self._stopping = False
        self._next_look = 0.0
        self._next_count = 0.0
        self._counted_at = 0
        self._counting = False
        self._shared: list[str] = []

    def prepare(
        self,
        workspaces: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        folder_roots: Sequence[str] = (),
        images: str = "",
    ) -> None:
        """Prepare for the first fork. See `zygote_root.enter`."""
        self._forker.prepare(workspaces, shared, folder_roots, images)
        self._shared = sorted(shared)

    def describe(self) -> dict[str, Any]:
        """Return the features and the state of this zygote."""
        return {
            "pid": os.getpid(),
            "sandboxes": len(self._named),
            "connections": len(self._connections),
            "shared": self._shared,
            **self._forker.describe(),
        }

    # the loop

    def run(self) -> None:
        """Serve until a stop request, or until there is no connection and no sandbox."""
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        # PID 1 of a sandbox inherits these handlers, and processes inside can send it every signal that has one. So the
        # only handler is that of SIGCHLD, which does nothing.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(wake_read, selectors.EVENT_READ, _drain)
        gc.collect()
        gc.freeze()
        idle_until = time.monotonic() + LINGER_S
        while not (self._stopping and not self._children) and time.monotonic() < idle_until:
            events = self._selector.select(self._patience(idle_until))
            for key, _events in events:
                key.data(key.fileobj)
            self._reap()
            for child in [child for child in self._children.values() if child.reaped]:
                self._clean_up(child)
            self._check_deadlines()
            self._watch()
            if self._connections or self._named:
                idle_until = math.inf
                if not events:
                    self._refill()
            elif idle_until == math.inf:  # the last connection and the last sandbox are gone
                self._stop()
        self._forker.close()

    def _patience(self, idle_until: float) -> float | None:
        waits = [LONG_S if idle_until == math.inf else max(0.0, idle_until - time.monotonic())]
        if self._lacks_spares():
            waits.append(QUIET_S)  # requests that wait now come before spares for later ones
        if any(child.reaped for child in self._children.values()):
            waits.append(RETRY_S)  # a dying process still holds a group of a dead sandbox
        if any(child.watched for child in self._named.values()):
            waits.append(watchdog.INTERVAL_S)
        if any(child.deadline < math.inf for child in self._children.values()):
            waits.append(1.0)
        return min(waits)

    def _lacks_spares(self) -> bool:
        return len(self._spares) < self._spares_wanted and bool(self._connections) and not self._stopping

    def _watch(self) -> None:
        """Enforce memory limits where no cgroup does."""
        now = time.monotonic()
        if now >= self._next_look:
            watched = [child.watched for child in self._named.values() if child.watched and not child.reaped]
            if watched:
                if watchdog.enforce_limits(watched):
                    self._next_count = 0.0
                self._count_shared(watched)
                self._next_look = time.monotonic() + watchdog.INTERVAL_S

    def _count_shared(self, watched: Sequence[watchdog.WatchedSandbox]) -> None:
        """Start counting shared memory if it is due, in a fork, because it can take long."""
        on_machine = watchdog.machine_shared()
        due = time.monotonic() >= self._next_count
        if self._stopping or self._counting or not (due or abs(on_machine - self._counted_at) >= watchdog.COUNT_STEP):
            return
        self._counted_at = on_machine
        self._next_count = time.monotonic() + watchdog.COUNT_INTERVAL_S
        read_end, write_end = os.pipe()
        try:
            if os.fork() == 0:
                try:
                    libc.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
                    linux.close_all_but({0, 1, 2, write_end})  # its copies of sockets would keep connections open
                    os.nice(5)
                    with open(write_end, "wb") as pipe:
                        pipe.write(watchdog.count_all(watched))
                finally:
                    os._exit(0)
        except OSError:
            os.close(read_end)
            return
        finally:
            os.close(write_end)
        self._counting = True
        received, kills = bytearray(), {each.pid: each.kills for each in watched}
        self._selector.register(read_end, selectors.EVENT_READ, lambda pipe: self._counted(pipe, received, kills))

    def _counted(self, pipe: int, received: bytearray, kills: Mapping[int, int]) -> None:
        """Read the result of the fork that counts, and use it when it is complete."""
        if chunk := os.read(pipe, 65536):
            received += chunk
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        self._counting = False
        found = watchdog.parse_counted(bytes(received))
        for child in self._named.values():
            if child.watched is not None and child.pid in found:
                child.watched.take_count(found[child.pid], kills[child.pid])
        self._next_look = 0.0

    def _stop(self) -> None:
        self._stopping = True
        self._spares.clear()
        for child in self._children.values():
            self._end(child)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if now > child.deadline:
                child.deadline = now + SETUP_DEADLINE_S
                kill(child.pid)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._request)

    def _hang_up(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection)
            connection.close()

    def _answer(self, connection: socket.socket | None, seq: int, descriptors: Sequence[int] = (), **body: Any) -> None:
        if connection is None or connection not in self._connections:
            return
        try:
            socket.send_fds(connection, [json.dumps({"seq": seq, **body}).encode()], descriptors)
        except OSError:
            self._hang_up(connection)

    def _request(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            message, fds, _flags, _address = socket.recv_fds(connection, MAX_MESSAGE, inside.MOST_DESCRIPTORS)
        except OSError:
            message = b""
        if not message:
            self._hang_up(connection)
            return
        seq = 0
        try:
            body = json.loads(message)
            seq, op = int(body.pop("seq")), body.pop("op")
            if self._stopping and op in {"start", "describe"}:
                raise PlatformError("the zygote is stopping")
            if op == "start":
                spec = sandbox.Spec(**body)
                if len(fds) != 1 + spec.masked + bool(spec.folder) + len(spec.mounts):
                    raise PlatformError("a start request carries one listening socket, and its masks if it has any")
                self._start(connection, seq, spec, fds)
            elif op == "folder":
                self._forker.open_folder(body, fds[0])
                self._answer(connection, seq)
            elif op == "remove":
                self._remove(connection, seq, body["id"])
            elif op == "end":  # a sandbox without isolation whose own zygote is gone
                if cgroups.start_time(int(body["pid"])) == int(body["start_time"]) != 0:
                    self._end_below(int(body["pid"]))
                self._answer(connection, seq)
            elif op == "usage":
                usage: dict[str, Any] = {**self._usage(body["id"])}
                self._answer(connection, seq, known=body["id"] in self._named, **usage)
            elif op == "usages":
                self._answer(connection, seq, usages={name: self._usage(name) for name in body["ids"]})
            elif op == "held":
                self._look_for_held(connection, seq, self._named.get(body["id"]))
            elif op == "protect":
                self._protect(connection, seq, self._named.get(body["id"]), body["paths"])
            elif op == "way_out":
                named = self._named.get(body["id"])
                proxy_listener = named.proxy_listener if named else None
                self._answer(
                    connection,
                    seq,
                    () if proxy_listener is None else (proxy_listener.fileno(),),
                    known=named is not None,
                )
            elif op == "list":
                self._answer(connection, seq, ids=list(self._named))
            elif op == "describe":
                self._answer(connection, seq, **self.describe())
            elif op == "stop":
                self._answer(connection, seq)
                self._stop()
            else:
                raise PlatformError(f"the zygote does not know '{op}'")
        except (OSError, CarrelError, ValueError, TypeError, KeyError) as error:
            self._answer(connection, seq, error=f"{error}")
        finally:
            for descriptor in fds:
                os.close(descriptor)

    # sandboxes

    def _start(self, connection: socket.socket, seq: int, spec: sandbox.Spec, fds: list[int]) -> None:
        if spec.id in self._named:
            raise PlatformError(f"sandbox {spec.id} runs already")
        if not spec.folder and ("/" in spec.workspace or spec.workspace in {"", ".", ".."}):
            raise PlatformError(f"not a workspace name: {spec.workspace!r}")
        if self._isolate and spec.network not in NETWORKS:
            raise PlatformError(f"not a network this zygote makes: {spec.network!r}")
        if spec.network == "host":  # spares have their own network
            child = self._fork_child(rehearse=False, own_network=False)
        else:
            child = self._spares.pop() if self._spares else self._fork_child(rehearse=False)
        child.name, child.asked_by, child.seq = spec.id, connection, seq
        child.set_network(spec.network)
        child.deadline = time.monotonic() + SETUP_DEADLINE_S
        self._named[spec.id] = child
        try:
            self._forker.configure(child, spec, *fds)
        except (OSError, CarrelError) as error:
            child.asked_by = None  # the error below is the answer
            del self._named[spec.id]
            kill(child.pid)
            raise PlatformError(f"sandbox {spec.id} could not be set up: {error}") from error

    def _fork_child(self, *, rehearse: bool, own_network: bool = True) -> Child:
        child = self._forker.fork(rehearse=rehearse, own_network=own_network)
        self._children[child.pid] = child
        self._selector.register(child.orders, selectors.EVENT_READ, lambda _s: self._receive(child))
        return child

    def _refill(self) -> None:
        """Fork a spare while no request waits."""
        if self._lacks_spares():
            try:
                self._spares.append(self._fork_child(rehearse=True))
            except (OSError, PlatformError) as error:
                self._spares_wanted = 0  # the next request gets the reason
                print(f"no more spare sandboxes: {error}", file=sys.stderr, flush=True)  # noqa: T201 - our log

    def _receive(self, child: Child) -> None:
        try:
            word, fds, _flags, _address = socket.recv_fds(child.orders, 4096, 4)
        except OSError:
            word, fds = b"", []
        if word == sandbox.PROXY_LISTENER and fds:
            child.take_proxy_listener(fds[0])
            return
        if word == sandbox.NETWORK and fds:
            child.network_fd = fds[0]
            return
        if word == sandbox.IMAGE_USERS and fds:
            child.image_users = fds[0]
            return
        if word == sandbox.MEMORY and fds:
            child.take_memory(fds)
            return
        self._selector.unregister(child.orders)
        child.orders.close()
        child.deadline = math.inf
        if word == b"ready":
            try:
                with child.network_descriptors() as ends:
                    child.ready = True
                    self._spares_wanted = SPARES if self._isolate else 0
                    self._answer(child.asked_by, child.seq, ends, pid=child.pid, start_time=child.started)
                    return
            except OSError as error:
                word = f"failed: {error}".encode()
        words = word.decode(errors="replace") or "the new process died while it was set up"
        if child in self._spares:
            self._spares.remove(child)
            self._spares_wanted = 0  # the next request gets the reason
            print(f"no more spare sandboxes: {words}", file=sys.stderr, flush=True)  # noqa: T201 - our log
        if self._named.get(child.name) is child and not child.waiting:
            del self._named[child.name]  # the caller may try again at once
        self._answer(child.asked_by, child.seq, error=f"sandbox {child.name} did not start: {words}")
        kill(child.pid)

    def _remove(self, connection: socket.socket, seq: int, name: str) -> None:
        child = self._named.get(name)
        if child is None:
            self._answer(connection, seq, known=False)
            return
        child.waiting.append((connection, seq))
        self._end(child)

    def _end(self, child: Child) -> None:
        if child.reaped:
            return
        if not self._isolate:
            self._end_below(child.pid)
        kill(child.pid)

    def _end_below(self, pid: int) -> None:
        """Kill the descendants of a process without a PID namespace. It is stopped first, so it starts no more."""
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return
        self._supervisor.end_below(pid)

    def _usage(self, name: str) -> dict[str, int]:
        """Return what a sandbox uses, as `cgroups.group_usage` does, as far as it is known."""
        child = self._named.get(name)
        if child is None:
            return {}
        found = self._forker.cgroups.usage(child.group)
        if child.watched:
            found |= {
                "memory_bytes": child.watched.used,
                "memory_peak_bytes": child.watched.peak,
                "oom_kills": child.watched.kills,
            }
            found.setdefault("cpu_us", child.watched.cpu_ticks * 1_000_000 // _TICKS_A_SECOND)
        return found

    def _look_for_held(self, connection: socket.socket, seq: int, child: Child | None) -> None:
        """Answer in a fork: with very many open files the measurement can take a minute."""
        if child is None:
            self._answer(connection, seq, bytes=0)
        elif os.fork() == 0:
            try:
                libc.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # it has copies of every socket
                os.nice(5)
                connection.send(json.dumps({"seq": seq, "bytes": self._forker.held(child)}).encode())
            finally:
                os._exit(0)

    def _protect(self, connection: socket.socket, seq: int, child: Child | None, paths: Sequence[str]) -> None:
        """Answer in a fork, which enters the namespaces of the sandbox."""
        if child is None or not child.namespaces:
            self._answer(connection, seq, known=False)
        elif os.fork() == 0:
            try:
                libc.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # it has copies of every socket
                child.make_read_only_again(paths)
                connection.send(json.dumps({"seq": seq, "known": True}).encode())
            except OSError as error:
                connection.send(json.dumps({"seq": seq, "error": str(error)}).encode())
            finally:
                os._exit(0)

    def _reap(self) -> None:
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._children[pid].reaped = True

    def _clean_up(self, child: Child) -> None:
        if not self._forker.cgroups.remove(child.group):
            return
        while child.orders.fileno() >= 0:  # its last messages
            self._receive(child)
        child.close()
        del self._children[child.pid]
        if self._named.get(child.name) is child:
            del self._named[child.name]
        for connection, seq in child.waiting:
            self._answer(connection, seq, known=True)


def _drain(wake: socket.socket) -> None:
    try:
        while wake.recv(4096):
            pass
    except BlockingIOError:
        pass


def _seal_imports() -> None:
    """Let no module be imported from a file any more. A sandbox may have the root of an image, whose files are hostile
    and which may have none: so everything is loaded before the first fork, and what was forgotten fails everywhere.
    """
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter]
    sys.path.clear()
    sys.path_importer_cache.clear()


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `python -m carrel.isolation.zygote`."""
    parser = argparse.ArgumentParser(prog="carrel-zygote")
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--workspaces", required=True)
    parser.add_argument("--supervisor", required=True, help="module that has `main` and `warm`")
    parser.add_argument("--share", action="append", default=[], help="PATH=SOURCE: seen read-only in every sandbox")
    parser.add_argument("--folder-root", action="append", default=[], help="folders below it may be workspaces")
    parser.add_argument("--images", default="", help="roots of images are below it")
    parser.add_argument("--plain", action="store_true", help="fork without any isolation")
    options = parser.parse_args(arguments)
    gc.disable()  # while modules are loaded it finds nothing
    # asyncio imports TLS if it can; no sandbox needs it, and it would cost every fork memory.
    sys.modules["ssl"] = cast(Any, None)
    supervisor = cast(SupervisorModule, importlib.import_module(options.supervisor))
    sys.dont_write_bytecode = True  # its sandboxes must not
    listener = socket.socket(fileno=options.listen_fd)
    zygote = Zygote(listener, supervisor, isolate=not options.plain)
    try:
        supervisor.warm()
        gc.enable()  # sandboxes inherit it
        shared = dict(each.split("=", 1) for each in options.share)
        zygote.prepare(options.workspaces, shared, options.folder_root, options.images)
    except (OSError, CarrelError) as error:
        # The first connection gets the reason.
        connection, _ = listener.accept()
        connection.settimeout(SETUP_DEADLINE_S)
        connection.recv(MAX_MESSAGE)  # an unread request would reset the connection before the reason is read
        connection.send(json.dumps({"seq": 0, "error": str(error)}).encode())
        sys.exit(1)
    libc.hide_arguments()
    _seal_imports()
    zygote.run()


if __name__ == "__main__":
    main()
