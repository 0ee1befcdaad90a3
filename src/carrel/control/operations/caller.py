"""The caller of the current request, and how it wants to be answered when a person has to decide.

The API sets it, admission reads it; it follows the request through every task that the request starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from carrel.identity import ROOT, Identity


def _there() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Caller:
    """One request. `approval` is the id of an approval; `wait_s` says how long to wait for a decision, unless the
    caller has `gone` meanwhile.
    """

    identity: Identity = ROOT
    approval: str | None = None
    wait_s: float = 0.0
    request_id: str | None = None
    gone: Callable[[], bool] = _there

    def own(self, key: str | None) -> str | None:
        """Return a key that the caller chose as one that no other caller can have, even with the same text."""
        if key is None:
            return None
        said = [self.identity.subject, self.identity.namespace, key]
        return hashlib.sha256(json.dumps(said).encode("utf-8", "surrogatepass")).hexdigest()


caller: ContextVar[Caller] = ContextVar("carrel_caller", default=Caller())  # noqa: B039 - it is frozen
"""Without a request it is the server itself, as an administrator."""
