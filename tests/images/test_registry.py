"""Pull and push against a real registry, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import hashlib
import json
import os
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.registry import RegistryServer, store_blobs, tar_entry, tar_of

from carrel.errors import Denied, ImageRefused, LimitExceeded, NotFound, RegistryFailed
from carrel.images.documents import OCI_INDEX, OCI_MANIFEST, BlobDescriptor, ImagePlatform, encode
from carrel.images.layer_reading import LayerLimits
from carrel.images.pulling import pull_image, push_image
from carrel.images.reference import ImageReference
from carrel.images.registry import RegistryAccess, RegistryClient
from carrel.images.storage import ImageStorage, LayerProgress, StoredImage

HOST = ImagePlatform.of_host()
BIG = tar_of([tar_entry("data", random.Random(1).randbytes(3 << 20))])
SMALL = tar_of([tar_entry("etc/os-release", b"ID=tests\n")])


def quiet(_progress: LayerProgress) -> None:
    pass


@asynccontextmanager
async def client_of(access: RegistryAccess) -> AsyncIterator[RegistryClient]:
    client = RegistryClient(access)
    try:
        yield client
    finally:
        await client.close()


async def made(storage: ImageStorage, name: str = "r.example/made:1", **config: object) -> StoredImage:
    with storage.adding():
        digest = store_blobs(storage, [(gzip.compress(tar, 1, mtime=0), tar) for tar in (BIG, SMALL)], **config)
        return await storage.add_image(digest, [ImageReference.parse(name)], quiet)


def empty(tmp_path: Path) -> ImageStorage:
    storage = ImageStorage(str(tmp_path / "elsewhere"), LayerLimits(64 << 20, 10_000, 100))
    storage.prepare()
    return storage


async def test_push_and_pull(registry: RegistryServer, storage: ImageStorage, tmp_path: Path) -> None:
    image = await made(storage, environment={"A": "b"})
    reference = ImageReference.parse(f"{registry.host}/team/app:1")
    access = RegistryAccess(plain_http=frozenset([registry.host]))
    async with client_of(access) as client:
        assert await push_image(client, storage, image, reference, quiet) == image.digest
        # The same again as one of several platforms, behind an index.
        size = len(storage.read_blob(image.digest))
        entries = [
            {"mediaType": OCI_MANIFEST, "digest": image.digest, "size": size, "platform": {"os": "linux", "architecture": HOST.architecture}},
        ]  # fmt: skip
        index = encode({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries})
        await client.put_manifest(replace(reference, tag="all"), index, OCI_INDEX)

        target = empty(tmp_path)
        events: list[LayerProgress] = []
        pulled = await pull_image(client, target, reference, HOST, events.append)
        assert pulled.digest == image.digest and pulled.config == image.config
        assert Path(pulled.root, "etc/os-release").read_bytes() == b"ID=tests\n"
        for layer in pulled.manifest.layers:
            own = [each for each in events if each.digest == layer.digest]
            assert {"download", "done"} <= {each.step for each in own} and {each.total for each in own} == {layer.size}
            assert own[-1].done == layer.size
        events.clear()
        pinned = reference.pinned(f"sha256:{hashlib.sha256(index).hexdigest()}")
        assert (await pull_image(client, target, pinned, HOST, events.append)).digest == image.digest
        assert not [each for each in events if each.step == "download"], "the layers are here"
        assert target.open(pinned).digest == target.open(reference).digest

        with pytest.raises(NotFound, match="has no image"):
            await pull_image(client, target, replace(reference, tag="none"), HOST, quiet)
        with pytest.raises(ImageRefused, match=r"no version for linux/riscv64|is for linux"):
            await pull_image(client, target, replace(reference, tag="all"), ImagePlatform.parse("linux/riscv64"), quiet)
    async with client_of(replace(access, allowed=frozenset(["ghcr.io"]))) as client:
        with pytest.raises(Denied, match="may not come from"):
            await client.manifest(reference)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
async def test_a_full_disk(registry: RegistryServer, storage: ImageStorage, tmp_path: Path) -> None:
    image = await made(storage)
    reference = ImageReference.parse(f"{registry.host}/large:1")
    size = sum(each.size for each in image.manifest.layers)
    async with client_of(RegistryAccess(plain_http=frozenset([registry.host]))) as client:
        await push_image(client, storage, image, reference, quiet)
        disk = tmp_path / "elsewhere"
        disk.mkdir()
        for fits in (size - 1, size + 100_000, 3 * size):  # nothing, the blobs, everything
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={fits}", "tests", str(disk)], check=True)
            try:
                target = empty(tmp_path)
                if fits == 3 * size:
                    assert (await pull_image(client, target, reference, HOST, quiet)).digest == image.digest
                else:
                    with pytest.raises(LimitExceeded, match=r"is full|MiB left"):
                        await pull_image(client, target, reference, HOST, quiet)
                    assert not [
                        path for path in disk.rglob("*") if not path.is_dir() and path.name not in {"lock", "adding"}
                    ]
            finally:
                subprocess.run(["umount", str(disk)], check=True)


async def test_password_and_certificate(
    private_registry: RegistryServer, storage: ImageStorage, tmp_path: Path
) -> None:
    server = private_registry
    reference = ImageReference.parse(f"{server.host}/app:1")
    known = RegistryAccess(ca_file=str(server.certificate), docker_config=str(server.docker_config))
    async with client_of(known) as client:
        await push_image(client, storage, await made(storage), reference, quiet)
        assert (await pull_image(client, empty(tmp_path), reference, HOST, quiet)).layers
    unknown = str(tmp_path / "none.json")
    helper = tmp_path / "docker-credential-tests"
    helper.write_text('#!/bin/sh\necho \'{"Username": "ada", "Secret": "correct horse"}\'\n')
    helper.chmod(0o755)
    helped, wrong = tmp_path / "helped.json", tmp_path / "wrong.json"
    helped.write_text(json.dumps({"credHelpers": {server.host: "tests"}}))
    wrong.write_text(json.dumps({"auths": {f"https://{server.host}/v1/": {"username": "ada", "password": "x"}}}))
    for access, words in (
        (replace(known, ca_file=None), "CERTIFICATE_VERIFY_FAILED"),
        (replace(known, docker_config=unknown), "needs credentials"),
        (replace(known, docker_config=str(wrong)), "refuses the credentials"),
        (replace(known, ca_file=None, unverified=frozenset([server.host]), docker_config=str(helped)), ""),
    ):
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{tmp_path}:{path}"
        try:
            async with client_of(access) as client:
                if words:
                    with pytest.raises(RegistryFailed, match=words):
                        await client.manifest(reference)
                else:
                    assert await client.manifest(reference)
        finally:
            os.environ["PATH"] = path


# A registry that misbehaves

Answer = tuple[int, dict[str, str], bytes]
Handler = Callable[[str, dict[str, str]], Answer]


@asynccontextmanager
async def faulty(handler: Handler) -> AsyncIterator[str]:
    """A registry that answers GET as `handler` says. It sends fewer bytes than it promises where that is told so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers = {}
                while (header := await reader.readline()).strip():
                    key, _, value = header.decode().partition(":")
                    headers[key.lower()] = value.strip()
                status, more, body = handler(line.split()[1].decode(), headers)
                more = {"Content-Length": str(len(body)), **more}
                lines = "".join(f"{key}: {value}\r\n" for key, value in more.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body)
                await writer.drain()
                if int(more["Content-Length"]) != len(body):
                    break
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


def descriptor(data: bytes) -> BlobDescriptor:
    return BlobDescriptor(digest=f"sha256:{hashlib.sha256(data).hexdigest()}", size=len(data))


def access(*hosts: str, **more: object) -> RegistryAccess:
    return RegistryAccess(plain_http=frozenset(hosts), docker_config="/nonexistent", **more)  # type: ignore[arg-type]


async def test_interrupted_downloads_are_resumed(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(3_000_000)
    ranges: list[str] = []

    def handler(_path: str, headers: dict[str, str]) -> Answer:
        ranges.append(headers.get("range", ""))
        start = int(headers["range"][6:-1]) if "range" in headers else 0
        rest = data[start:]
        more = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        return 206 if start else 200, {**more, "Content-Length": str(len(rest))}, rest[:1_300_000]

    async with faulty(handler) as host, client_of(access(host)) as client:
        reference = ImageReference.parse(f"{host}/a:1")
        partial = str(tmp_path / "partial")
        seen: list[int] = []
        assert await client.download(reference, descriptor(data), partial, "", seen.append) == partial
        assert Path(partial).read_bytes() == data and seen[-1] == len(data) and sorted(seen) == seen
        assert ranges[0] == "" and len(ranges) >= 3 and all(each.startswith("bytes=") for each in ranges[1:])
        # Damaged bytes of an earlier attempt cost one more attempt, not the image.
        Path(partial).write_bytes(b"x" * 1000)
        await client.download(reference, descriptor(data), partial, "", seen.append)
        assert Path(partial).read_bytes() == data
        with open(partial, "r+b") as another:  # another process downloads the same
            fcntl.flock(another, fcntl.LOCK_EX)
            beside = str(tmp_path / "beside")
            assert await client.download(reference, descriptor(data), partial, beside, seen.append) == beside
        assert Path(beside).read_bytes() == data


@pytest.mark.parametrize("lie", ["digest", "size", "endless"])
async def test_lying_registries_are_refused(tmp_path: Path, lie: str) -> None:
    data = b"x" * 5000
    sent = {"digest": b"y" * 5000, "size": data + b"z", "endless": data * 1000}[lie]
    async with faulty(lambda _path, _headers: (200, {}, sent)) as host, client_of(access(host)) as client:
        with pytest.raises(ImageRefused, match="not what"):
            await client.download(
                ImageReference.parse(f"{host}/a:1"), descriptor(data), str(tmp_path / "p"), "", lambda _done: None
            )
        assert not (tmp_path / "p").exists()
        with pytest.raises(ImageRefused, match=r"does not have the digest|is larger than"):
            await client.manifest(ImageReference.parse(f"{host}/a@{descriptor(data).digest}"))


async def test_bearer_tokens_and_redirects(tmp_path: Path) -> None:
    data = b"layer"
    asked: list[str] = []
    foreign: list[dict[str, str]] = []

    def storage_handler(_path: str, headers: dict[str, str]) -> Answer:
        foreign.append(headers)
        return 200, {}, data

    async with faulty(storage_handler) as elsewhere:

        def handler(path: str, headers: dict[str, str]) -> Answer:
            asked.append(path)
            if path.startswith("/token"):
                return 200, {}, json.dumps({"token": "t0k3n", "expires_in": 300}).encode()
            if headers.get("authorization") != "Bearer t0k3n":
                challenge = f'Bearer realm="http://{headers["host"]}/token",service="tests",scope="x"'
                return 401, {"WWW-Authenticate": challenge, "Set-Cookie": "a=b; Path=/"}, b""
            assert "cookie" not in headers
            return 307, {"Location": f"http://{elsewhere}/blob"}, b""

        async with faulty(handler) as host, client_of(access(host)) as client:
            reference = ImageReference.parse(f"{host}/a/b:1")
            for _ in range(2):
                await client.download(reference, descriptor(data), str(tmp_path / "p"), "", lambda _done: None)
                (tmp_path / "p").unlink()
    assert [each for each in asked if "token" in each] == ["/token?service=tests&scope=repository%3Aa%2Fb%3Apull"]
    assert len(foreign) == 2 and not any("authorization" in each for each in foreign)


async def test_a_registry_that_sends_a_byte_now_and_then() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, client_of(access(host, timeout_s=0.05)) as client:
        with pytest.raises(RegistryFailed, match="too slow"):
            await client.manifest(ImageReference.parse(f"{host}/a:1"))
        await ended.wait()


@pytest.mark.parametrize("address", ["http://[", "file:///etc/passwd"])
async def test_redirects_to_nowhere(address: str) -> None:
    redirect = (307, {"Location": address}, b"")
    async with faulty(lambda _path, _headers: redirect) as host, client_of(access(host)) as client:
        with pytest.raises(RegistryFailed, match=r"not valid|without TLS"):
            await client.manifest(ImageReference.parse(f"{host}/a:1"))


async def test_a_registry_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrel.images.registry._ATTEMPTS", 2)
    calls: list[str] = []

    def handler(path: str, _headers: dict[str, str]) -> Answer:
        calls.append(path)
        return 503, {}, b""

    async with faulty(handler) as host, client_of(access(host)) as client:
        with pytest.raises(RegistryFailed, match="answered 503"):
            await client.manifest(ImageReference.parse(f"{host}/a:1"))
    assert len(calls) == 2
    async with client_of(access(host)) as client:
        with pytest.raises(RegistryFailed, match="cannot be reached"):
            await client.manifest(ImageReference.parse(f"{host}/a:1"))
