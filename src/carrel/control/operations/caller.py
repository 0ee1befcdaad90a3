"""Who asks for an operation: a caller, with the way it wants to be answered when a person has to decide, or carrel.

The API makes a `Caller` for each request. It is passed as an argument from there to admission.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from carrel.identity import Identity
from carrel.models.operations import Scope
from carrel.tracing import TraceContext


def _there() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Caller:
    """One request. `approval` is the id of an approval; `wait_s` says how long to wait for a decision, unless the
    caller has `gone` meanwhile.
    """

    identity: Identity
    approval: str | None = None
    wait_s: float = 0.0
    request_id: str | None = None
    trace: TraceContext | None = None
    """The trace that the request belongs to, as the caller named it."""
    gone: Callable[[], bool] = _there

    @property
    def administers(self) -> bool:
        return self.identity.has(Scope.ADMINISTER)

    def own(self, key: str | None) -> str | None:
        """Return a key that the caller chose as one that no other caller can have, even with the same text."""
        if key is None:
            return None
        said = [self.identity.subject, self.identity.namespace, key]
        return hashlib.sha256(json.dumps(said).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class OwnWork:
    """carrel itself: upkeep, builds, installs. Its operations are neither decided nor recorded."""

    @property
    def administers(self) -> bool:
        """False: upkeep must not drop rules that only an administrator may drop."""
        return False


OWN_WORK = OwnWork()
