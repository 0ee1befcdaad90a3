"""Removes secrets from errors, command lines and the output of commands: two streams, split anywhere, read from any
offset.

An offset counts raw bytes of both streams in the order of writing. It is given out only when everything before it was
sent, so that a reader who continues from it misses nothing.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from carrel.control.supervisor.frames import FrameReader, StreamChunk
from carrel.errors import CarrelError, SandboxLost
from carrel.models import CommandInfo, CommandResult
from carrel.primitives import tasks
from carrel.redaction.redact import Redactor, StreamRedactor

P = ParamSpec("P")
T = TypeVar("T")
Current = Callable[[], Awaitable[Redactor]]
"""Returns the redactor for the current secrets: they may change while an output is read."""

LARGE = 32 * 1024
"""Larger texts are searched in a thread: a hostile text can take long."""
_BESIDE = ThreadPoolExecutor(8, thread_name_prefix="carrel-redact")

QUIET_S = 0.05
"""How long a terminal waits for what may be the rest of a secret."""
MOST_WAITING = 64 * 1024
"""Bytes of one stream that may wait while the other may be in the middle of a secret."""


async def in_thread_if_large(size: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function, in a thread if it has to search that many bytes."""
    if size <= LARGE:
        return work(*arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(_BESIDE, partial(work, *arguments, **named))


class OutputRedactor:
    """One reader of an output. The first `skip` raw bytes lie before the offset and are only searched."""

    def __init__(self, redactor: Redactor, skip: int = 0):
        self._redactor = redactor
        self._skip = skip
        self._before: dict[str, bytes] = {}
        self._streams: dict[str, StreamRedactor] = {}
        self._positions: dict[str, int] = {}
        self._holder: str | None = None
        self._waiting: deque[StreamChunk] = deque()
        self._waiting_bytes = 0
        self._owed = 0

    @property
    def holds(self) -> bool:
        return self._holder is not None

    def use(self, redactor: Redactor) -> None:
        """Use another redactor from here on, also for bytes that are held back."""
        if redactor is not self._redactor:
            self._redactor = redactor
            for stream in self._streams.values():
                stream.use(redactor)

    def feed(self, chunk: StreamChunk) -> list[StreamChunk]:
        """Return the chunks that can be sent now; `raw` of each is the number of raw bytes that it completes."""
        data = chunk.data
        if self._skip:
            passed = data[: self._skip]
            self._before[chunk.stream] = self._before.get(chunk.stream, b"") + passed
            self._skip -= len(passed)
            data = data[len(passed) :]
        if not data:
            return []
        if self._holder is not None and chunk.stream != self._holder:
            self._waiting.append(StreamChunk(chunk.stream, data))
            self._waiting_bytes += len(data)
            return self._settle(self._holder) if self._waiting_bytes > MOST_WAITING else []
        given: list[StreamChunk] = []
        self._pass(chunk.stream, data, given)
        self._drain(given)
        return given

    def quiet(self) -> list[StreamChunk]:
        """Return held bytes that are too few to reveal a secret, after a short silence: an echoed key, a prompt."""
        given: list[StreamChunk] = []
        if self._holder is not None and not self._waiting:
            stream = self._streams[self._holder]
            self._give(self._holder, stream.release(), given)
            self._holder = self._holder if stream.held else None
        return given

    def finish(self) -> list[StreamChunk]:
        """Return the rest at the end of the output."""
        given: list[StreamChunk] = []
        while self._holder is not None:
            given += self._settle(self._holder)
        return given

    def _settle(self, name: str) -> list[StreamChunk]:
        """Treat the held bytes as the end of their stream, and continue with the chunks that waited."""
        given: list[StreamChunk] = []
        ended = self._streams[name]
        self._give(name, ended.finish(), given)
        self._streams[name] = self._redactor.stream(effort=ended.effort)
        self._positions[name] = 0
        self._holder = None
        self._drain(given)
        return given

    def _drain(self, given: list[StreamChunk]) -> None:
        while self._waiting and (self._holder is None or self._waiting[0].stream == self._holder):
            chunk = self._waiting.popleft()
            self._waiting_bytes -= len(chunk.data)
            self._pass(chunk.stream, chunk.data, given)
        if not self._waiting and self._owed:
            given.append(StreamChunk("stdout", b"", self._owed))
            self._owed = 0

    def _pass(self, name: str, data: bytes, given: list[StreamChunk]) -> None:
        stream = self._streams.get(name)
        if stream is None:
            before = self._before.pop(name, b"")
            stream = self._streams[name] = self._redactor.stream(skip=len(before))
            self._positions[name] = len(before)
            stream.feed(before)
        self._give(name, stream.feed(data), given)
        self._holder = name if stream.held else None

    def _give(self, name: str, data: bytes, given: list[StreamChunk]) -> None:
        position = self._streams[name].position
        raw = position - self._positions[name]
        self._positions[name] = position
        if self._waiting:  # waiting chunks lie before it: the offset moves when they are sent
            self._owed += raw
            raw = 0
        if data or raw:
            given.append(StreamChunk(name, data, raw))


async def clean_output(stream: AsyncIterator[bytes], current: Current, skip: int) -> AsyncGenerator[StreamChunk, None]:
    """Yield the output from frames of a supervisor without secrets; the end comes last.

    The stream begins `skip` bytes before the wanted offset: these are only searched.
    """
    reader, cleaned = FrameReader(), OutputRedactor(await current(), skip)
    async for data in _or_quiet(stream, cleaned):
        if data is None:
            for chunk in cleaned.quiet():
                yield chunk
            continue
        cleaned.use(await current())
        for raw in reader.feed(data):
            if raw.stream == "stopped":
                for chunk in cleaned.quiet():
                    yield chunk
                yield raw
                continue
            for chunk in (
                cleaned.finish() if raw.stream == "end" else await in_thread_if_large(len(raw.data), cleaned.feed, raw)
            ):
                yield chunk
            if raw.stream == "end":
                yield raw
    if not reader.ended:
        raise SandboxLost("the sandbox ended the output in the middle")


async def _or_quiet(stream: AsyncIterator[bytes], cleaned: OutputRedactor) -> AsyncIterator[bytes | None]:
    """Yield the pieces of a stream; None when bytes are held back and nothing came for a short time."""
    coming: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            if not cleaned.holds and coming is None:
                data = await anext(stream, None)
            else:
                coming = coming or asyncio.ensure_future(_next(stream))
                done, _ = await asyncio.wait({coming}, timeout=QUIET_S)
                if not done:
                    yield None
                    continue
                data, coming = await coming, None
            if data is None:
                return
            yield data
    finally:
        await tasks.cancel([coming])


async def _next(stream: AsyncIterator[bytes]) -> bytes | None:
    return await anext(stream, None)


def clean_error(redactor: Redactor | None, error: CarrelError) -> None:
    """Remove secrets from an error before it is shown or logged. Without a redactor the secrets are unknown: then only
    the title of the error remains, and its numbers: whether and when to ask again.
    """
    if redactor is None:
        numbers: dict[str, object] = {key: value for key, value in error.extra.items() if isinstance(value, int)}
        error.detail, error.hint, error.extra = error.title, None, numbers
    else:
        error.detail = redactor.text(error.detail)
        error.hint = None if error.hint is None else redactor.text(error.hint)
        error.field = None if error.field is None else redactor.text(error.field)
        error.extra = redactor.value(error.extra)
    error.args = (error.detail,)


def clean_info(redactor: Redactor, info: CommandInfo) -> CommandInfo:
    """Remove secrets from the command line of a command, and from what it says about its progress."""
    shown = {"command": redactor.value(info.command)}
    if info.progress is not None:
        shown["progress"] = redactor.text(info.progress)
    return info.model_copy(update=shown)


R = TypeVar("R", bound=CommandResult)


def clean_result(redactor: Redactor, result: R) -> R:
    """Remove secrets from the output of a finished command."""
    changes: dict[str, object] = {}
    for name, text, exact in (
        ("stdout", result.stdout, result.stdout_base64),
        ("stderr", result.stderr, result.stderr_base64),
    ):
        if exact is not None:
            data = redactor.data(base64.b64decode(exact))
            changes |= {f"{name}_base64": base64.b64encode(data).decode(), name: data.decode(errors="replace")}
        elif text:
            changes[name] = redactor.text(text)
    return result.model_copy(update=changes)
