"""What stands before a server for `E2B_DOMAIN`: TLS for every name below a domain, and a proxy by which clients that
know no such name come to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certify(domain: str, folder: Path) -> tuple[Path, Path, Path]:
    """Write an authority, and a certificate for all names below a domain with its key; return the three files."""
    now = datetime.datetime.now(datetime.UTC)

    def build(name: str, issuer: str, public: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey, ca: bool):
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            public,
            x509.random_serial_number(),
            now - datetime.timedelta(hours=1),
            now + datetime.timedelta(days=1),
        ).add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        if not ca:
            names = x509.SubjectAlternativeName([x509.DNSName(name)])
            usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
            builder = builder.add_extension(names, critical=False).add_extension(usage, critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    files = folder / "ca.pem", folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(build("test authority", "test authority", authority.public_key(), authority, True))
    files[1].write_bytes(build(f"*.{domain}", "test authority", own.public_key(), authority, False))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[2].write_bytes(own.private_bytes(serialization.Encoding.PEM, *plain))
    return files


@contextlib.contextmanager
def standing_before(port: int, domain: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Stand before a server on this machine; yield the URL of the proxy, and the file of the authority to trust."""
    authority, certificate, key = certify(domain, folder)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"CONNECT ") and head.split()[1].decode().endswith(f".{domain}:443"), head
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await writer.start_tls(tls)
            inner, outer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, outer), copy(inner, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", authority
    finally:

        async def end() -> None:
            server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
