"""For audit logs whose records stand for no events."""

from __future__ import annotations


def no_event(*_: object) -> tuple[()]:
    return ()
