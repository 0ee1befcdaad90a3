"""Redaction: removes secrets from everything that leaves the control plane."""

from carrel.redaction.redact import Redactor, StreamRedactor

__all__ = ["Redactor", "StreamRedactor"]
