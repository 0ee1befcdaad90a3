"""The frames by which many connections share the one serial line between a virtual machine and its host. Pure.

Each end opens streams with numbers of its own: the host even ones, the machine odd ones. A receiver grants credit for
the bytes that it can hold, so a stream that nobody reads stops only itself. A stream ends when both ends have closed
it. Whatever an end does that this module does not expect is a `BrokenLine`: nothing is repaired or skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

HEADER = struct.Struct(">BBHI")
"""Kind, place, length of the payload, stream."""
MOST_PAYLOAD = 16 * 1024
WINDOW = 256 * 1024
"""The most bytes of a stream that were sent and not yet taken."""
MOST_STREAMS = 1024
"""The most streams that one end may have opened at a time."""
_CREDIT = struct.Struct(">I")


class BrokenLine(Exception):
    """The other end broke the rules, or is gone."""


class Kind(IntEnum):
    """What a frame says."""

    OPEN = 1
    DATA = 2
    END = 3
    """No more data will follow in this direction."""
    CREDIT = 4
    CLOSE = 5
    """Nothing will follow in this direction, and what arrives is dropped."""


class Place(IntEnum):
    """What a stream is opened to."""

    NONE = 0
    SUPERVISOR = 1
    """Opened by the host: the socket of the supervisor."""
    REPORT = 2
    """Opened by the machine, once: the connection on which the supervisor gets its facts."""
    EGRESS = 3
    """Opened by the machine: the way out."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `place` is that of `OPEN`."""

    kind: Kind
    stream: int
    place: Place = Place.NONE
    payload: bytes = b""

    @property
    def credit(self) -> int:
        return int(_CREDIT.unpack(self.payload)[0])


def packed(kind: Kind, stream: int, place: Place = Place.NONE, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, place, len(payload), stream) + payload


def packed_credit(stream: int, amount: int) -> bytes:
    return packed(Kind.CREDIT, stream, payload=_CREDIT.pack(amount))


class LineReader:
    """Takes frames out of what arrives. It keeps less than one frame."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Return the frames that are complete now. Raises `BrokenLine`."""
        self._rest += data
        start = 0
        while len(self._rest) - start >= HEADER.size:
            number, place, length, stream = HEADER.unpack_from(self._rest, start)
            try:
                kind, where = Kind(number), Place(place)
            except ValueError as error:
                raise BrokenLine(f"an unknown frame: {error}") from None
            if length > MOST_PAYLOAD:
                raise BrokenLine(f"a frame of {length} bytes")
            _check(kind, where, length, stream)
            if len(self._rest) - start - HEADER.size < length:
                break
            start += HEADER.size
            yield Frame(kind, stream, where, bytes(self._rest[start : start + length]))
            start += length
        del self._rest[:start]


def _check(kind: Kind, place: Place, length: int, stream: int) -> None:
    wanted = {Kind.OPEN: 0, Kind.END: 0, Kind.CLOSE: 0, Kind.CREDIT: _CREDIT.size}.get(kind, length)
    if length != wanted or (kind is Kind.DATA and not length) or (kind is Kind.OPEN) != (place is not Place.NONE):
        raise BrokenLine(f"a frame {kind.name} that is not well-formed")
    if not stream:
        raise BrokenLine("stream 0 does not exist")


@dataclass(slots=True)
class Stream:
    """The state of one stream, as this end sees it. Its methods raise `BrokenLine`."""

    number: int
    credit: int = WINDOW
    """How much this end may send."""
    granted: int = WINDOW
    """How much the other end may send."""
    owed: int = 0
    """What was taken and is not granted again yet."""
    end_sent: bool = False
    end_received: bool = False
    close_sent: bool = False
    close_received: bool = False

    @property
    def over(self) -> bool:
        return self.close_sent and self.close_received

    def received(self, frame: Frame) -> None:
        """Count a frame from the other end."""
        if self.close_received:
            raise BrokenLine("a frame for a stream that was closed")
        if frame.kind is Kind.DATA:
            self.granted -= len(frame.payload)
            if self.granted < 0 or self.end_received:
                raise BrokenLine("more data than a stream was granted")
        elif frame.kind is Kind.CREDIT:
            self.credit += frame.credit
            if not frame.credit or self.credit > WINDOW:
                raise BrokenLine("more credit than was used")
        elif frame.kind is Kind.END:
            if self.end_received:
                raise BrokenLine("a second end of a stream")
            self.end_received = True
        elif frame.kind is Kind.CLOSE:
            self.close_received = True

    def taken(self, amount: int) -> int:
        """Count bytes that were passed on; return what to grant now, 0 for nothing yet."""
        self.owed += amount
        if self.owed < WINDOW // 2 or self.end_received or self.close_sent:
            return 0
        grant, self.owed = self.owed, 0
        self.granted += grant
        return grant
