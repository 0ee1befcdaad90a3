"""Tests that run on each event loop that carrel may run on: the one of the library and the faster one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

Test = Callable[..., Coroutine[Any, Any, None]]


def on(*factories: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[Test], Callable[..., None]]:
    """Run an asynchronous test on a loop of each kind."""

    def made(test: Test) -> Callable[..., None]:
        def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(test(**fixtures))

        known = inspect.signature(test)
        added = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = known.replace(parameters=[*known.parameters.values(), added])  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
        names = [factory.__module__.partition(".")[0] for factory in factories]
        return pytest.mark.parametrize("loop_factory", factories, ids=names)(run)

    return made


# The first loop of its kind makes a pipe for the whole process, which no test is to be blamed for.
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _runner:
    _runner.run(asyncio.sleep(0))

each = on(asyncio.new_event_loop, uvloop.new_event_loop)
the_fast_one = on(uvloop.new_event_loop)
