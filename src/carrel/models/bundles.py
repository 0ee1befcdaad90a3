"""Bundles: many files in one stream of bytes.

A part has four bytes with the length of its head (big-endian), the head as JSON, and the content, whose size is in the
head. A length of 0 ends the stream. This module knows only the format.
"""

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
class BundlePart:
    """The head of a part: a file, or JSON with the request, the result, or the problem in the place of a file."""

    kind: PartKind
    size: int
    path: str = ""
    mode: int | None = None

    def head(self) -> bytes:
        """Encode it. A path that is not UTF-8 has surrogate escapes, which JSON keeps."""
        value = {"kind": self.kind, "size": self.size, "path": self.path, "mode": self.mode}
        text = json.dumps({name: each for name, each in value.items() if each not in {"", None}}).encode()
        if len(text) > MOST_HEAD:
            raise _wrong("a path is too long")
        return _LENGTH.pack(len(text)) + text


class Unbundling:
    """Splits a stream into parts while it arrives. `ended` is true after its end."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._left = 0
        self._parts = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[BundlePart | bytes]:
        """Yield the parts in these bytes, and after each part the pieces of its content. Raises `InvalidRequest`."""
        self._held += data
        while self._held:
            if self.ended:
                raise _wrong("there are bytes after its end")
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
        """Check that the stream is complete; raises `InvalidRequest` if not."""
        if not self.ended:
            raise _wrong("it ends in the middle")


def _part(head: bytes) -> BundlePart:
    try:
        value = json.loads(head)
        kind, size, path, mode = value["kind"], value["size"], value.get("path", ""), value.get("mode")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _wrong("a head is not JSON with 'kind' and 'size'") from None
    if kind not in get_args(PartKind) or not isinstance(path, str) or "\0" in path:
        raise _wrong("a head has an invalid kind or path")
    if type(size) is not int or not 0 <= size <= _LARGEST:
        raise _wrong("a head has an invalid size")
    if mode is not None and (type(mode) is not int or not 0 <= mode <= 0o777):
        raise _wrong("a head has an invalid mode")
    return BundlePart(kind, size, path, mode)


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the bundle cannot be read: {why}", field="body", hint="use the SDK to write and read bundles"
    )
