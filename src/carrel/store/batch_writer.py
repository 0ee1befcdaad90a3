"""One process that writes the batches of all workers of a server, and the workers' connections to it.

SQLite lets one process write at a time. If each worker made a transaction for each of its commands, all would queue
for that: so this process takes what has come from all of them and writes it in one transaction. A batch is answered
when it is committed. Both ends are processes of one server, forked from the same program.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from carrel.errors import CarrelError, Conflict, DatabaseUnavailable, PlatformError
from carrel.models.events import EventDraft
from carrel.store.batches import Batch, add, grown
from carrel.store.database import Database
from carrel.store.grouped import MOST_TOGETHER, GroupedWrites

log = logging.getLogger("carrel.writer")

RETURNS_WITHIN_S = 5.0
"""How long a batch waits for the process that replaces a writer which died."""
_POLL_S = 0.005
_LENGTH = 4
_LARGEST = 256 * 1024 * 1024
_WRITTEN = b"{}"
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


class _Frames(asyncio.Protocol):
    """Messages on a stream: the length in four bytes, and JSON."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # those of uvloop derive from another class

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._data[:_LENGTH], "big")
            if end > _LARGEST:
                log.error("a message between workers is too long")
                self.close()
                return
            if len(self._data) < end:
                return
            message = bytes(self._data[_LENGTH:end])
            del self._data[:end]
            self.received(message)

    def received(self, message: bytes) -> None:
        """Take a message."""
        raise NotImplementedError

    def send(self, message: bytes) -> None:
        """Send a message; nobody learns if the other end is gone."""
        if self._transport is not None:
            self._transport.write(len(message).to_bytes(_LENGTH, "big") + message)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def encoded(batch: Batch) -> bytes:
    """Return the message of a batch."""
    records, *others = batch
    rows = [(*row[:10], row[10].hex(), row[11]) for row in records]
    return _dumps((rows, *others)).encode("utf-8", "surrogatepass")


def decoded(message: bytes) -> Batch:
    """Return the batch of a message."""
    rows, heads, holds, events = json.loads(message.decode("utf-8", "surrogatepass"))
    return (
        [(*row[:10], bytes.fromhex(row[10]), row[11]) for row in rows],
        [tuple(head) for head in heads],
        [tuple(hold) for hold in holds],
        [EventDraft(*event) for event in events],
    )


# the writer


class Writer:
    """Writes what workers send, until it is closed. What waits at the same moment shares a transaction."""

    def __init__(self, database: Database):
        self._writes = GroupedWrites(database, short=MOST_TOGETHER)
        self._connections: set[_Worker] = set()
        self._server: asyncio.AbstractServer | None = None

    async def listen(self, path: str) -> None:
        """Take batches at a socket."""
        with suppress(FileNotFoundError):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(partial(_Worker, self), path)
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Take no more, and write what has come."""
        if self._server is not None:
            self._server.close()
        await self._writes.close()
        for each in list(self._connections):
            each.close()

    def opened(self, connection: _Worker) -> None:
        """Remember a connection."""
        self._connections.add(connection)

    def closed(self, connection: _Worker) -> None:
        """Forget a connection."""
        self._connections.discard(connection)

    def put(self, batch: Batch) -> asyncio.Future[None]:
        """Write a batch with the others that wait."""

        def change(connection: Connection) -> tuple[None, Sequence[EventDraft]]:
            add(connection, batch)
            return None, batch[3]

        return self._writes.put("", change)


class _Worker(_Frames):
    """A connection of a worker."""

    def __init__(self, writer: Writer):
        super().__init__()
        self._writer = writer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._writer.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writer.closed(self)

    def received(self, message: bytes) -> None:
        self._writer.put(decoded(message)).add_done_callback(self._answer)

    def _answer(self, done: asyncio.Future[None]) -> None:
        error = done.exception()
        if error is None:
            self.send(_WRITTEN)
        elif isinstance(error, IntegrityError | Conflict):
            self.send(_dumps({"error": "conflict"}).encode())
        else:
            if not isinstance(error, CarrelError):
                log.error("a batch cannot be written", exc_info=error)
            self.send(_dumps({"error": str(error)[:1000]}).encode("utf-8", "replace"))


# the workers


class _ToWriter(_Frames):
    """The connection of a worker to the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[asyncio.Future[bytes]] = []
        self.lost = False

    def received(self, message: bytes) -> None:
        answer = self.answers.pop(0)
        if not answer.done():
            answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._transport = None
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(_gone("while it wrote"))
        self.answers.clear()


class BatchesThere:
    """Has the writer of the server write. While a dead one is replaced, batches wait for the next one."""

    def __init__(self, database: Database, path: str):
        self._database = database
        self._path = path
        self._connecting = asyncio.Lock()
        self._connection: _ToWriter | None = None

    async def write(self, batch: Batch) -> None:
        """Write a batch; see `BatchWriter`."""
        connection = self._connection
        if connection is None or connection.lost:
            connection = await self._connected()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        connection.answers.append(answer)
        connection.send(encoded(batch))
        said = await answer
        if said != _WRITTEN:
            error: Any = json.loads(said)["error"]
            raise grown() if error == "conflict" else PlatformError(str(error))
        if batch[3]:
            self._database.staged.set()

    async def _connected(self) -> _ToWriter:
        async with self._connecting:
            ends = time.monotonic() + RETURNS_WITHIN_S
            while self._connection is None or self._connection.lost:
                try:
                    loop = asyncio.get_running_loop()
                    _, self._connection = await loop.create_unix_connection(_ToWriter, self._path)
                except OSError:
                    if time.monotonic() > ends:
                        raise _gone("and none has taken its place") from None
                    await asyncio.sleep(_POLL_S)
            return self._connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def _gone(when: str) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"the process that writes the records of all workers ended {when}",
        hint="ask again; another takes its place",
        retry=True,
        retry_after=1,
    )
