"""Models of snapshots, forks and filespaces."""

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import Field

from carrel.models.base import Answer, ContextId, Request


class SnapshotInfo(Answer):
    """An immutable copy of a workspace. Only a ready one can be restored."""

    id: str
    context_id: str
    status: Literal["creating", "ready", "failed"]
    created_at: datetime
    parent: str | None = None
    bytes: int | None = Field(default=None, description="size of the workspace")
    new_bytes: int | None = Field(default=None, description="storage that this snapshot added")
    files: int | None = None
    error: str | None = None
    reason: Literal["request", "checkpoint", "stop", "fork"] = Field(
        default="request", description="why it was taken; of those without a request, carrel keeps only the newest"
    )
    archived: bool = Field(default=False, description="whether it is in the archive, so that any server can restore it")


class SnapshotPage(Answer):
    """A page of snapshots, newest first; `next` is the cursor of the following page."""

    items: list[SnapshotInfo]
    next: str | None = None


class RestoreRequest(Request):
    """The snapshot to restore."""

    snapshot_id: str = Field(min_length=1, max_length=64)


class ForkRequest(Request):
    """The new context, and the snapshot that it starts from; by default a new snapshot is taken."""

    context_id: ContextId
    snapshot_id: str | None = Field(default=None, min_length=1, max_length=64)
    secrets: bool = Field(default=True, description="give the new context the secrets of the old one")


class FileChange(Answer):
    """One path that differs between two snapshots."""

    path: str
    kind: Literal["added", "removed", "changed"]


class FileChanges(Answer):
    """The differences between two snapshots; `truncated` if there were more than the limit."""

    items: list[FileChange]
    truncated: bool = False


class SyncDirection(StrEnum):
    """The direction of a sync between a workspace and its filespace."""

    PUSH = "push"
    PULL = "pull"
    BOTH = "both"


class SyncRequest(Request):
    """Push the workspace's changes to the filespace, pull the filespace's into the workspace, or both."""

    direction: SyncDirection = SyncDirection.BOTH


class SyncSummary(Answer):
    """The result of a sync. `conflicts` are paths that both sides had changed; the later write won."""

    direction: SyncDirection
    pushed: int = Field(description="files written to the filespace")
    pushed_bytes: int
    push_deleted: int = Field(description="files deleted in the filespace")
    pulled: int = Field(description="files written to the workspace")
    pulled_bytes: int
    pull_deleted: int = Field(description="files deleted in the workspace")
    conflicts: list[str] = Field(default_factory=list, description="at most 100 paths")
    skipped: int = Field(description="links, sockets and other entries that a filespace cannot store")
    duration_ms: float


class FilespaceFile(Answer):
    """One file of a filespace."""

    path: str
    size: int
    mode: str = Field(description="octal permissions")
    hash: str
    updated_at: datetime


class FilespacePage(Answer):
    """Files of a filespace, ordered by path; `next` is the cursor of the following page."""

    items: list[FilespaceFile]
    next: str | None = None
