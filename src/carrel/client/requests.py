"""Request headers and values that need a check."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum

from carrel.errors import InvalidRequest
from carrel.models import ApprovalInfo, HostPath, Limits

LONGEST_WAIT_S = 600.0


class Unchanged(Enum):
    """Stands for "do not change this", where None means "remove this"."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


def trace_headers() -> dict[str, str]:
    """Return the headers that name the trace which this program is in, if it uses OpenTelemetry. Imports nothing."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not hasattr(api, "get_current_span"):  # another thread still imports it
        return {}
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
    state = context.trace_state.to_header()
    return {"traceparent": parent} | ({"tracestate": state} if state else {})


def approved(approval: ApprovalInfo | str) -> dict[str, str]:
    """Return the header that names an approval."""
    name = approval if isinstance(approval, str) else approval.id
    if not name.isascii() or not name.isprintable() or not name:
        raise InvalidRequest(
            "this is not the id of an approval", field="approval", hint="use `.approval` of `ApprovalNeeded`"
        )
    return {"carrel-approval": name}


def waiting(seconds: float) -> dict[str, str]:
    """Return the header that says how long to wait for an approval."""
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise InvalidRequest(f"the time to wait must be 0 to {LONGEST_WAIT_S:.0f} seconds", field="seconds")
    return {"carrel-wait": f"{seconds:g}"}


def limits_body(limits: Limits | Mapping[str, float | None]) -> dict[str, object]:
    """Return the limits that are given; the server sets the others."""
    given: Mapping[str, object] = limits.model_dump() if isinstance(limits, Limits) else limits
    return {name: value for name, value in given.items() if value is not None}


def host_path_body(given: HostPath | str) -> dict[str, object]:
    """Return a path of the server's host that a sandbox sees; a text is seen at the same path."""
    return given.model_dump(exclude_none=True) if isinstance(given, HostPath) else {"source": given}
