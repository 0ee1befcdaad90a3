"""Push notifications: sends the events of tasks to callers' URLs, in the background and in order for each task.

A caller chooses the URL, so it is restricted: only http and https, only public addresses unless the configuration of
the agent names the host, no redirects, and the connection goes to the address that was checked.
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
from carrel.primitives.backoff import Backoff

log = logging.getLogger("carrel.a2a")

TOKEN_HEADER = "X-A2A-Notification-Token"  # noqa: S105 - the name of a header
MOST_CONFIGS = 8
"""URLs of one task."""
MOST_WAITING = 200
"""Events of one task that wait to be sent."""
MOST_AT_ONCE = 64
TRIES = 4
LONGEST_PAUSE_S = 60.0
TIMEOUT_S = 10.0
LONGEST_URL = 2000


@dataclass(frozen=True)
class PushTarget:
    """The target of a notification: a URL with the checked address, and the original host name."""

    url: str
    host: str
    name: str


def is_public(text: str) -> bool:
    """Return whether an address is an ordinary unicast address of the public internet."""
    from carrel.policy.rules.addresses import read, why_not_public

    address = read(text.partition("%")[0])
    return address is not None and why_not_public(address) is None


class Destinations:
    """Decides which URLs may be notified. `hosts` are names, addresses or `*.domain` that are always allowed."""

    def __init__(self, hosts: Sequence[str] = ()):
        for each in hosts:
            if not each or "/" in each or each in {"*", "*."} or "*" in each.removeprefix("*."):
                raise InvalidRequest(
                    f"'{each}' is not a host for push notifications",
                    field="push_hosts",
                    hint="name a host, an address, or *.example.org",
                )
        self._hosts = frozenset(each.lower() for each in hosts)

    def read(self, url: str) -> SplitResult:
        """Parse a URL. Raises `InvalidRequest` if its form is not allowed."""
        try:
            parts = urlsplit(url)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
            usable = usable and parts.username is None and parts.password is None
        except ValueError:
            usable = False
        if not usable or len(url) > LONGEST_URL or not url.isascii() or not url.isprintable():
            raise InvalidRequest("push notifications need an http or https URL", field="url")
        return parts

    async def resolve(self, url: str) -> PushTarget:
        """Resolve a URL to an address. Raises `Denied` if the address is not public."""
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
                hint="the operator of this agent can allow it with --push-hosts",
            )
        address = addresses[0]
        place = f"[{address}]" if ":" in address else address
        pinned = urlunsplit((parts.scheme, f"{place}:{port}", parts.path or "/", parts.query, ""))
        return PushTarget(pinned, parts.netloc, name)

    def _named(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        return host in self._hosts or any(each.startswith("*.") and host.endswith(each[1:]) for each in self._hosts)


class Push(PushNotificationSender):
    """Sends notifications in the background, so that a slow receiver delays no task."""

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
        """Return whether a URL may be notified. The SDK calls this when a caller gives one."""
        try:
            await self._destinations.resolve(url)
        except CarrelError as error:
            log.info("a push notification URL is refused: %s", error.detail)
            return False
        return True

    @staticmethod
    def room(known: int) -> None:
        """Check that a task with so many URLs may have one more."""
        if known >= MOST_CONFIGS:
            raise LimitExceeded(f"a task may have at most {MOST_CONFIGS} push notification URLs", field="url")

    async def send_notification(self, task_id: str, event: PushNotificationEvent) -> None:
        """Queue an event. Never waits for a receiver."""
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
                log.warning("the push notifications of task %s are too slow: an event is dropped", task_id)

    async def _deliver(self, task_id: str, queue: asyncio.Queue[tuple[TaskPushNotificationConfig, bytes]]) -> None:
        try:
            while not queue.empty():
                config, body = queue.get_nowait()
                await self._send(task_id, config, body)
        finally:
            del self._waiting[task_id]

    async def _send(self, task_id: str, config: TaskPushNotificationConfig, body: bytes) -> None:
        problem = ""
        backoff = Backoff(self._pause_s, LONGEST_PAUSE_S)
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(backoff.next_pause())
            try:
                async with self._at_once:  # released during the pause, so that other receivers are not delayed
                    status = await self._post(await self._destinations.resolve(config.url), config, body)
            except Denied as refusal:
                problem = refusal.detail
                break
            except (httpx.HTTPError, httpx.InvalidURL, CarrelError, TimeoutError, ValueError) as error:
                problem = type(error).__name__
                continue
            if status < 300:
                return
            problem = f"status {status}"
        log.warning("%s was not notified of task %s: %s", urlsplit(config.url).hostname, task_id, problem)

    async def _post(self, target: PushTarget, config: TaskPushNotificationConfig, body: bytes) -> int:
        """Send a notification. Only the status of the answer is read, because the receiver is not trusted."""
        about = {"sni_hostname": target.name}
        headers = _headers(config, target)
        # The client's own timeout restarts with each byte: a receiver that sends one at a time would never time out.
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
