"""The ground of tests of the way out: an outside of real servers in a thread of its own, and a real `carrel serve`
beside it, with its command and its client.

Knows nothing of what is inside of carrel.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import dns.message
import dns.rdatatype
import dns.rrset
from tests.support.fork_server import Forked, start
from tests.support.fork_server import run as run_command
from tests.support.servers import readable
from tests.support.wayout import tls_for

from carrel import Client
from carrel.client import Sandbox
from carrel.models import AuditRecord

HOST = "127.0.0.2"
"""Where the outside is. Not 127.0.0.1: tools reach that one without their proxy."""
USER = 64_322  # nobody on any distribution; it has no name and no home
NAMES = ("api.test", "git.test", "npm.test", "files.test", "ask.test", "other.test")
PROGRAMS = [
    "cat",
    "curl",
    "echo",
    "env",
    "find",
    "git",
    "grep",
    "ls",
    "mkdir",
    "node",
    "npm",
    "pip",
    "python3",
    "sh",
    "sleep",
    "uv",
]
PATIENCE_S = 30.0

Answering = Callable[[str, str, Mapping[str, str], bytes], bytes | tuple[str, Sequence[str], bytes]]
"""What a site says to (method, path, headers, body): a body, or a status, more headers and a body."""
_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str, patience_s: float = PATIENCE_S) -> _T:
    """Wait for a condition to hold, and give its value."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
        time.sleep(0.01)
    return value


class Site:
    """An HTTP/1.1 server. Remembers what was asked of it."""

    def __init__(self, answering: Answering):
        self.answering = answering
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.gate: asyncio.Event | None = None
        """When there is one, bodies stop in their middle until it is set."""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _version = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.requests.append((method, path, headers))
        said = await asyncio.to_thread(self.answering, method, path, headers, body)
        status, more, content = ("200 OK", (), said) if isinstance(said, bytes) else said
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(content)}", *more, "", ""]
        half = len(content) // 2
        writer.write("\r\n".join(lines).encode() + content[:half])
        await writer.drain()
        if self.gate is not None:
            await self.gate.wait()
        writer.write(content[half:])
        await writer.drain()


class Names(asyncio.DatagramProtocol):
    """A name server: every known name is here, unless it has a place of its own."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.table = dict.fromkeys(NAMES, HOST)
        self.port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, sender: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append(name)
        answer = dns.message.make_response(query)
        if name in self.table and question.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", "A", self.table[name]))
        self._transport.sendto(answer.to_wire(), sender)


class Outside:
    """Servers in an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self.names = Names()
        self._transport, _ = self.run(self._loop.create_datagram_endpoint(lambda: self.names, local_addr=(HOST, 0)))
        self.context, self.certificate = tls_for(*NAMES)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def call(self, act: Callable[[], object]) -> None:
        """Have something done in the loop."""
        self._loop.call_soon_threadsafe(act)

    def site(self, answering: Answering, *, tls: bool = False, host: str = HOST, port: int = 0) -> Site:
        """One more server."""
        site = Site(answering)
        context: ssl.SSLContext | None = self.context if tls else None
        server = self.run(asyncio.start_server(site.serve, host, port, ssl=context))
        self._servers.append(server)
        site.port = server.sockets[0].getsockname()[1]
        return site

    def close(self) -> None:
        """End them all."""
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._transport.close()
        for server in self._servers:
            server.close()
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()


class Carrel:
    """A data directory and the server on it, which comes and goes; as an ordinary user when it is told so."""

    def __init__(self, outside: Outside, *, user: bool = False, **settings: str):
        self.directory = Path(tempfile.mkdtemp(prefix="e"))
        self.directory.chmod(0o755)
        self.data = self.directory / "d"
        self.log = self.directory / "log"
        self._python = [sys.executable]
        roots = self.directory / "roots.pem"
        roots.write_text(outside.certificate)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CARREL_")}
        self.environment = kept | {
            "CARREL_DATA_DIR": str(self.data),
            "CARREL_EGRESS_NAMESERVERS": f"{HOST}:{outside.names.port}",
            "CARREL_EGRESS_ROOTS_FILE": str(roots),
            "COLUMNS": "250",
            **settings,
        }
        if user and os.geteuid() == 0:
            self._become_user()
        self.process: Forked | subprocess.Popen[bytes] | None = None
        self.client: Client

    def _become_user(self) -> None:
        self.environment |= {"PYTHONPATH": readable(self.directory, build=True), "HOME": str(self.directory)}
        self.data.mkdir()
        os.chown(self.data, USER, USER)
        words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--"]
        self._python = [*words, os.path.realpath(sys.executable)]

    def start(self) -> None:
        """Start, and wait until it takes requests."""
        command = [*self._python, "-m", "carrel", "serve", "--port", "0"]
        with self.log.open("ab") as log:
            self.process = start(
                command, env=self.environment, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        url = until(self._url, "the server", 60)
        self.client = Client(url, (self.data / "token").read_text().strip())
        self.client.host()  # opens the connection that all tests share

    def _url(self) -> str | None:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            said = json.loads((self.data / "server.json").read_bytes())
        except (OSError, ValueError):
            return None
        return str(said["url"]) if said["pid"] == self.process.pid else None

    def kill(self) -> None:
        """Kill the server process and nothing else."""
        assert self.process is not None
        self.client.close()
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it as its operator would."""
        assert self.process is not None
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(60) == 0, self.log.read_text()

    def close(self) -> None:
        """End it, and remove its directory."""
        try:
            self.stop()
        finally:
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self.directory)

    def cli(self, *words: str, stdin: str = "", token: str | None = None) -> str:
        """The output of the `carrel` command, which must succeed."""
        more = {} if token is None else {"CARREL_TOKEN": token}
        command = [sys.executable, "-m", "carrel", *words]
        code, said, errors = run_command(command, env=self.environment | more, stdin=stdin)
        assert code == 0, f"carrel {' '.join(words)}: {said}{errors}"
        return said

    @property
    def proxy(self) -> int:
        """The egress process that serves: the child of its keeper."""
        assert self.process is not None
        return until(self._proxy, "the egress process")

    def _proxy(self) -> int:
        table = processes()
        mine = {pid for pid, (_, words) in table.items() if "carrel.egress" in words and str(self.data) in words}
        return next((pid for pid in mine if table[pid][0] in mine), 0)

    def left(self) -> list[str]:
        """What runs for this data directory, and what lies in its run directory."""
        mine = [f"{pid}: {words}" for pid, (_, words) in processes().items() if str(self.data) in words]
        run = self.data / "run"
        return mine + [f"run/{name}" for name in (os.listdir(run) if run.exists() else [])]

    def context(
        self, name: str, *rules: str, deny: Sequence[str] = (), sources: Mapping[str, object] | None = None
    ) -> Sandbox:
        """A context with the network rules, and its sandbox."""
        files = [f"file({verb}:${{WORKSPACE}}/**)" for verb in ("read", "write")]
        allowed = [*(f"shell({each}:*)" for each in PROGRAMS), *files, *rules]
        self.client.policy(name).put(
            settings={"permissions": {"allow": allowed, "deny": list(deny)}}, sources=dict(sources) if sources else None
        )
        return self.client.sandbox(name)

    def records(self, context: str, count: int = 1) -> list[AuditRecord]:
        """The connections of a context, once so many have ended; the oldest first."""

        def found() -> list[AuditRecord] | None:
            items = [each for each in self.client.audit.search(context_id=context, kind="network") if each.result]
            return items[::-1] if len(items) >= count else None

        return until(found, f"{count} records of {context}")  # type: ignore[return-value]


def outbound(*hosts: str, port: int | None = None) -> list[str]:
    """Rules that allow hosts here, on a port."""
    end = "" if port is None else f":{port}"
    return [f"network(outbound:{each}{end})" for each in (*hosts, HOST)]


def run(box: Sandbox, command: str | Sequence[str], *, ok: bool = True, timeout: float = 60) -> str:
    """What a command says, which must succeed unless told otherwise."""
    result = box.commands.run(command if isinstance(command, str) else list(command), timeout=timeout)
    assert not ok or result.exit_code == 0, f"{command}: {result.exit_code} {result.stdout}{result.stderr}"
    return result.stdout if ok else result.stdout + result.stderr


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the words of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                found[int(name)] = (int(fields[1]), words)
    return found


@contextmanager
def ground(*, user: bool = False, **settings: str) -> Iterator[tuple[Outside, Carrel]]:
    """An outside, and a server that looks names up there."""
    outside = Outside()
    try:
        carrel = Carrel(outside, user=user, **settings)
        try:
            carrel.start()
            yield outside, carrel
        finally:
            carrel.close()
    finally:
        outside.close()
