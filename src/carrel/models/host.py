"""What a host can do. They hold and check values; they do nothing."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

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


class DiskPart(Answer):
    """One thing that fills the disk of a server."""

    name: Literal["workspaces", "snapshots", "archive", "environments", "packages", "records", "other"]
    bytes: int
    complete: bool = Field(default=True, description="false when there was too much to count all of it")


class DiskUsage(Answer):
    """What fills the disk of a server. An archive in a bucket is not on the disk and not counted."""

    parts: list[DiskPart]
    capacity_bytes: int = Field(description="of the file system that the data directory lies on")
    free_bytes: int
    measured_at: datetime


class HostReport(Answer):
    """What `carrel doctor` shows."""

    kernel: str
    user: str
    checks: list[Check]
    providers: list[ProviderStatus]
