"""Sends new approvals to a URL, signed, in the background. A failed delivery is tried again, then logged: the approval
waits in the inbox in any case.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from carrel.errors import InvalidRequest
from carrel.models import ApprovalInfo
from carrel.primitives import tasks
from carrel.primitives.backoff import Backoff

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("carrel.webhooks")

SIGNATURE = "Carrel-Signature"
MOST_WAITING = 1000
TRIES = 5
TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 60.0


def sign(secret: bytes, body: bytes, at: int) -> str:
    """Return the signature of a body: the time, and an HMAC-SHA-256 over the time, a dot and the body."""
    mac = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={mac}"


def genuine(secret: bytes, body: bytes, signature: str, now: float, tolerance_s: float = 300.0) -> bool:
    """Whether a body was signed with the secret, and not too long ago. For the receiver."""
    parts = dict(part.partition("=")[::2] for part in signature.split(","))
    if not parts.get("t", "").isdecimal() or abs(now - int(parts["t"][:20])) > tolerance_s:
        return False
    return hmac.compare_digest(sign(secret, body, int(parts["t"])), signature)


class Webhook:
    """The webhook of the operator. `start` it in the event loop that uses it."""

    def __init__(
        self, url: str, secret: bytes, *, pause_s: float = 1.0, clock: Callable[[], float] = time.time
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidRequest("the webhook is not an http or https URL", field="approvals.webhook")
        if not secret:
            raise InvalidRequest(
                "a webhook needs a secret to sign with",
                field="approvals.webhook_secret",
                hint="set CARREL_APPROVALS_WEBHOOK_SECRET",
            )
        self._url = url
        self._host = parts.hostname
        self._secret = secret
        self._pause_s = pause_s
        self._clock = clock
        self._waiting: asyncio.Queue[ApprovalInfo] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, approval: ApprovalInfo) -> None:
        """Queue an approval for delivery. Never waits."""
        try:
            self._waiting.put_nowait(approval)
        except asyncio.QueueFull:
            log.warning("the webhook at %s is too slow: approval %s is not sent to it", self._host, approval.id)

    async def close(self) -> None:
        """Stop; approvals that were not delivered are dropped."""
        await tasks.cancel([self._task])

    async def _run(self) -> None:
        import httpx

        async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client:
            while True:
                approval = await self._waiting.get()
                try:
                    await self._deliver(client, approval)
                except Exception:
                    log.exception("approval %s could not be sent to %s", approval.id, self._host)

    async def _deliver(self, client: httpx.AsyncClient, approval: ApprovalInfo) -> None:
        import httpx  # here, and not at the top: it takes long, and few servers have a webhook

        body = b'{"event":"approval.created","approval":' + approval.model_dump_json().encode() + b"}"
        said, backoff = "", Backoff(self._pause_s, LONGEST_PAUSE_S)
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(backoff.next_pause())
            headers = {"content-type": "application/json", SIGNATURE: sign(self._secret, body, int(self._clock()))}
            try:
                answer = await client.post(self._url, content=body, headers=headers)
            except httpx.HTTPError as error:
                said = type(error).__name__
                continue
            if answer.status_code < 300:
                return
            said = f"status {answer.status_code}"
        log.warning("the webhook at %s did not take approval %s: %s", self._host, approval.id, said)
