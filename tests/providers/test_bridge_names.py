"""Names over a bridge: looked up by the host's own resolver, which here is one of the test's, in a network and with an
`/etc/resolv.conf` that nobody else sees.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import pytest
from tests.support.sandboxes import KINDS, ROOT, provider

from carrel.isolation import probe
from carrel.models import Network

pytestmark = pytest.mark.skipif(
    "namespace" not in KINDS or not probe.host().bridges, reason="this host cannot make bridges: see carrel doctor"
)

RESOLVER = "192.0.2.53"
KNOWN = "greeting.example."
ENTER = f"""
set -e
ip link set lo up
ip address add {RESOLVER}/32 dev lo
mount --bind "$1" /etc/resolv.conf
shift
exec "$@"
"""
READ = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(100).decode())"
LOOK = (
    "import socket, sys\ntry:\n socket.getaddrinfo(sys.argv[1], 80)\nexcept socket.gaierror as e: print(e.errno == -2)"
)


class Names(asyncio.DatagramProtocol):
    """A resolver that knows one name."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question, recursion_available=True)
        (wanted,) = question.question
        self.asked.add(str(wanted.name))
        if str(wanted.name) != KNOWN:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif wanted.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(wanted.name, 5, dns.rdataclass.IN, dns.rdatatype.A, RESOLVER))
        self._transport.sendto(answer.to_wire(), addr)


async def _greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


async def ask(directory: Path) -> dict[str, object]:
    """What a sandbox finds. To be called where the resolver's address is the caller's own."""
    names = Names()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: names, (RESOLVER, 53))
    server = await asyncio.start_server(_greet, RESOLVER, 0)
    port = str(server.sockets[0].getsockname()[1])
    try:
        async with provider("namespace", directory) as house, house.box(network=Network.BRIDGE) as box:
            reached = await box.supervisor.run(["python3", "-c", READ, KNOWN, port])
            absent = await box.supervisor.run(["python3", "-c", LOOK, "absent.example."])
    finally:
        transport.close()
        server.close()
        await server.wait_closed()
    said = reached["stderr"] + absent["stderr"]
    return {"reached": reached["stdout"], "absent": absent["stdout"], "asked": sorted(names.asked), "said": said}


@pytest.mark.skipif(not ROOT, reason="a network and mounts of its own, with the sandbox's user ids, are for root")
def test_a_sandbox_on_a_bridge_looks_names_up_at_the_host_s_resolver(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text(f"nameserver {RESOLVER}\n")
    here = Path(__file__)
    command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]
    run = subprocess.run(
        [*command, str(tmp_path / "resolv.conf"), sys.executable, str(here), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(here.parents[2])},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found == {"reached": "hello\n", "absent": "True\n", "asked": ["absent.example.", KNOWN], "said": ""}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(Path(sys.argv[1])))))
