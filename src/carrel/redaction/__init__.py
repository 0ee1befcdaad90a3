"""What happens, told to whoever listens, with every secret taken out first. Decides nothing."""

from carrel.redaction.redact import Redactor, StreamRedactor

__all__ = ["Redactor", "StreamRedactor"]
