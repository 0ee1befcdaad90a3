"""What the agent's log leaves out. Knows only how the SDK words its records."""

from __future__ import annotations

import logging

_CALLERS_MISTAKES = (
    "Failed to parse request params",
    "Failed to validate base JSON-RPC request",
    "Validation failure",
    "Version mismatch",
)
_ANSWERED = "Request Error"  # a warning when the request was wrong, an error when the agent was


class CallersMistakes(logging.Filter):
    """Drops the SDK's records, often with a traceback, of requests that are not valid: their callers are told."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        words = str(record.msg)
        if not record.name.startswith("a2a."):
            return True
        if words.startswith(_ANSWERED):
            return record.levelno >= logging.ERROR
        return not words.startswith(_CALLERS_MISTAKES)
