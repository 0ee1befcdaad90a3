"""The event log: what happened to contexts, in one order for every reader. Knows no operations and no protocol."""

from carrel.events.log import EventLog, Page

__all__ = ["EventLog", "Page"]
