"""An old Node in a sandbox with an allow list: its fetch, http and https go through the proxy, and nowhere else."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.sandboxes import KINDS, House

from carrel.models import Network

NODE = shutil.which("node", path="/usr/local/bin:/usr/bin")


def version() -> tuple[int, int]:
    """Of Node as a sandbox has it; (0, 0) when there is none."""
    if NODE is None:
        return 0, 0
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=False).stdout
    major, minor, *_ = said.strip().removeprefix("v").split(".")
    return int(major), int(minor)


pytestmark = [
    pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes"),
    pytest.mark.skipif(version() < (18, 0), reason="there is no Node that has fetch"),
    pytest.mark.skipif(version() >= (22, 21), reason="this Node reads the proxy variables by itself"),
]
PROGRAM = """
const http = require("http"), https = require("https");
const get = (module, url) => new Promise((done, failed) => {
  module.get(url, (answer) => { let text = ""; answer.on("data", (d) => text += d); answer.on("end", () => done(text)); })
    .on("error", failed);
});
const server = http.createServer((request, answer) => answer.end("inside"));
server.listen(0, "127.0.0.1", async () => {
  const own = `http://127.0.0.1:${server.address().port}/`;
  const attempts = {
    fetch_tls: () => fetch("https://good.test/a").then((r) => r.text()),
    fetch_plain: () => fetch("http://good.test/b").then((r) => r.text()),
    fetch_request: () => fetch(new Request("https://good.test/c")).then((r) => r.text()),
    fetch_body: () => fetch("https://good.test/d", {method: "POST", body: "x".repeat(100000)}).then((r) => r.text()),
    fetch_refused: () => fetch("https://bad.test/").catch((error) => error.cause.message),
    fetch_impostor: () => fetch("https://other.test/").catch((error) => error.cause.code),
    fetch_own: () => fetch(own).then((r) => r.text()),
    https: () => get(https, "https://good.test/e"),
    http: () => get(http, "http://good.test/f"),
    https_refused: () => get(https, "https://bad.test/").catch((error) => error.message),
    http_own: () => get(http, own),
  };
  const found = {};
  for (const [name, attempt] of Object.entries(attempts)) found[name] = await attempt().catch((error) => `${error}`);
  console.log(JSON.stringify(found));
  process.exit(0);
});
"""
REFUSAL = b'{"code": "denied_by_policy"}'


def certificate(directory: Path) -> ssl.SSLContext:
    """For good.test; its file is `directory`/cert.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "good.test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("good.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "key.pem").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return context


class Proxy:
    """Stands for the egress proxy and for every host behind it: tunnels end in this very process."""

    def __init__(self, context: ssl.SSLContext):
        self.context = context
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n")[0].decode()
        self.asked.append(line)
        if "bad.test" in line:
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%b" % (len(REFUSAL), REFUSAL))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            try:
                if ":443" in line:
                    await writer.start_tls(self.context)
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b"\r\n")[0].split()
                size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or b"0")
                body = str(len(await reader.readexactly(size))).encode() if method == b"POST" else path
                answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
                writer.write(answer % (len(body), body))
            except (ssl.SSLError, OSError, asyncio.IncompleteReadError):
                pass  # the impostor was found out
        writer.close()


@pytest.fixture
async def house(houses: dict[str, House]) -> AsyncIterator[House]:
    house = House("namespace", houses["namespace"].directory)
    yield house
    await house.provider.close()


async def test_node_finds_the_way_out(house: House, tmp_path: Path) -> None:
    proxy = Proxy(certificate(tmp_path))
    env = {"NODE_EXTRA_CA_CERTS": "/workspace/cert.pem"}
    async with house.box(network=Network.ALLOWLIST, env=env) as box:
        shutil.copy(tmp_path / "cert.pem", box.workspace)
        (box.workspace / "cert.pem").chmod(0o644)
        way_out = await house.provider.way_out(box.handle)
        assert way_out is not None
        server = await asyncio.start_server(proxy.serve, sock=socket.socket(fileno=way_out))
        async with server:
            result = await box.supervisor.run(["node", "-e", PROGRAM])
    assert result["exit_code"] == 0, result["stderr"]
    refused = "403 Forbidden for bad.test:443: " + REFUSAL.decode()
    found = json.loads(result["stdout"])
    for name in ("fetch_refused", "https_refused"):
        assert found.pop(name).endswith(refused)
    assert found == {
        "fetch_tls": "/a",
        "fetch_plain": "/b",
        "fetch_request": "/c",
        "fetch_body": "100000",
        "fetch_impostor": "ERR_TLS_CERT_ALTNAME_INVALID",
        "fetch_own": "inside",
        "https": "/e",
        "http": "/f",
        "http_own": "inside",
    }
    assert len(proxy.asked) == 9
    assert all(line.startswith("CONNECT ") for line in proxy.asked)


async def test_node_without_a_network_says_so(house: House) -> None:
    program = "fetch('https://good.test/').catch((error) => console.log(error.cause.message))"
    async with house.box() as box:
        result = await box.supervisor.run(["node", "-e", program])
        assert "this sandbox has no network" in result["stdout"], result
