"""Files of a workspace. They hold and check values; they do nothing."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, Field

from carrel.models.base import Answer, NoNul, OwnId, Request
from carrel.models.bundles import MOST_FILES


class FileKind(StrEnum):
    """What a directory entry is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class FileInfo(Answer):
    """A file or directory. Names that are not UTF-8 carry surrogate escapes as `\\udcXX`."""

    path: str
    kind: FileKind
    size: int
    mode: str = Field(description="octal permissions")
    modified_at: datetime
    target: str | None = Field(default=None, description="where a symlink points")


class Nothing(Answer):
    """An answer without a body."""


class FileList(Answer):
    """Entries of a directory; `truncated` when there were more than the limit."""

    items: list[FileInfo]
    truncated: bool = False


class EditRequest(Request):
    """Replace `old` with `new`; fails unless `old` occurs exactly once (or `replace_all`)."""

    path: NoNul = Field(min_length=1, max_length=4096)
    old: str = Field(min_length=1)
    new: str
    replace_all: bool = False
    id: OwnId | None = Field(
        default=None, description="an id of the caller's own; the same again is answered as before"
    )


class EditResult(Answer):
    """How many places were replaced, and the file after."""

    replaced: int
    file: FileInfo


class MoveRequest(Request):
    """Move or rename inside the workspace."""

    source: NoNul = Field(min_length=1, max_length=4096)
    destination: NoNul = Field(min_length=1, max_length=4096)
    overwrite: bool = False


class MkdirRequest(Request):
    """Make a directory and its parents."""

    path: NoNul = Field(min_length=1, max_length=4096)


class StatRequest(BaseModel):
    """What is at a path: the query of the route. Text is converted, unlike in a body."""

    path: str = Field(min_length=1, max_length=4096, description="relative to the workspace")


class ListRequest(BaseModel):
    """The entries of a directory: the query of the route."""

    path: str = Field(default=".", min_length=1, max_length=4096, description="relative to the workspace")
    recursive: bool = False
    limit: int = Field(default=1000, ge=1, le=10_000)


class DeleteRequest(BaseModel):
    """Delete a file, or with `recursive` a tree: the query of the route."""

    recursive: bool = False
    path: str = Field(min_length=1, max_length=4096, description="relative to the workspace")


class FilesRequest(Request):
    """Files that are wanted at once, in this order."""

    paths: list[str] = Field(min_length=1, max_length=MOST_FILES, description="relative to the workspace")


class FilesWritten(Answer):
    """What came in a bundle and was written."""

    files: int
    bytes: int
