"""Tells callers' URLs what becomes of their tasks, in the background, each task's events in their order.

The URL is the caller's, so that it may lead nowhere it should not: only http and https, only public addresses unless
the agent's configuration names the host, no redirects; the address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit, urlunsplit

import httpx
from a2a.server.tasks import PushNotificationConfigStore, PushNotificationEvent, PushNotificationSender
from a2a.types.a2a_pb2 import TaskPushNotificationConfig
from a2a.utils.proto_utils import to_stream_response
from google.protobuf.json_format import MessageToJson  # type: ignore[import-untyped]

from carrel.errors import CarrelError, Denied, InvalidRequest, LimitExceeded
from carrel.integrations.a2a.background import Background

log = logging.getLogger("carrel.a2a")

TOKEN_HEADER = "X-A2A-Notification-Token"  # noqa: S105 - the name of a header
MOST_CONFIGS = 8
"""URLs that one task tells."""
MOST_WAITING = 200
"""Events of one task that wait to be told."""
MOST_AT_ONCE = 64
TRIES = 4
TIMEOUT_S = 10.0
LONGEST_URL = 2000


@dataclass(frozen=True)
class PushTarget:
    """Where a notification goes: the URL with the address that was checked, and the name it stands for."""

    url: str
    host: str
    name: str


def is_public(text: str) -> bool:
    """Whether an address is ordinary unicast of the public internet; what may mean another address is not."""
    from carrel.policy.rules.addresses import read, why_not_public

    address = read(text.partition("%")[0])
    return address is not None and why_not_public(address) is None


class Destinations:
    """Which URLs may be told. `hosts` are names and addresses, or `*.` and a domain, that are always right."""

    def __init__(self, hosts: Sequence[str] = ()):
        for each in hosts:
            if not each or "/" in each or each in {"*", "*."} or "*" in each.removeprefix("*."):
                raise InvalidRequest(
                    f"'{each}' is no host to be told of tasks",
                    field="push_hosts",
                    hint="name a host, an address, or *.example.org",
                )
        self._hosts = frozenset(each.lower() for each in hosts)

    def read(self, url: str) -> SplitResult:
        """The parts of a URL that may be told; `InvalidRequest` for one that never may."""
        try:
            parts = urlsplit(url)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
            usable = usable and parts.username is None and parts.password is None
        except ValueError:
            usable = False
        if not usable or len(url) > LONGEST_URL or not url.isascii() or not url.isprintable():
            raise InvalidRequest("a push notification goes to an http or https URL", field="url")
        return parts

    async def resolve(self, url: str) -> PushTarget:
        """Where a URL leads now. `Denied` when that is no place for a caller to name."""
        parts = self.read(url)
        name = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise InvalidRequest(f"the host '{name}' has no address", field="url") from None
        addresses = [str(each[4][0]) for each in found]
        if not self._named(name) and not all(is_public(each) for each in addresses):
            raise Denied(
                f"'{name}' is not on the public internet",
                field="url",
                hint="whoever runs this agent can allow it with --push-hosts",
            )
        address = addresses[0]
        place = f"[{address}]" if ":" in address else address
        pinned = urlunsplit((parts.scheme, f"{place}:{port}", parts.path or "/", parts.query, ""))
        return PushTarget(pinned, parts.netloc, name)

    def _named(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        return host in self._hosts or any(each.startswith("*.") and host.endswith(each[1:]) for each in self._hosts)


class Push(PushNotificationSender):
    """Delivers in the background: a receiver that is slow keeps no task waiting."""

    def __init__(
        self,
        store: PushNotificationConfigStore,
        destinations: Destinations,
        background: Background,
        *,
        pause_s: float = 1.0,
        timeout_s: float = TIMEOUT_S,
    ):
        self._store = store
        self._destinations = destinations
        self._background = background
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Queue[tuple[TaskPushNotificationConfig, bytes]]] = {}
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)
        self._client = httpx.AsyncClient(timeout=timeout_s, follow_redirects=False, trust_env=False)

    async def check(self, url: str) -> bool:
        """Whether a URL may be told. For the SDK, which asks when one is given."""
        try:
            await self._destinations.resolve(url)
        except CarrelError as error:
            log.info("a push notification URL is refused: %s", error.detail)
            return False
        return True

    @staticmethod
    def room(known: int) -> None:
        """Refuse one URL more than a task may tell."""
        if known >= MOST_CONFIGS:
            raise LimitExceeded(f"a task tells at most {MOST_CONFIGS} URLs", field="url")

    async def send_notification(self, task_id: str, event: PushNotificationEvent) -> None:
        """Tell what happened, soon. Never waits for a receiver."""
        configs = await self._store.get_info_for_dispatch(task_id)
        if not configs:
            return
        body: bytes = MessageToJson(to_stream_response(event), indent=None).encode()
        queue = self._waiting.get(task_id)
        if queue is None:
            queue = self._waiting[task_id] = asyncio.Queue(MOST_WAITING)
            self._background.start(self._deliver(task_id, queue), f"push of {task_id}")
        for config in configs[:MOST_CONFIGS]:
            try:
                queue.put_nowait((config, body))
            except asyncio.QueueFull:
                log.warning("task %s has more to tell than its receivers take: an event is not told", task_id)

    async def _deliver(self, task_id: str, queue: asyncio.Queue[tuple[TaskPushNotificationConfig, bytes]]) -> None:
        try:
            while not queue.empty():
                config, body = queue.get_nowait()
                await self._tell(task_id, config, body)
        finally:
            del self._waiting[task_id]

    async def _tell(self, task_id: str, config: TaskPushNotificationConfig, body: bytes) -> None:
        said = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                async with self._at_once:  # not while it pauses: who cannot be told keeps nobody else from it
                    status = await self._post(await self._destinations.resolve(config.url), config, body)
            except Denied as refusal:
                said = refusal.detail
                break
            except (httpx.HTTPError, httpx.InvalidURL, CarrelError, TimeoutError, ValueError) as error:
                said = type(error).__name__
                continue
            if status < 300:
                return
            said = f"status {status}"
        log.warning("%s was not told of task %s: %s", urlsplit(config.url).hostname, task_id, said)

    async def _post(self, target: PushTarget, config: TaskPushNotificationConfig, body: bytes) -> int:
        """Send it. Of the answer only the status is read: the rest is whatever a stranger sends."""
        about = {"sni_hostname": target.name}
        headers = _headers(config, target)
        # The client's own limit begins anew with each byte: a receiver that sends them one by one would never end.
        async with asyncio.timeout(self._timeout_s):
            async with self._client.stream(
                "POST", target.url, content=body, headers=headers, extensions=about
            ) as answer:
                return answer.status_code

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _headers(config: TaskPushNotificationConfig, target: PushTarget) -> dict[str, str]:
    headers = {"host": target.host, "content-type": "application/json"}
    if config.token:
        headers[TOKEN_HEADER] = config.token
    if config.HasField("authentication") and config.authentication.scheme and config.authentication.credentials:
        headers["authorization"] = f"{config.authentication.scheme} {config.authentication.credentials}"
    return headers
