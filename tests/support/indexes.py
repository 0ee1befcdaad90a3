"""A real package index on loopback, small real packages, and the front served as the gateway serves it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import html
import io
import json
import os
import ssl
import sys
import tarfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from carrel.egress.index.cache import PackageCache
from carrel.egress.index.client import IndexClient
from carrel.egress.index.front import AllowedPackages, Front, IndexAnswer
from carrel.egress.plan import PackageIndex

JSON = "application/vnd.pypi.simple.v1+json"
Handler = Callable[[str, str, Mapping[str, str]], Awaitable[IndexAnswer]]


class Web:
    """HTTP/1.1 on a port of loopback, with connections that stay open, in the loop of the test."""

    def __init__(self, handler: Handler):
        self._handler = handler
        self.tls: ssl.SSLContext | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")[:-2]
                method, target, _version = first.split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                await self._send(writer, await self._handler(method, target, headers), method)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        except Exception:
            writer.transport.abort()  # an answer that cannot be finished
        finally:
            self._connections.discard(task)
            writer.close()
            try:
                await writer.wait_closed()
            except (ConnectionError, asyncio.CancelledError):
                pass

    async def _send(self, writer: asyncio.StreamWriter, answer: IndexAnswer, method: str) -> None:
        head = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{name}: {value}" for name, value in answer.headers)]
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1"))
        try:
            if isinstance(answer.body, bytes):
                writer.write(answer.body)
            else:
                async for chunk in answer.body:
                    writer.write(chunk)
                    await writer.drain()
            await writer.drain()
        finally:
            await answer.aclose()


def wheel(
    name: str, version: str = "1.0", *, requires: tuple[str, ...] = (), payload: bytes = b""
) -> tuple[str, bytes]:
    """A small real wheel: its file name and content."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {each}\n" for each in requires
    )
    files = {
        f"{module}/__init__.py": f"version = {version!r}\n".encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if payload:
        files[f"{module}/payload"] = payload
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in files.items()
    )
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
    return f"{module}-{version}-py3-none-any.whl", packed.getvalue()


def sdist(name: str, version: str = "1.0", payload: bytes = b"") -> tuple[str, bytes]:
    """A small source archive: its file name and content."""
    top = f"{name.replace('-', '_')}-{version}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, data in {
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
            "payload": payload,
        }.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return f"{top}.tar.gz", packed.getvalue()


def metadata_of(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))


@dataclass
class IndexServer:
    """An index: its projects, what was asked of it, and how it misbehaves."""

    projects: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    seen: list[Mapping[str, str]] = field(default_factory=list)
    form: str = "both"
    """`html` for one that knows no JSON."""
    hashes: bool = True
    sizes: bool = True
    metadata: bool = True
    etags: bool = True
    chunked: bool = False
    broken: int | None = None
    """A status that every request gets."""
    login: str | None = None
    """`user:password` that every request needs."""
    wrong: dict[str, bytes] = field(default_factory=dict)
    """What is given in place of files."""
    attributes: dict[str, dict[str, object]] = field(default_factory=dict)
    """More keys of files on JSON pages."""
    redirects: dict[str, str] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    """When set, files stop before their last byte until it is."""
    web: Web = field(init=False)

    def __post_init__(self) -> None:
        self.web = Web(self.answer)

    def add(self, made: tuple[str, bytes], project: str | None = None) -> str:
        filename, content = made
        name = project or filename.split("-")[0].replace("_", "-").lower()
        self.projects.setdefault(name, {})[filename] = content
        return filename

    def index(self, name: str = "main", **given: object) -> PackageIndex:
        url = f"{self.web.url}/simple/"
        if self.login:
            url = url.replace("://", f"://{self.login}@")
        return PackageIndex(name, url, **given)  # type: ignore[arg-type]

    def files_asked(self) -> list[str]:
        return [path for path in self.asked if path.startswith("/pool/")]

    async def answer(self, method: str, target: str, headers: Mapping[str, str]) -> IndexAnswer:
        self.asked.append(target)
        self.seen.append(dict(headers))
        if self.broken:
            return _plain(self.broken, b"no")
        if self.login and headers.get("authorization") != "Basic " + base64.b64encode(self.login.encode()).decode():
            return _plain(401, b"who are you")
        if target in self.redirects:
            return IndexAnswer(302, [("location", self.redirects[target]), ("content-length", "0")])
        parts = target.strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2 and parts[1] in self.projects:
            return self._page(parts[1], headers)
        if parts[0] == "pool" and len(parts) == 3:
            return self._file(parts[1], parts[2])
        return _plain(404, b"not here")

    def _page(self, project: str, headers: Mapping[str, str]) -> IndexAnswer:
        if self.form == "both" and JSON in headers.get("accept", ""):
            kind, body = JSON, self._json(project)
        else:
            kind, body = "text/html", self._html(project)
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        if self.etags and headers.get("if-none-match") == etag:
            return IndexAnswer(304, [("content-length", "0")])
        body = gzip.compress(body)
        given = [("content-type", kind), ("content-length", str(len(body))), ("content-encoding", "gzip")]
        return IndexAnswer(200, [*given, *([("etag", etag)] if self.etags else [])], body)

    def _json(self, project: str) -> bytes:
        files = []
        for filename, content in self.projects[project].items():
            entry: dict[str, object] = {"filename": filename, "url": f"../../pool/{project}/{filename}", "hashes": {}}
            if self.hashes:
                entry["hashes"] = {"sha256": hashlib.sha256(content).hexdigest()}
            if self.sizes:
                entry["size"] = len(content)
            if self.metadata and filename.endswith(".whl"):
                entry["core-metadata"] = {"sha256": hashlib.sha256(metadata_of(content)).hexdigest()}
            files.append(entry | self.attributes.get(filename, {}))
        return json.dumps(
            {"meta": {"api-version": "1.1"}, "name": project, "versions": ["1.0"], "files": files}
        ).encode()

    def _html(self, project: str) -> bytes:
        lines = []
        for filename, content in self.projects[project].items():
            fragment = f"#sha256={hashlib.sha256(content).hexdigest()}" if self.hashes else ""
            lines.append(f'<a href="/pool/{project}/{html.escape(filename)}{fragment}">{filename}</a>')
        return f"<!DOCTYPE html><html><body>{'<br>'.join(lines)}</body></html>".encode()

    def _file(self, project: str, filename: str) -> IndexAnswer:
        plain = filename.removesuffix(".metadata")
        content = self.projects.get(project, {}).get(plain)
        if content is None:
            return _plain(404, b"not here")
        if plain != filename:
            content = metadata_of(content)
        content = self.wrong.get(filename, content)
        if self.chunked:
            return IndexAnswer(200, [("transfer-encoding", "chunked")], _chunked(content))
        return IndexAnswer(200, [("content-length", str(len(content)))], self._gated(content) if self.gate else content)

    async def _gated(self, content: bytes) -> AsyncIterator[bytes]:
        assert self.gate is not None
        yield content[:-1]
        await self.gate.wait()
        yield content[-1:]


async def _chunked(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 50_000):
        part = content[at : at + 50_000]
        yield b"%x\r\n%s\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


def _plain(status: int, body: bytes) -> IndexAnswer:
    return IndexAnswer(status, [("content-type", "text/plain"), ("content-length", str(len(body)))], body, "No")


@asynccontextmanager
async def serving(server: IndexServer) -> AsyncIterator[IndexServer]:
    """The index, up."""
    await server.web.open()
    try:
        yield server
    finally:
        await server.web.close()


@asynccontextmanager
async def fronting(directory: str, most_bytes: int = 1 << 30, **given: object) -> AsyncIterator[Front]:
    """A front on a cache in a directory."""
    front = Front(PackageCache(directory, most_bytes), fetch=IndexClient(), **given)  # type: ignore[arg-type]
    try:
        yield front
    finally:
        await front.aclose()


@asynccontextmanager
async def gateway(front: Front, packages: AllowedPackages) -> AsyncIterator[str]:
    """The front as one sandbox reaches it; gives the URL of the index."""
    web = Web(lambda method, target, headers: front.answer(method, target, headers, packages))
    await web.open()
    try:
        yield f"{web.url}/simple/"
    finally:
        await web.close()


async def whole(answer: IndexAnswer) -> bytes:
    """The body of an answer, to its end."""
    try:
        if isinstance(answer.body, bytes):
            return answer.body
        return b"".join([chunk async for chunk in answer.body])
    finally:
        await answer.aclose()


async def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run a tool of this interpreter as a module; its exit code and everything it said."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()
