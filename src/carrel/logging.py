"""A handler of Python's `logging` that sends records to the event log of a carrel server.

    logging.getLogger().addHandler(BusHandler(context="conversation-42"))

The program never waits for the server: records go into a bounded queue, and a thread sends them in batches. Records
that find no room are dropped and counted; the count is sent with the next batch. The server removes secrets.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from datetime import UTC, datetime
from typing import NamedTuple

from carrel.client import Client
from carrel.errors import CarrelError
from carrel.primitives.backoff import Backoff

MAX_QUEUED = 10_000
MAX_BATCH = 200
MAX_MESSAGE = 8192
"""The most characters of a message that are sent; the server keeps fewer."""
BATCH_S = 0.5
FLUSH_S = 5.0
_GIVE_UP_AFTER = 5
"""Attempts at a batch, before it is dropped and counted."""


class _Sent(NamedTuple):
    message: str
    level: str
    logger: str
    at: str


class BusHandler(logging.Handler):
    """Publishes log records as events of the kind `log`.

    `context` is the context they belong to; without one the token must reach every context. `url` and `token` are those
    of `Client`; a token with the scope `log` can do nothing else. `dropped` counts the records that were not sent.
    """

    def __init__(
        self,
        context: str | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        level: int | str = logging.NOTSET,
        capacity: int = MAX_QUEUED,
    ):
        super().__init__(level)
        self.dropped = 0
        self._context = context
        self._given = (url, token)
        self._queue: queue.Queue[_Sent] = queue.Queue(capacity)
        self._hurry = threading.Event()
        self._closing = False
        self._unsent = 0
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = 0
        _handlers.add(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record, without waiting."""
        if self._closing or threading.current_thread() is self._thread:
            return  # what the client itself logs would go round in circles
        try:
            message = self.format(record)[:MAX_MESSAGE]
            at = datetime.fromtimestamp(record.created, UTC).isoformat()
            self._start()
            self._queue.put_nowait(_Sent(message, record.levelname[:32], record.name[:200], at))
        except queue.Full:
            self._drop(1)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was logged so far is sent or dropped, but not long."""
        deadline = time.monotonic() + FLUSH_S
        self._hurry.set()
        while self._queue.unfinished_tasks and self._alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        """Send what waits, but not for long, and stop."""
        if not self._closing:
            self.flush()
            self._closing = True
            self._hurry.set()
            if self._thread is not None and self._alive():
                self._thread.join(FLUSH_S)
        _handlers.discard(self)
        super().close()

    def _alive(self) -> bool:
        return self._thread is not None and self._pid == os.getpid() and self._thread.is_alive()

    def _start(self) -> None:
        """Start the thread with the first record; a forked process starts its own."""
        if self._alive():
            return
        with self._counting:
            if self._alive():
                return
            if self._pid not in {0, os.getpid()}:
                self._queue = queue.Queue(self._queue.maxsize)
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._run, name="carrel-log", daemon=True)
            self._thread.start()

    def _drop(self, count: int) -> None:
        with self._counting:
            self.dropped += count
            self._unsent += count

    def _run(self) -> None:
        url, token = self._given
        client: Client | None = None
        try:
            while True:
                batch = self._batch()
                if not batch:
                    return
                try:
                    client = client or Client(url, token)
                    self._send(client, batch)
                except CarrelError:
                    self._drop(len(batch))
                finally:
                    for _ in batch:
                        self._queue.task_done()
        finally:
            if client is not None:
                client.close()

    def _batch(self) -> list[_Sent]:
        """Wait for records, and a moment for more. An empty batch ends the thread."""
        batch: list[_Sent] = []
        until = 0.0
        while len(batch) < MAX_BATCH:
            try:
                batch.append(self._queue.get(timeout=0.05))
                until = until or time.monotonic() + BATCH_S
            except queue.Empty:
                if self._closing or (batch and (self._hurry.is_set() or time.monotonic() > until)):
                    break
        if self._queue.empty():
            self._hurry.clear()
        return batch

    def _send(self, client: Client, batch: list[_Sent]) -> None:
        """Send a batch. A server that is away or busy is asked some times; a refusal drops the batch."""
        backoff = Backoff(0.2, 5.0)
        with self._counting:
            dropped, self._unsent = self._unsent, 0
        records = [each._asdict() for each in batch]
        for attempt in range(1, _GIVE_UP_AFTER + 1):
            try:
                client.publish_log(records, context=self._context, dropped=dropped)
                return
            except CarrelError as error:
                final = attempt == _GIVE_UP_AFTER or self._closing or (error.status < 500 and error.status != 429)
                if final:
                    with self._counting:
                        self._unsent += dropped
                    raise
            time.sleep(backoff.next_pause())


_handlers: weakref.WeakSet[BusHandler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for handler in list(_handlers):
        handler.close()
