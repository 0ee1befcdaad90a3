"""A policy that allows a little, denies a little and leaves the rest to a person; and clients of made tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx

Known = Callable[..., Awaitable[httpx.AsyncClient]]
"""Makes a token (name, kind, scopes, more) and gives a client that shows it."""

POLICY: dict[str, object] = {
    "permissions": {
        "allow": ["shell(echo:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)"],
        "deny": ["shell(curl:*)"],
    }
}
