"""Models of checkpoints: pictures of a folder of the host that is a workspace, their differences, and undo."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from carrel.models.base import MAX_PATH, Answer, NoNul, Request

EntryKind = Literal["file", "directory", "link"]
CheckpointKind = Literal["start", "end", "request", "undo"]


class CheckpointRequest(Request):
    """The body of a request for a checkpoint."""

    reason: Annotated[NoNul, StringConstraints(max_length=200)] = Field(default="", description="a text for people")


class CheckpointInfo(Answer):
    """A picture of a folder. A run is a checkpoint of kind `start` and, once it has ended, one of kind `end`."""

    id: str
    context_id: str
    workspace_path: str
    kind: CheckpointKind = Field(
        description="`start`: before a sandbox started on the folder; `end`: after a run or an undo; `undo`: before an "
        "undo; `request`: a caller asked for it"
    )
    reason: str = ""
    created_at: datetime
    begin: str | None = Field(default=None, description="for `end`: the checkpoint at the beginning of the run")
    files: int
    bytes: int = Field(description="size of the recorded files")
    new_bytes: int = Field(description="storage that this checkpoint added")
    ignored: list[str] = Field(description="folders that are left out by rule, such as node_modules; at most 100")
    ignored_count: int
    left_out: list[str] = Field(description="sockets, pipes, devices and unreadable entries; at most 100")
    left_out_count: int


class CheckpointList(Answer):
    """The checkpoints of a context, newest first."""

    items: list[CheckpointInfo]


class FolderChange(Answer):
    """One entry of a folder that differs. The fields of a state are null where the entry does not exist."""

    path: str
    kind: Literal["added", "removed", "changed"]
    type_before: EntryKind | None = None
    type_after: EntryKind | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    mode_before: str | None = Field(default=None, description="octal permissions")
    mode_after: str | None = None


class FolderChanges(Answer):
    """The differences between two checkpoints, or between a checkpoint and the folder now, sorted by path."""

    before: str
    after: str | None = Field(description="null: the folder now")
    items: list[FolderChange]
    added: int
    removed: int
    changed: int
    truncated: bool = Field(default=False, description="whether `items` does not contain all of them")


class FolderPatch(Answer):
    """The differences as a unified diff of text files."""

    text: str
    omitted: list[str] = Field(description="changed files without lines: binary, large, links; at most 1000")
    truncated: bool = Field(default=False, description="whether more files differ than are shown")


RelativePath = Annotated[NoNul, StringConstraints(min_length=1, max_length=MAX_PATH)]


class UndoRequest(Request):
    """What to undo: the changes of the run that a checkpoint begins."""

    paths: list[RelativePath] | None = Field(
        default=None, min_length=1, max_length=1000, description="only these files and directories; null: everything"
    )
    dry_run: bool = Field(default=False, description="only report what would be done")


class UndoneChange(Answer):
    """An entry that was undone."""

    path: str
    action: Literal["write", "remove", "make_directory", "remove_directory", "set_attributes"]


class LeftChange(Answer):
    """An entry that was left as it is."""

    path: str
    reason: str


class UndoResult(Answer):
    """The result of an undo, or its plan. The lists have at most 10,000 entries."""

    undone: list[UndoneChange]
    undone_count: int
    left: list[LeftChange]
    left_count: int
    dry_run: bool
    checkpoint_id: str | None = Field(
        default=None, description="the checkpoint taken before; an undo of it brings the undone changes back"
    )
