"""The access log of the proxy: a buffer of accesses, in memory and in a journal, until the control plane has written
them to the database.

An access is in the journal before anything goes out, so a proxy that is killed leaves no unrecorded connection. A timer
sends the buffer to the control plane; it is the only timer on the way to the database. While nobody writes the records,
new connections are refused. The journal survives a killed process; a host that loses power may lose the last moment.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import glob
import itertools
import logging
import marshal
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from carrel.egress.access import Access, AccessRefused
from carrel.primitives.atomic import draft, write_all

log = logging.getLogger("carrel.egress")

Item = dict[str, object]
Send = Callable[[int, list[Item]], bool]
"""Sends items with the position that acknowledges them; returns whether they could be sent."""

FLUSH_S = 0.1
"""How long an access waits for others to be sent with. One that ends within this time is written once."""
BATCH = 10
"""A batch of the longest items fits into one message of the channel."""
MOST_UNWRITTEN = 10_000
MOST_BYTES = 8 << 20
"""A longer journal is rewritten with the accesses that are still open in it."""
_MANY = 200
_MOST_TEXT = 200
_LENGTH = 4
_FORMAT = 2  # later formats of `marshal` look for repeated values, which takes longer than it saves


def item_of(access: Access) -> Item:
    """Return an access as it is sent and written to the journal."""
    target, verdict, method, path = access.target, access.verdict, access.method, access.path
    rule, source = verdict.rule, verdict.source
    return {
        "number": access.number,
        "sandbox": access.sandbox,
        "protocol": access.protocol,
        "host": None if target is None else target.host[:_MOST_TEXT],
        "port": None if target is None else target.port,
        "method": method and method[:_MOST_TEXT],
        "path": path and path[:_MOST_TEXT],
        "verdict": verdict.verdict,
        "rule": rule and rule[:_MOST_TEXT],
        "source": source and source[:_MOST_TEXT],
        "reason": verdict.reason[:_MOST_TEXT],
        "approval": verdict.approval,
        "address": access.address,
        "upstream": access.upstream,
        "inspected": access.inspected,
        "credential": access.credential,
        "sent": access.sent,
        "received": access.received,
        "result": access.result[:100],
        "began": access.began,
        "ended": access.ended,
    }


@dataclass(eq=False, slots=True)
class _Receiver:
    """A control plane: how accesses are sent to it, those of which sandboxes, and what it has not acknowledged."""

    send: Send
    owns: Callable[[str], bool]
    sent: deque[tuple[int, list[Item]]] = field(default_factory=deque)


class AccessLog:
    """All accesses of one proxy that the control plane has not acknowledged; an `access.AccessRecorder`."""

    def __init__(self, path: str, *, flush_s: float = FLUSH_S, most: int = MOST_UNWRITTEN):
        """`path`: of the journal. Accesses that a killed proxy left in it are sent too."""
        self._journal = Journal(path)
        self._numbers = itertools.count(self._journal.last + 1)
        # Above those of the process before: its batches may be acknowledged only now.
        self._positions = itertools.count(time.monotonic_ns())
        self._flush_s = flush_s
        self._most = most
        self._items: dict[int, Item] = {}  # the newest state of each access
        self._unsent: dict[int, None] = {}  # an ordered set of numbers
        self._receivers: dict[Hashable, _Receiver] = {}
        self._timer: asyncio.TimerHandle | None = None
        for number, item in self._journal.left.items():
            lost = {"ended": time.time(), "result": "unknown", "reason": "the proxy was killed", "recovered": True}
            self._items[number] = {**item, **lost}
            self._unsent[number] = None

    def __len__(self) -> int:
        return len(self._items)

    def opened(self, access: Access) -> None:
        """See `access.AccessRecorder`."""
        if len(self._items) >= self._most:
            raise _unwritable()
        access.number = next(self._numbers)
        if access.ended is not None:
            return  # it was refused: nothing goes out, and `closed` follows
        item = item_of(access)
        try:
            self._journal.opened(access.number, item)
        except OSError as error:
            raise _unwritable() from error
        self._put(access.number, item)

    def closed(self, access: Access) -> None:
        """See `access.AccessRecorder`."""
        if access.number:
            self._put(access.number, item_of(access))

    def connect(
        self, send: Send, receiver: Hashable = None, owns: Callable[[str], bool] = lambda _sandbox: True
    ) -> None:
        """Send what was not acknowledged, and all that follows, to a receiver: the accesses of the sandboxes that it
        `owns`. Those of a sandbox that nobody owns go to the receiver that is connected for the longest time.
        """
        self.disconnect(receiver)
        self._receivers[receiver] = _Receiver(send, owns)
        self.flush()

    def disconnect(self, receiver: Hashable = None) -> None:
        """Send nothing more to a receiver. What it did not acknowledge is sent again."""
        if (gone := self._receivers.pop(receiver, None)) is not None:
            self._put_back(gone, ())
            if self._receivers:
                self._flush_soon()

    def _put_back(self, gone: _Receiver, unsent: Iterable[int]) -> None:
        before = [int(str(item["number"])) for _, items in gone.sent for item in items]
        known = (number for number in (*before, *unsent, *self._unsent) if number in self._items)
        self._unsent = dict.fromkeys(known)

    def acknowledge(self, upto: int, receiver: Hashable = None) -> None:
        """Forget the batches of a receiver up to this position: they are in the database."""
        written: list[int] = []
        known = self._receivers.get(receiver)
        while known is not None and known.sent and known.sent[0][0] <= upto:
            for item in known.sent.popleft()[1]:
                number = int(str(item["number"]))
                written.append(number)
                if self._items.get(number) is item:  # else it has ended since
                    del self._items[number]
        self._journal.written(written)

    def flush(self) -> None:
        """Send now what is waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._unsent and self._receivers:
            waiting: dict[Hashable, list[int]] = {}
            for number in self._unsent:
                waiting.setdefault(self._receiver_of(self._items[number]), []).append(number)
            self._unsent = {}
            for name, numbers in waiting.items():
                self._send(name, numbers)

    def _receiver_of(self, item: Item) -> Hashable:
        sandbox = str(item["sandbox"])
        return next((name for name, each in self._receivers.items() if each.owns(sandbox)), next(iter(self._receivers)))

    def _send(self, name: Hashable, numbers: Sequence[int]) -> None:
        receiver = self._receivers[name]
        for start in range(0, len(numbers), BATCH):
            items = [self._items[number] for number in numbers[start : start + BATCH]]
            position = next(self._positions)
            receiver.sent.append((position, items))
            if not receiver.send(position, items):
                self._receivers.pop(name, None)
                self._put_back(receiver, numbers[start + BATCH :])
                return

    def close(self) -> None:
        """Close the journal. It stays on the disk if accesses in it were not acknowledged."""
        self._journal.close()

    def _put(self, number: int, item: Item) -> None:
        self._items[number] = item
        self._unsent[number] = None
        if len(self._unsent) >= _MANY:
            self.flush()
        else:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self.flush)


class Journal:
    """A file of accesses that are not acknowledged. `left` are those of the process before, by number."""

    def __init__(self, path: str, *, most_bytes: int = MOST_BYTES):
        self._path = path
        self._most = most_bytes
        self._open, self.last = read(path)
        self.left = dict(self._open)
        self._file = -1
        self._size = self._least = 0
        for each in glob.glob(f"{glob.escape(path)}.*.new"):
            os.unlink(each)  # the draft of a process that was killed
        self._rewrite()

    def opened(self, number: int, item: Item) -> None:
        """Add an access before it goes out. Raises `OSError`: then it must not go out."""
        self._write((number, item))
        self._open[number] = item
        self.last = number

    def written(self, numbers: Iterable[int]) -> None:
        """Remove accesses that are in the database."""
        done = [number for number in numbers if self._open.pop(number, None) is not None]
        if done:
            self._write(done)
        if self._size > max(self._most, 2 * self._least):
            self._rewrite()

    def close(self) -> None:
        """Close the file, and remove it if it is empty."""
        os.close(self._file)
        if not self._open:
            os.unlink(self._path)

    def _write(self, entry: Any) -> None:
        """Append a line. If there is no space for the whole line, nothing of it stays."""
        line = _line(entry)
        if (written := os.write(self._file, line)) < len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _rewrite(self) -> None:
        lines = b"".join(map(_line, (self.last, *self._open.items())))
        with draft(self._path) as descriptor:
            write_all(descriptor, lines)
            file = os.dup(descriptor)
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._least = file, len(lines), len(lines)


def read(path: str) -> tuple[dict[int, Item], int]:
    """Return the open accesses of a journal by number, and its last number. Ignores everything from the first line on
    that is cut off or damaged: a host that lost power may have left anything there.
    """
    found: dict[int, Item] = {}
    last = 0
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return found, last
    at = 0
    while at + _LENGTH <= len(data):
        size = int.from_bytes(data[at : at + _LENGTH], "little")
        piece = data[at + _LENGTH : at + _LENGTH + size]
        at += _LENGTH + size
        if len(piece) < size:
            break
        try:
            entry = marshal.loads(piece)  # noqa: S302 - its own file, in a directory that only the server's user has
            if isinstance(entry, int):
                last = max(last, entry)
            elif isinstance(entry, list):
                for number in entry:
                    found.pop(number, None)
            else:
                number, item = entry
                found[number] = item
                last = max(last, number)
        except (ValueError, EOFError, TypeError):
            log.warning("the journal of the access log is damaged: what follows byte %d of it is lost", at)
            break
    return found, last


def _line(entry: Any) -> bytes:
    data = marshal.dumps(entry, _FORMAT)
    return len(data).to_bytes(_LENGTH, "little") + data


def _unwritable() -> AccessRefused:
    return AccessRefused(
        "the access log cannot be written at the moment",
        code="platform_error",
        status=503,
        hint="try again in a moment",
        retry=True,
    )
