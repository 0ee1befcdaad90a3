"""Tells the end of jobs to the URLs of their submitters, signed as the webhook of approvals.

A delivery that fails is tried again, also after a restart and by another server, and given up after a day. A URL that
hangs delays no other for long, and no job ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from carrel.control.governance.webhooks import SIGNATURE, TIMEOUT_S, sign
from carrel.control.jobs import lifecycle
from carrel.errors import CarrelError
from carrel.primitives import tasks
from carrel.primitives.backoff import Backoff
from carrel.store.jobs import JobRecord, JobStep, JobStore

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("carrel.webhooks")

LOOK_S = 1.0
AT_ONCE = 8
MOST_TRIES = 12
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 3 * 3600.0
CLAIM_S = 3 * TIMEOUT_S
"""How long another server leaves a delivery that one has begun."""


class JobWebhooks:
    """The deliveries of this server. Without a key to sign with there are none."""

    def __init__(self, store: JobStore, secret: bytes):
        self._store = store
        self._secret = secret
        self._task: asyncio.Task[None] | None = None

    @property
    def signs(self) -> bool:
        """Whether there is a key to sign with."""
        return bool(self._secret)

    def start(self) -> None:
        """Start to deliver."""
        if self._secret:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop. What is not delivered yet is delivered after the next start."""
        await tasks.cancel([self._task])

    async def _run(self) -> None:
        client: httpx.AsyncClient | None = None
        gate, backoff = asyncio.Semaphore(AT_ONCE), Backoff(LOOK_S, 30.0)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await asyncio.sleep(LOOK_S)
                    try:
                        due = await self._store.untold()
                        backoff.reset()
                    except CarrelError as error:
                        log.warning("the webhooks of jobs have to wait: %s", error)
                        await asyncio.sleep(backoff.next_pause())
                        continue
                    for record in due:
                        if client is None:
                            import httpx  # it takes long, and few jobs have a webhook

                            client = httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False)
                        await gate.acquire()
                        group.create_task(self._tell(client, gate, record))
        finally:
            if client is not None:
                await client.aclose()

    async def _tell(self, client: httpx.AsyncClient, gate: asyncio.Semaphore, record: JobRecord) -> None:
        import httpx

        try:
            mine = await self._store.change(record.id, lambda now_has, now: _begun(record, now_has, now))
            if mine is None:  # another server does it
                return
            shown = lifecycle.info_of(record).model_dump(mode="json", exclude_none=True)
            body = json.dumps({"event": "job.ended", "job": shown}).encode()
            said = ""
            try:
                headers = {"content-type": "application/json", SIGNATURE: sign(self._secret, body, int(time.time()))}
                async with asyncio.timeout(TIMEOUT_S):  # also for an answer that comes byte by byte
                    async with client.stream(
                        "POST", record.request["webhook"], content=body, headers=headers
                    ) as answer:
                        if not 200 <= answer.status_code < 300:
                            said = f"status {answer.status_code}"
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
                said = type(error).__name__
            await self._store.change(record.id, lambda now_has, now: _told(now_has, now, said))
        except CarrelError as error:
            log.warning("the webhook of job %s has to wait: %s", record.id, error)
        finally:
            gate.release()


def _begun(seen: JobRecord, record: JobRecord, now: float) -> JobStep | None:
    if record.webhook is None or record.webhook != seen.webhook:
        return None
    return JobStep(replace(record, webhook=now + CLAIM_S))


def _told(record: JobRecord, now: float, failure: str) -> JobStep:
    if not failure:
        return JobStep(replace(record, webhook=None))
    tries = record.facts.told + 1
    again: float | None = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**tries)
    if tries >= MOST_TRIES:
        log.warning("the webhook of job %s did not take its end: %s", record.id, failure)
        again = None
    return JobStep(replace(record, webhook=again, facts=replace(record.facts, told=tries)))
