"""What TCP with mutual TLS costs: the same command of the same supervisor over its Unix socket and over loopback, on
connections that are open; and the handshake, which is paid once.

The supervisors are plain processes, started as programs in the way that other runtimes start them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from bench import ground
from bench.measure import Contender, Progress, Report, Table, median, percentile, ratio, rounds, timed_async
from carrel.control.supervisor.connection import SupervisorConnection
from carrel.models import Network
from carrel.primitives.spiffe import SpiffeId
from carrel.providers.base import Launch
from carrel.providers.control_directory import facts_of, waiting_supervisor
from carrel.providers.links import LocalLink, RemoteAddress, RemoteLink, SupervisorLink
from carrel.providers.remote import give_facts
from carrel.spiffe.authority import CertificateAuthority
from carrel.spiffe.identity import NodeIdentity, OwnSource
from carrel.spiffe.sandboxes import SandboxIdentities

ROUNDS, HANDSHAKES = 2000, 200
_DOMAIN, _COMMAND = "bench.test", {"command": ["true"], "timeout": 20, "output_limit": 1024}


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.scratch() as place, AsyncExitStack() as stack:
        unix = await stack.enter_async_context(_on_unix_socket(place))
        remote = await stack.enter_async_context(_remote(place))
        both = {name: SupervisorConnection(link) for name, link in (("Unix socket", unix), ("TCP, mutual TLS", remote))}
        commands: dict[str, Contender] = {name: timed_async(_command(each), bool) for name, each in both.items()}
        taken = await rounds(commands, ROUNDS, warm_up=30, progress=progress)
        connects = {
            "Unix socket": timed_async(lambda: _connect(unix), bool),
            "TCP, mutual TLS": timed_async(lambda: _connect(remote), bool),
        }
        opened = await rounds(connects, HANDSHAKES, warm_up=5)
        for each in both.values():
            each.close()
    table = Table(f"`true` by the supervisor, {ROUNDS} rounds", ("", "median ms", "p99 ms", "to connect ms"))
    for name in both:
        table.add(name, median(taken[name]) * 1e3, percentile(taken[name], 99) * 1e3, median(opened[name]) * 1e3)
    tls, plain = taken["TCP, mutual TLS"], taken["Unix socket"]
    figures = {
        "remote_exec_ms": median(tls) * 1e3,
        "remote_exec_vs_unix": ratio(tls, plain),
        "remote_connect_ms": median(opened["TCP, mutual TLS"]) * 1e3,
    }
    return Report(figures, [table])


def _command(connection: SupervisorConnection) -> Callable[[], Any]:
    async def once() -> bool:
        answer = await connection.request_json("POST", "/commands?wait=1", _COMMAND, deadline=30)
        return bool(answer["exit_code"] == 0)

    return once


async def _connect(link: SupervisorLink) -> bool:
    connection = SupervisorConnection(link)
    try:
        return bool(await connection.request_json("GET", "/health"))
    finally:
        connection.close()


def _facts(place: Path, name: str) -> dict[str, Any]:
    workspace = place / name
    workspace.mkdir()
    launch = Launch(name, str(workspace), Network.HOST)
    facts = facts_of(launch, uid=os.getuid(), gid=os.getgid(), secrets=False)
    return {**facts, "workspace": str(workspace), "home": str(workspace), "limits": {}, "network": "direct"}


async def _never() -> str:
    await asyncio.Event().wait()
    return ""


@asynccontextmanager
async def _program(*words: str) -> AsyncIterator[None]:
    process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-m", *words], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def _on_unix_socket(place: Path) -> AsyncIterator[SupervisorLink]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "report"))
        listener.listen()
        async with _program("carrel.supervisor.program", str(place / "report")):
            with closing(await waiting_supervisor(listener, _never())) as waiting:
                await waiting.begin({**_facts(place, "unix"), "socket": str(place / "socket")})
            yield LocalLink(str(place / "socket"))


@asynccontextmanager
async def _remote(place: Path) -> AsyncIterator[SupervisorLink]:
    authority, id = CertificateAuthority(b"b" * 32, _DOMAIN), SpiffeId.node(_DOMAIN, "bench")
    node = NodeIdentity(id, OwnSource(authority, id, 3600), authority.issue(id, 3600))
    sandboxes = SandboxIdentities(authority, node, 3600)
    (place / "credentials").write_text(sandboxes.for_slot("bench").to_json())
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    async with _program("carrel.supervisor.remote", "127.0.0.1", str(port), str(place / "credentials")):
        slot = RemoteAddress("127.0.0.1", port, sandboxes.id_of_slot("bench"))
        facts = {**_facts(place, "remote"), "socket": ""}
        yield RemoteLink(await give_facts(slot, sandboxes, "remote", facts, _never()), sandboxes.client_context)
