"""Many files as one stream of bytes: for each a line that says what comes, then its content as it is.

A part begins with four bytes, the length of its head (big-endian); then comes the head as JSON, then as many bytes as
it says. A length of 0 ends the stream. Knows the form alone: not where files come from, nor where they go.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from carrel.errors import InvalidRequest

MEDIA_TYPE = "application/x-carrel-bundle"
MOST_FILES = 10_000
MOST_HEAD = 32 * 1024
_LARGEST = 1 << 50
_LENGTH = struct.Struct(">I")
END = _LENGTH.pack(0)

PartKind = Literal["file", "request", "result", "problem"]


@dataclass(frozen=True, slots=True)
class Part:
    """What comes next: a file; or what the files are for, as JSON; or, in the place of a file, why there is none."""

    kind: PartKind
    size: int
    path: str = ""
    mode: int | None = None

    def head(self) -> bytes:
        """As it goes before the content. A path that is not UTF-8 comes with surrogate escapes, and so it goes."""
        value = {"kind": self.kind, "size": self.size, "path": self.path, "mode": self.mode}
        text = json.dumps({name: each for name, each in value.items() if each not in {"", None}}).encode()
        if len(text) > MOST_HEAD:
            raise _wrong("a path is too long")
        return _LENGTH.pack(len(text)) + text


class Unbundling:
    """Takes a stream apart as it comes; `ended` once all of it was there. Holds no more than what it was fed."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._left = 0
        self._parts = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """What these bytes tell: parts, and after each the pieces of its content. `InvalidRequest` for nonsense."""
        self._held += data
        while self._held:
            if self.ended:
                raise _wrong("there is more after its end")
            if self._left:
                piece = bytes(self._held[: self._left])
                del self._held[: len(piece)]
                self._left -= len(piece)
                yield piece
                continue
            if len(self._held) < _LENGTH.size:
                return
            (length,) = _LENGTH.unpack_from(self._held)
            if length > MOST_HEAD:
                raise _wrong(f"a head has more than {MOST_HEAD} bytes")
            if len(self._held) < _LENGTH.size + length:
                return
            head = bytes(self._held[_LENGTH.size : _LENGTH.size + length])
            del self._held[: _LENGTH.size + length]
            if not length:
                self.ended = True
                continue
            self._parts += 1
            if self._parts > MOST_FILES + 1:
                raise _wrong(f"there are more than {MOST_FILES} files")
            part = _part(head)
            self._left = part.size
            yield part

    def finish(self) -> None:
        """Nothing more comes: `InvalidRequest` unless all was there."""
        if not self.ended:
            raise _wrong("it ends in the middle")


def _part(head: bytes) -> Part:
    try:
        value = json.loads(head)
        kind, size, path, mode = value["kind"], value["size"], value.get("path", ""), value.get("mode")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _wrong("a head is not JSON with 'kind' and 'size'") from None
    if kind not in get_args(PartKind) or not isinstance(path, str) or "\0" in path:
        raise _wrong("a head has a kind or a path that cannot be")
    if type(size) is not int or not 0 <= size <= _LARGEST:
        raise _wrong("a head has a size that cannot be")
    if mode is not None and (type(mode) is not int or not 0 <= mode <= 0o777):
        raise _wrong("a head has a mode that cannot be")
    return Part(kind, size, path, mode)


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"the bundle cannot be read: {why}", field="body", hint="the SDK writes and reads bundles")
