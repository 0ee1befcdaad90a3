"""Output frames of a supervisor: read piece by piece, and turned into output events. Pure: no I/O.

The bytes come from inside a sandbox: the reader never stores more than one end frame.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from carrel.errors import SandboxLost

MAX_END = 1024 * 1024
_HEADER = 5
_STREAMS = {0: "end", 1: "stdout", 2: "stderr"}
_STOPPED = 3


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A piece of one stream; for `end` the whole payload of the end frame; `stopped`, without data, when a signal has
    stopped an attached program.

    `raw` is the number of bytes before redaction, if that is not the length of `data`.
    """

    stream: str
    data: bytes
    raw: int | None = None


class FrameReader:
    """Splits bytes into chunks. Payloads are passed on as they come; only an end frame is collected."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._kind = 0
        self._left = 0
        self.ended = False

    def feed(self, data: bytes) -> list[StreamChunk]:
        """Return the chunks in `data`; `SandboxLost` when these are not frames."""
        chunks: list[StreamChunk] = []
        view = memoryview(data)
        while view or (self._kind == -1 and self._left == 0):
            if self.ended:
                raise SandboxLost("the sandbox sent output after its end")
            if self._kind == -1:
                taken = view[: self._left]
                self._buffer += taken
                self._left -= len(taken)
                view = view[len(taken) :]
                if self._left:
                    break
                self.ended = True
                self._kind = 0
                chunks.append(StreamChunk("end", bytes(self._buffer)))
                self._buffer.clear()
            elif self._left:
                taken = view[: self._left]
                self._left -= len(taken)
                view = view[len(taken) :]
                chunks.append(StreamChunk(_STREAMS[self._kind], bytes(taken)))
            else:
                taken = view[: _HEADER - len(self._buffer)]
                self._buffer += taken
                view = view[len(taken) :]
                if len(self._buffer) == _HEADER and self._begin() == _STOPPED:
                    chunks.append(StreamChunk("stopped", b""))
        return chunks

    def _begin(self) -> int:
        kind, self._left = self._buffer[0], int.from_bytes(self._buffer[1:], "big")
        self._buffer.clear()
        if kind == _STOPPED and self._left == 0:
            self._kind = 0
            return kind
        if kind not in _STREAMS:
            raise SandboxLost("the sandbox sent output that is not frames")
        if kind == 0 and self._left > MAX_END:
            raise SandboxLost("the sandbox sent an end frame that is too long")
        self._kind = kind or -1
        return kind


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of output for a caller: text where the bytes are UTF-8, else base64. `offset` is the
    position after it.
    """

    stream: str
    offset: int
    text: str | None = None
    base64: str | None = None


class TextCutter:
    """Turns chunks into pieces, and splits text only between characters.

    The first bytes of a character wait for the next chunk of their stream. When the other stream comes first, they are
    given as bytes, so that a reader who continues from any offset loses nothing.
    """

    def __init__(self, offset: int = 0):
        self.offset = offset
        self._stream = "stdout"
        self._rest = b""

    def feed(self, chunk: StreamChunk) -> list[Piece]:
        pieces = [] if chunk.stream == self._stream else self.flush()
        self._stream = chunk.stream
        data = self._rest + chunk.data if self._rest else chunk.data
        self.offset += len(self._rest) + (len(chunk.data) if chunk.raw is None else chunk.raw)
        self._rest = b""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data" or len(data) - error.start > 3:
                pieces.append(Piece(chunk.stream, self.offset, base64=base64.b64encode(data).decode()))
                return pieces
            self._rest = data[error.start :]
            text = data[: error.start].decode()
            self.offset -= len(self._rest)
        if text:
            pieces.append(Piece(chunk.stream, self.offset, text=text))
        return pieces

    def flush(self) -> list[Piece]:
        """Return the bytes that still wait."""
        if not self._rest:
            return []
        data, self._rest = self._rest, b""
        self.offset += len(data)
        return [Piece(self._stream, self.offset, base64=base64.b64encode(data).decode())]
