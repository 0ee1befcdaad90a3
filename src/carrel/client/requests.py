"""Request bodies and headers that need more than naming their fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from carrel.errors import InvalidRequest
from carrel.models import ApprovalInfo, Limits

LONGEST_WAIT_S = 600.0


class Unchanged(Enum):
    """What stands for a value that is left as it is, where None would remove it."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


def approved(approval: ApprovalInfo | str) -> dict[str, str]:
    """The header of a request that was approved."""
    name = approval if isinstance(approval, str) else approval.id
    if not name.isascii() or not name.isprintable() or not name:
        raise InvalidRequest("this cannot be an approval", field="approval", hint="take the id of `ApprovalNeeded`")
    return {"carrel-approval": name}


def waiting(seconds: float) -> dict[str, str]:
    """The header of a request that waits for a person."""
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise InvalidRequest(f"how long to wait is 0 to {LONGEST_WAIT_S:.0f} seconds", field="seconds")
    return {"carrel-wait": f"{seconds:g}"}


def limits_body(limits: Limits | Mapping[str, float | None]) -> dict[str, object]:
    """Limits as the API takes them; those not given are left to the server."""
    given: Mapping[str, object] = limits.model_dump() if isinstance(limits, Limits) else limits
    return {name: value for name, value in given.items() if value is not None}
