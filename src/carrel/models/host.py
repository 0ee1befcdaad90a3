"""What a host can do. They hold and check values; they do nothing."""

from __future__ import annotations

from typing import Literal

from carrel.models.base import Answer


class Check(Answer):
    """One line of `carrel doctor`: a primitive, whether it is there, why it matters, how to get it."""

    name: str
    status: Literal["ok", "degraded", "missing"]
    found: str
    why: str
    remedy: str | None = None


class ProviderStatus(Answer):
    """A provider on this host: whether it can be used, and what is missing when not."""

    name: str
    isolation_level: int
    unsafe: bool
    available: bool
    reason: str | None = None
    capabilities: list[str]


class HostReport(Answer):
    """What `carrel doctor` shows."""

    kernel: str
    user: str
    checks: list[Check]
    providers: list[ProviderStatus]
