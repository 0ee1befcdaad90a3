"""Checks the timeouts that callers give, and turns them into fields of requests."""

from __future__ import annotations

import math
from typing import Literal

from carrel.errors import InvalidRequest

Timeout = float | Literal["default"] | None
"""Seconds until a command is killed. None, 0 and infinity mean no timeout. `default` is the timeout of the sandbox
(`limits.timeout_s`, 300 seconds unless set otherwise).
"""


def checked_seconds(timeout: object) -> float | None:
    """Check a number of seconds; None means no timeout. Raises `InvalidRequest`."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise InvalidRequest(
            f"timeout must be a number of seconds, 0 or more, not {timeout!r}"[:200],
            field="timeout",
            hint="0 or None means no timeout",
        )
    return None if timeout in (0, math.inf) else timeout


def bounded_timeout(timeout: object, most: float) -> float | None:
    """Check the seconds of an operation that must have a timeout; None leaves it to the server."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= most:
        raise InvalidRequest(
            f"timeout must be above 0 and at most {most:.0f} seconds here, not {timeout!r}"[:200],
            field="timeout",
            hint="use commands.start for work that takes longer",
        )
    return timeout


def run_timeout(timeout: Timeout) -> float | None:
    """Return the `timeout` field when the caller waits for the end; None (left out) is the sandbox's default."""
    return None if timeout == "default" else checked_seconds(timeout) or 0


def start_timeout(timeout: Timeout) -> float | str | None:
    """Return the `timeout` field of a command in the background; None (left out) is no timeout."""
    return timeout if timeout == "default" else checked_seconds(timeout)


def answer_limit(timeout: Timeout) -> float | None:
    """Return how long to wait for an answer that comes after the command; None is no limit."""
    return None if timeout == "default" else checked_seconds(timeout)
