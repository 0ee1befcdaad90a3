"""Models of the capabilities and the disk usage of a host."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from carrel.models.base import Answer
from carrel.models.sandboxes import Trust


class Check(Answer):
    """One line of `carrel doctor`: a feature of the host, whether it is available, why it matters, how to get it."""

    name: str
    status: Literal["ok", "degraded", "missing"]
    found: str
    why: str
    remedy: str | None = None


class ProviderStatus(Answer):
    """A provider on this host: whether it is available, and why not."""

    name: str
    isolation_level: int
    unsafe: bool
    available: bool
    reason: str | None = Field(default=None, description="what is missing and how to get it, or another remark")
    capabilities: list[str]
    package: str | None = Field(default=None, description="the package of a third-party provider; null: carrel's own")


class LevelStatus(Answer):
    """One isolation level on this host: which providers give it, or what is missing."""

    level: int
    meaning: str
    enough_for: list[Trust] = Field(description="the levels of trust that it satisfies")
    available: bool
    providers: list[str] = Field(description="those that are available")
    missing: list[str] = Field(description="each other provider of this level: what it lacks and how to get it")


class DiskPart(Answer):
    """One part of the disk usage of a server."""

    name: Literal["workspaces", "snapshots", "archive", "environments", "packages", "records", "other"]
    bytes: int
    complete: bool = Field(default=True, description="false if there were too many files to count all of them")


class DiskUsage(Answer):
    """The disk usage of a server. An archive in a bucket is not on the disk, so it is not counted."""

    parts: list[DiskPart]
    capacity_bytes: int = Field(description="size of the file system of the data directory")
    free_bytes: int
    measured_at: datetime


class HostReport(Answer):
    """The output of `carrel doctor`."""

    kernel: str
    user: str
    checks: list[Check]
    levels: list[LevelStatus] = Field(default_factory=list, description="strongest first")
    providers: list[ProviderStatus]


class ClusterReport(Answer):
    """The output of `carrel doctor --kubernetes`."""

    server: str = Field(description="the address of the API server; empty if no cluster is known")
    namespace: str = Field(description="the namespace of the sandboxes")
    checks: list[Check]


class NodeInfo(Answer):
    """A server among those on one database."""

    name: str
    url: str | None = Field(description="where other servers reach it")
    version: str
    state: Literal["running", "unreachable", "gone", "revoked"] = Field(
        description="`unreachable`: it runs, but requests cannot be forwarded to it; `notice` says why. `gone`: it "
        "gave no sign of life for its lease. `revoked`: its SPIFFE ID is refused"
    )
    here: bool = Field(description="whether it is the server that answers")
    sandboxes: int = Field(description="sandboxes that run")
    capacity: int = Field(description="sandboxes that may run at once")
    providers: list[str]
    spiffe_id: str | None = Field(default=None, description="the ID that its certificate must have")
    svid_expires_at: datetime | None = Field(
        default=None, description="until when its certificate is valid, of the server that answers"
    )
    started_at: datetime
    seen_at: datetime = Field(description="its last sign of life, by the clock of the database")
    notice: str | None = None


class NodeList(Answer):
    """The servers on one database, by name. Silent ones are listed for a day."""

    items: list[NodeInfo]
