"""Who asks for what is being done right now, and how they want to be answered when a person has to decide.

Set where a request comes in, read by admission; it follows the request through every task it starts.
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
    """One request. `approval` is the handle of one that was given; `wait_s` is how long to wait for one, unless the
    caller is `gone` meanwhile.
    """

    identity: Identity = ROOT
    approval: str | None = None
    wait_s: float = 0.0
    request_id: str | None = None
    gone: Callable[[], bool] = _there

    def own(self, key: str | None) -> str | None:
        """A key that the caller chose, as one that nobody else's can be: another's is another, whatever it says."""
        if key is None:
            return None
        said = [self.identity.subject, self.identity.namespace, key]
        return hashlib.sha256(json.dumps(said).encode("utf-8", "surrogatepass")).hexdigest()


caller: ContextVar[Caller] = ContextVar("carrel_caller", default=Caller())  # noqa: B039 - it is frozen
"""Without a request it is the server itself."""
