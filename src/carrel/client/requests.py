"""Request bodies that need more than naming their fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from carrel.models import Limits


def limits_body(limits: Limits | Mapping[str, float | None]) -> dict[str, object]:
    """Limits as the API takes them; those not given are left to the server."""
    given: Mapping[str, object] = limits.model_dump() if isinstance(limits, Limits) else limits
    return {name: value for name, value in given.items() if value is not None}
