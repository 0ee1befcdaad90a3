"""The client of image registries: the OCI distribution API, version 2.

A registry is hostile: every answer is bounded, and content counts only when its digest and size are right. A
registry's credentials go to its own origin and to the token service that it names, over TLS unless the operator said
otherwise, and appear in no message.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import json
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit
from weakref import WeakValueDictionary

from carrel.errors import Denied, ImageRefused, NotFound, PlatformError, RegistryFailed
from carrel.images.credentials import RegistryLogin, docker_config_path, find_login
from carrel.images.documents import INDEXES, LARGEST_DOCUMENT, MANIFESTS, BlobDescriptor, digest_of
from carrel.images.reference import DEFAULT_REGISTRY, ImageReference
from carrel.primitives.atomic import write_all
from carrel.primitives.backoff import Backoff
from carrel.primitives.cache import Cache
from carrel.threads import run_to_end

if TYPE_CHECKING:
    import httpx

_HUB = "registry-1.docker.io"
_ATTEMPTS = 6
_REDIRECTS = 5
_PIECE = 1 << 20
_SLOWEST = 32 << 10
"""Bytes in a second: a transfer that is slower, with its pauses, has failed."""
_TOKEN_S = 55.0
"""Seconds that a token without a lifetime is used; the specification says that it has 60."""
_LARGEST_TOKEN = 64 << 10
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))')
_SHOWN = 200

T = TypeVar("T")

Report = Callable[[int], None]
"""Called with the bytes that are done."""


@dataclass(frozen=True)
class RegistryAccess:
    """Which registries may be used, and how they are reached. The fields are settings of the group `images`."""

    allowed: frozenset[str] = frozenset()
    """Empty for all."""
    plain_http: frozenset[str] = frozenset()
    unverified: frozenset[str] = frozenset()
    ca_file: str | None = None
    docker_config: str | None = None
    timeout_s: float = 60.0
    downloads: int = 4


class _Interrupted(Exception):
    """A request failed in a way that another attempt may mend."""


class RegistryClient:
    """Talks to registries. One client serves all of a server; close it at the end."""

    def __init__(self, access: RegistryAccess):
        self._access = access
        self._clients: dict[bool, httpx.AsyncClient] = {}
        self._permits: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._tokens: Cache[tuple[str, str], tuple[str, float]] = Cache(256)
        self._logins: Cache[str, RegistryLogin | None] = Cache(64, 60.0)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    # Documents

    async def manifest(self, reference: ImageReference, digest: str | None = None) -> tuple[bytes, str]:
        """Return the bytes and the media type of a manifest or index: that of `digest`, or of the reference."""
        wanted = digest or reference.digest
        headers = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}
        path = f"manifests/{wanted or reference.tag or 'latest'}"

        async def fetch() -> tuple[bytes, str]:
            async with self._request("GET", reference, path, headers=headers) as answer:
                _expect(answer, {200}, reference)
                data = await _read(answer, LARGEST_DOCUMENT, "the manifest")
                return data, answer.headers.get("Content-Type", "")

        data, kind = await self._retry(reference, fetch)
        if wanted is not None and digest_of(data) != wanted:
            raise ImageRefused(
                f"the registry {reference.registry} sent a manifest that does not have the digest {wanted[:19]}…",
                field="image",
                hint="the registry is damaged or was tampered with",
            )
        return data, kind

    async def document(self, reference: ImageReference, descriptor: BlobDescriptor) -> bytes:
        """Return a small blob, such as the configuration of an image."""
        if descriptor.size > LARGEST_DOCUMENT:
            raise ImageRefused(f"a document of the image has {descriptor.size} bytes", field="image")

        async def fetch() -> bytes:
            async with self._request("GET", reference, f"blobs/{descriptor.digest}") as answer:
                _expect(answer, {200}, reference)
                return await _read(answer, descriptor.size, "a document of the image")

        data = await self._retry(reference, fetch)
        if digest_of(data) != descriptor.digest:
            raise _lying(reference, descriptor)
        return data

    async def put_manifest(self, reference: ImageReference, data: bytes, media_type: str) -> None:
        """Send a manifest under the tag of the reference, or under its digest."""
        path = f"manifests/{reference.tag or digest_of(data)}"
        headers = {"Content-Type": media_type}

        async def send() -> None:
            async with self._request("PUT", reference, path, headers=headers, content=data, push=True) as answer:
                _expect(answer, {200, 201}, reference)

        await self._retry(reference, send)

    # Blobs

    async def download(
        self, reference: ImageReference, descriptor: BlobDescriptor, partial: str, beside: str, report: Report
    ) -> str:
        """Download a blob and return the path of the file, whose digest and size are right.

        An interrupted download goes on where the file `partial` ends. When another process writes that file, the blob
        is downloaded to `beside`.
        """
        async with self._permits_of(reference):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(partial, flags, 0o600)
            try:
                try:
                    fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(target)
                    partial = beside
                    target = os.open(partial, flags | os.O_EXCL, 0o600)
                blob = _Download(target, descriptor)
                try:
                    await run_to_end(blob.resume)
                    await self._retry(
                        reference, lambda: self._fetch(reference, blob, report), descriptor.size, lambda: blob.done
                    )
                except (ImageRefused, NotFound, OSError):  # a full disk needs the space for others
                    with suppress(FileNotFoundError):
                        os.unlink(partial)
                    raise
            finally:
                os.close(target)
            return partial

    async def _fetch(self, reference: ImageReference, blob: _Download, report: Report) -> None:
        descriptor, resumed = blob.descriptor, blob.done
        report(blob.done)
        if blob.done < descriptor.size or not descriptor.size:
            headers = {"Range": f"bytes={blob.done}-"} if blob.done else {}
            async with self._request("GET", reference, f"blobs/{descriptor.digest}", headers=headers) as answer:
                _expect(answer, {200, 206, 416}, reference)
                start = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
                if answer.status_code == 416 or (answer.status_code == 206 and (not start or int(start[1]) != resumed)):
                    blob.restart()
                    raise _Interrupted(f"the registry {reference.registry} cannot resume a download")
                if answer.status_code == 200:
                    blob.restart()
                waiting: list[bytes] = []
                size = 0
                async for piece in answer.aiter_raw():
                    waiting.append(piece)
                    size += len(piece)
                    if blob.done + size > descriptor.size:
                        raise _lying(reference, descriptor)
                    if size >= _PIECE:
                        await run_to_end(lambda pieces=tuple(waiting): blob.write(pieces))  # type: ignore[misc]
                        report(blob.done)
                        waiting, size = [], 0
                await run_to_end(lambda: blob.write(waiting))
                report(blob.done)
        if blob.done < descriptor.size:
            raise _Interrupted(f"the registry {reference.registry} ended the download of a layer early")
        if not blob.is_right:
            if not resumed:
                raise _lying(reference, descriptor)
            blob.restart()  # what was there before may be at fault
            raise _Interrupted(f"a resumed download from {reference.registry} does not have the right digest")

    async def has_blob(self, reference: ImageReference, digest: str) -> bool:
        """Return whether the registry has a blob in this repository."""

        async def ask() -> bool:
            async with self._request("HEAD", reference, f"blobs/{digest}", push=True) as answer:
                if answer.status_code != 404:
                    _expect(answer, {200}, reference)
                return answer.status_code == 200

        return await self._retry(reference, ask)

    async def upload(self, reference: ImageReference, digest: str, path: str, report: Report) -> None:
        """Send the file of a blob."""
        size = os.stat(path).st_size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}

        async def send() -> None:
            async with self._request("POST", reference, "blobs/uploads/", content=b"", push=True) as answer:
                _expect(answer, {202}, reference)
                given = answer.headers.get("Location", "")
                location = _joined(reference.registry, str(answer.request.url), given)
            location += f"{'&' if '?' in location else '?'}digest={digest}"
            pieces = _pieces(path, report)
            async with self._request("PUT", reference, location, headers=headers, content=pieces, push=True) as answer:
                _expect(answer, {201, 204}, reference)

        async with self._permits_of(reference):
            await self._retry(reference, send, size)

    # Requests

    def _permits_of(self, reference: ImageReference) -> asyncio.Semaphore:
        """Return what limits the transfers with one registry: a slow one must not stop the others."""
        permits = self._permits.get(reference.registry)
        if permits is None:
            permits = self._permits[reference.registry] = asyncio.Semaphore(self._access.downloads)
        return permits

    async def _retry(
        self,
        reference: ImageReference,
        work: Callable[[], Awaitable[T]],
        size: int = 0,
        progress: Callable[[], int] = lambda: 0,
    ) -> T:
        """Try again after a failure of the network. Attempts that brought something do not count.

        `size` bytes may take as long as on a slow line, with all attempts together: a registry that sends a byte now
        and then must not keep anybody waiting for ever.
        """
        seconds = _ATTEMPTS * self._access.timeout_s + size / _SLOWEST
        try:
            async with asyncio.timeout(seconds):
                return await self._attempts(work, progress)
        except TimeoutError:
            raise RegistryFailed(
                f"the registry {reference.registry} is too slow: {size or 'a few'} bytes took more than "
                f"{seconds:.0f} seconds",
                field="image",
                hint="try again: what has arrived is kept for a day",
            ) from None

    async def _attempts(self, work: Callable[[], Awaitable[T]], progress: Callable[[], int]) -> T:
        pauses, left, before = Backoff(0.2, 5.0), _ATTEMPTS, progress()
        while True:
            try:
                return await work()
            except _Interrupted as error:
                if progress() > before:
                    left = _ATTEMPTS
                    pauses.reset()
                before = progress()
                left -= 1
                if not left:
                    raise RegistryFailed(
                        str(error), field="image", hint="check the name and the network, then try again"
                    ) from None
                await asyncio.sleep(pauses.next_pause())

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        reference: ImageReference,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        push: bool = False,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the answer, whose body is not read yet. `path` may be a URL of the registry."""
        import httpx

        registry = reference.registry
        base = self._base(registry)
        url = urljoin(f"{base}/v2/{reference.repository}/", path)
        scope = f"repository:{reference.repository}:{'pull,push' if push else 'pull'}"
        answered = False
        try:
            for _ in range(_REDIRECTS + 2):
                own = _origin(url) == _origin(base)
                sent = {"Accept-Encoding": "identity", "User-Agent": "carrel", **(headers or {})}
                token = self._token(registry, scope) if own else None
                if token:
                    sent["Authorization"] = token
                client = self._client(registry)
                answer = await client.send(
                    client.build_request(method, url, headers=sent, content=content), stream=True
                )
                try:
                    if answer.status_code == 401 and own and not answered:
                        answered = True
                        await self._answer(registry, scope, answer.headers.get_list("WWW-Authenticate"))
                        continue
                    if answer.is_redirect and method in {"GET", "HEAD"}:
                        url = _joined(registry, url, answer.headers.get("Location", ""))
                        if urlsplit(url).scheme not in {"https", urlsplit(base).scheme}:
                            raise RegistryFailed(f"the registry {registry} redirects to an address without TLS")
                        continue
                    if answer.status_code in {408, 429} or answer.status_code >= 500:
                        raise _Interrupted(f"the registry {registry} answered {answer.status_code}")
                    yield answer
                    return
                finally:
                    await answer.aclose()
            raise RegistryFailed(f"the registry {registry} redirects too often")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            words = str(error)[:_SHOWN] or type(error).__name__
            failure = f"the registry {registry} cannot be reached: {words}"
            if "CERTIFICATE_VERIFY_FAILED" in words:
                raise RegistryFailed(
                    failure, field="image", hint="name its certificate in images.ca_file, or it in images.unverified"
                ) from None
            raise _Interrupted(failure) from None

    def _base(self, registry: str) -> str:
        if self._access.allowed and registry not in self._access.allowed:
            raise Denied(
                f"images may not come from the registry {registry}, or go there",
                field="image",
                hint=f"the operator allows {', '.join(sorted(self._access.allowed))[:_SHOWN]} (images.registries)",
            )
        scheme = "http" if registry in self._access.plain_http else "https"
        return f"{scheme}://{_HUB if registry == DEFAULT_REGISTRY else registry}"

    def _client(self, registry: str) -> httpx.AsyncClient:
        from http.cookiejar import DefaultCookiePolicy

        import httpx

        unverified = registry in self._access.unverified
        client = self._clients.get(unverified)
        if client is None:
            context = ssl.create_default_context()
            if self._access.ca_file is not None:
                try:
                    context.load_verify_locations(self._access.ca_file)
                except (OSError, ssl.SSLError):
                    raise PlatformError(
                        f"the certificates in {self._access.ca_file} cannot be read", field="images.ca_file"
                    ) from None
            if unverified:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            timeout = httpx.Timeout(self._access.timeout_s, connect=min(10.0, self._access.timeout_s), pool=None)
            client = self._clients[unverified] = httpx.AsyncClient(verify=context, timeout=timeout)
            client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # nobody needs them here
        return client

    # Authentication

    def _token(self, registry: str, scope: str) -> str | None:
        token, until = self._tokens.get((registry, scope)) or (None, 0.0)
        return token if time.monotonic() < until else None

    async def _answer(self, registry: str, scope: str, challenges: list[str]) -> None:
        """Get what a registry that answered 401 asks for. Without credentials, a token service may still give one."""
        login = self._logins.get(registry)
        if login is None:
            path = self._access.docker_config or docker_config_path()
            login = await run_to_end(lambda: find_login(path, registry))
            self._logins.put(registry, login)
        for challenge in challenges:
            kind, _, rest = challenge.strip().partition(" ")
            values = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(rest)}
            if kind.lower() == "basic" and login is not None and login.user:
                self._tokens.put((registry, scope), (_basic(login), time.monotonic() + 3600))
                return
            if kind.lower() == "bearer" and values.get("realm"):
                token, lifetime = await self._bearer(registry, values, scope, login)
                self._tokens.put((registry, scope), (f"Bearer {token}", time.monotonic() + lifetime))
                return
        raise _needs_login(registry, login is not None)

    async def _bearer(
        self, registry: str, values: Mapping[str, str], scope: str, login: RegistryLogin | None
    ) -> tuple[str, float]:
        realm = _joined(registry, self._base(registry), values["realm"])
        if urlsplit(realm).scheme not in {"https", urlsplit(self._base(registry)).scheme}:
            raise RegistryFailed(f"the registry {registry} names a token service without TLS")
        query = {"service": values.get("service", ""), "scope": scope}
        client = self._client(registry)
        if login is not None and not login.user:
            form = {**query, "grant_type": "refresh_token", "refresh_token": login.secret, "client_id": "carrel"}
            request = client.build_request("POST", realm, data=form)
        else:
            headers = {} if login is None else {"Authorization": _basic(login)}
            request = client.build_request("GET", realm, params=query, headers=headers)
        answer = await client.send(request, stream=True)
        try:
            if answer.status_code in {400, 401, 403}:
                raise _needs_login(registry, login is not None)
            if answer.status_code != 200:
                raise _Interrupted(f"the token service of the registry {registry} answered {answer.status_code}")
            body = await _read(answer, _LARGEST_TOKEN, "the answer of the token service")
        finally:
            await answer.aclose()
        document: Any = None
        with suppress(ValueError, RecursionError):
            document = json.loads(body)
        found = document if isinstance(document, dict) else {}
        token, lifetime = found.get("token") or found.get("access_token"), found.get("expires_in")
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise RegistryFailed(f"the token service of the registry {registry} sent no token")
        seconds = float(lifetime) - 5 if isinstance(lifetime, int) and 10 <= lifetime <= 86_400 else _TOKEN_S
        return token, seconds


class _Download:
    """A blob on its way into an open file. Blocking."""

    def __init__(self, target: int, descriptor: BlobDescriptor):
        self.descriptor = descriptor
        self.done = 0
        self._target = target
        self._hash = hashlib.sha256()

    def resume(self) -> None:
        """Count what the file has already."""
        while data := os.read(self._target, _PIECE):
            self._hash.update(data)
            self.done += len(data)
        if self.done > self.descriptor.size:
            self.restart()

    def restart(self) -> None:
        """Begin anew."""
        os.ftruncate(self._target, 0)
        os.lseek(self._target, 0, os.SEEK_SET)
        self._hash, self.done = hashlib.sha256(), 0

    def write(self, pieces: tuple[bytes, ...] | list[bytes]) -> None:
        """Append what arrived."""
        data = b"".join(pieces)
        self._hash.update(data)
        write_all(self._target, data)
        self.done += len(data)

    @property
    def is_right(self) -> bool:
        """Whether size and digest are those that were promised."""
        return self.done == self.descriptor.size and f"sha256:{self._hash.hexdigest()}" == self.descriptor.digest


async def _pieces(path: str, report: Report) -> AsyncIterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while piece := await run_to_end(lambda: os.read(descriptor, _PIECE)):
            yield piece
            done += len(piece)
            report(done)
    finally:
        os.close(descriptor)


async def _read(answer: httpx.Response, most: int, what: str) -> bytes:
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) > most:
            raise ImageRefused(f"{what} is larger than {most} bytes", field="image")
    return bytes(body)


def _joined(registry: str, base: str, given: str) -> str:
    """Return the address that a registry gives, relative to `base` or whole."""
    try:
        url = urljoin(base, given)
        urlsplit(url).port  # noqa: B018 - raises ValueError
    except ValueError:
        raise RegistryFailed(f"the registry {registry} gives an address that is not valid", field="image") from None
    return url


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _basic(login: RegistryLogin) -> str:
    return "Basic " + base64.b64encode(f"{login.user}:{login.secret}".encode()).decode()


def _needs_login(registry: str, had_one: bool) -> RegistryFailed:
    return RegistryFailed(
        f"the registry {registry} " + ("refuses the credentials" if had_one else "needs credentials"),
        field="image",
        hint=f"run `docker login {registry}` as the user of the server, or set images.docker_config",
    )


def _lying(reference: ImageReference, descriptor: BlobDescriptor) -> ImageRefused:
    return ImageRefused(
        f"the registry {reference.registry} sent content that is not what {descriptor.digest[:19]}… promises",
        field="image",
        hint="the registry is damaged or was tampered with; nothing of it was kept",
    )


def _expect(answer: httpx.Response, statuses: set[int], reference: ImageReference) -> None:
    status = answer.status_code
    if status in statuses:
        return
    if status == 404:
        raise NotFound(
            f"the registry {reference.registry} has no image {reference.familiar}",
            field="image",
            hint="check the name and the tag",
        )
    if status in {401, 403}:
        raise _needs_login(reference.registry, "Authorization" in answer.request.headers)
    raise RegistryFailed(f"the registry {reference.registry} answered {status}", field="image")
