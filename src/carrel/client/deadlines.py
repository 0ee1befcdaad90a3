"""Deadlines as callers give them: a number of seconds, None for none, or `default` for that of the sandbox.

Pure: values in, values out.
"""

from __future__ import annotations

import math
from typing import Literal

from carrel.errors import InvalidRequest

Timeout = float | Literal["default"] | None
"""Seconds until a command is killed. None, 0 and infinity: no deadline. `default`: the deadline that the sandbox has
for commands (`limits.timeout_s`, 300 seconds unless set otherwise).
"""


def seconds(timeout: object) -> float | None:
    """A number of seconds, None where there is no limit. `InvalidRequest` for what is no such number."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise InvalidRequest(
            f"timeout must be a number of seconds from 0 on, not {timeout!r}"[:200],
            field="timeout",
            hint="0 or None means no deadline",
        )
    return None if timeout in (0, math.inf) else timeout


def limited(timeout: object, most: float) -> float | None:
    """A number of seconds for something that must have a deadline; None leaves it to the server."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= most:
        raise InvalidRequest(
            f"timeout must be above 0 and at most {most:.0f} seconds here, not {timeout!r}"[:200],
            field="timeout",
            hint="start a command for what takes longer",
        )
    return timeout


def attended(timeout: Timeout) -> float | None:
    """The field of a request whose caller waits for the end; None leaves it out, which is the sandbox's default."""
    return None if timeout == "default" else seconds(timeout) or 0


def background(timeout: Timeout) -> float | str | None:
    """The field of a request that starts a command in the background; None leaves it out: no deadline."""
    return timeout if timeout == "default" else seconds(timeout)


def waited(timeout: Timeout) -> float | None:
    """How long the answer may take that comes after the command; None: as long as it takes."""
    return None if timeout == "default" else seconds(timeout)
