"""Output of commands as a client sees it: chunks cut from a stream of events, exact bytes beside text.

Pure: bytes in, values out. Knows no connection.
"""

from __future__ import annotations

import base64
import binascii
import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from carrel.errors import CarrelError, CommandFailed, PlatformError, from_problem
from carrel.models import CommandInfo, CommandResult, OutputEvent

MAX_LINE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output. A character that was cut in two is whole in `text` of the later chunk."""

    stream: str
    data: bytes
    text: str
    offset: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a command from one offset on. Continue reading at `offset`."""

    data: bytes
    stdout: str
    stderr: str
    offset: int
    info: CommandInfo | None

    @property
    def text(self) -> str:
        """Both streams in the order they were written."""
        return self.data.decode("utf-8", "replace")

    @classmethod
    def of(cls, chunks: list[Chunk], offset: int, info: CommandInfo | None) -> Output:
        """Join the chunks of one reading."""
        return cls(
            data=b"".join(chunk.data for chunk in chunks),
            stdout="".join(chunk.text for chunk in chunks if chunk.stream == "stdout"),
            stderr="".join(chunk.text for chunk in chunks if chunk.stream == "stderr"),
            offset=chunks[-1].offset if chunks else offset,
            info=info,
        )


class OutputDecoder:
    """Decodes a stream of events, one JSON object a line, into chunks. The last event sets `info`."""

    def __init__(self) -> None:
        self.info: CommandInfo | None = None
        self.ended = False
        self._parts: list[bytes] = []
        self._pending = 0
        self._text = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Yield the chunks that are complete with `data`."""
        # Split at b"\n" only: the text of an event may contain other line separators.
        head, newline, rest = data.partition(b"\n")
        while newline:
            self._parts.append(head)
            line = b"".join(self._parts)
            self._parts.clear()
            self._pending = 0
            if line.strip():
                yield from self._event(line)
            head, newline, rest = rest.partition(b"\n")
        if head:
            self._parts.append(head)
            self._pending += len(head)
            if self._pending > MAX_LINE:
                raise PlatformError("the server sent an output event that is too long")

    def _event(self, line: bytes) -> Iterator[Chunk]:
        try:
            event = OutputEvent.model_validate_json(line)
            data = base64.b64decode(event.base64, validate=True) if event.base64 is not None else None
        except (ValidationError, binascii.Error):
            raise self._unreadable(line) from None
        if event.stream == "end":
            self.info = event.result
            self.ended = True
            yield from self._rest(event.offset)
            return
        if data is None:
            data = (event.text or "").encode("utf-8", "surrogateescape")
        yield Chunk(event.stream, data, self._text[event.stream].decode(data), event.offset)

    def _rest(self, offset: int) -> Iterator[Chunk]:
        for name, decoder in self._text.items():
            if text := decoder.decode(b"", final=True):
                yield Chunk(name, b"", text, offset)

    @staticmethod
    def _unreadable(line: bytes) -> CarrelError:
        # A failure after the headers were sent arrives as the last line.
        from pydantic_core import from_json

        try:
            problem = from_json(line)
        except ValueError:
            problem = None
        if isinstance(problem, dict) and "code" in problem:
            return from_problem(problem)
        return PlatformError("the server sent an output event that cannot be read")


R = TypeVar("R", bound=CommandResult)


def checked(result: R) -> R:
    """Return the result of a command that succeeded; raise `CommandFailed` otherwise."""
    if result.ok:
        return result
    if result.timed_out:
        what = "the command timed out"
    elif result.signal is not None:
        what = f"the command was killed by {result.signal}"
    else:
        what = f"the command exited with {result.exit_code}"
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    raise CommandFailed(f"{what}: {lines[-1][:500]}" if lines else what, result=result)
