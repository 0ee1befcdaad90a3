"""Long work that its caller follows: its progress as JSON, an object per line, and last the result or the problem."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from carrel.api.parts import NDJSON, ClosingStream
from carrel.api.problems import UNEXPECTED
from carrel.errors import CarrelError
from carrel.models.base import Answer

_MOST_LINES = 1000
"""Lines of progress that wait for a slow reader; later ones are dropped."""

P = TypeVar("P")
R = TypeVar("R")
P_contra = TypeVar("P_contra", contravariant=True)
R_contra = TypeVar("R_contra", contravariant=True)


class FollowedEvent(Protocol[P_contra, R_contra]):
    """The model of one line: how it tells progress, the result and a problem."""

    @staticmethod
    def said(progress: P_contra) -> Answer: ...

    @staticmethod
    def done(result: R_contra) -> Answer: ...

    @staticmethod
    def failed(problem: dict[str, object]) -> Answer: ...


def followed_answer(model: type[Answer], event: type[Answer]) -> dict[str, Any]:
    """Return the OpenAPI description of a route that answers with `model`, or with lines of `event` if followed."""
    schema = event.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"model": model, "content": {NDJSON: {"schema": schema}}}


def follow(
    work: Callable[[Callable[[P], None]], Awaitable[R]],
    event: FollowedEvent[P, R],
    held: AbstractAsyncContextManager[object] | None = None,
) -> Response:
    """Run `work` and stream what it says. It is cancelled if the caller disconnects. `held` is left at the end."""
    return ClosingStream(_lines(work, event, held), media_type=NDJSON, headers={"cache-control": "no-store"})


async def _lines(
    work: Callable[[Callable[[P], None]], Awaitable[R]],
    event: FollowedEvent[P, R],
    held: AbstractAsyncContextManager[object] | None,
) -> AsyncIterator[bytes]:
    said: asyncio.Queue[Answer | None] = asyncio.Queue()

    def say(progress: P) -> None:
        if said.qsize() < _MOST_LINES:
            said.put_nowait(event.said(progress))

    async def run() -> None:
        try:
            said.put_nowait(event.done(await work(say)))
        except CarrelError as error:
            said.put_nowait(event.failed(error.problem()))
        except Exception:
            said.put_nowait(event.failed(UNEXPECTED.problem()))
            raise
        finally:
            said.put_nowait(None)

    async with AsyncExitStack() as stack:
        if held is not None:
            await stack.enter_async_context(held)
        task = asyncio.get_running_loop().create_task(run())
        try:
            while (line := await said.get()) is not None:
                yield line.model_dump_json(exclude_none=True).encode() + b"\n"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, CarrelError):
                await task
