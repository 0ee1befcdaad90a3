"""Models of files of a workspace."""

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from carrel.models.base import MAX_PATH, Answer, OwnId, Request, WorkspacePath
from carrel.models.bundles import MOST_FILES

MOST_LISTED = 10_000
"""The most entries of a directory in one response."""


class FileKind(StrEnum):
    """The kinds of directory entries."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class FileInfo(Answer):
    """A file or directory. Names that are not UTF-8 contain surrogate escapes (`\\udcXX`)."""

    path: str
    kind: FileKind
    size: int
    mode: str = Field(description="octal permissions")
    modified_at: datetime
    target: str | None = Field(default=None, description="the target of a symlink")


class Nothing(Answer):
    """A response without a body."""


class FileList(Answer):
    """Entries of a directory; `truncated` if there were more than the limit."""

    items: list[FileInfo]
    truncated: bool = False


class EditRequest(Request):
    """Replace `old` with `new`. Without `replace_all`, `old` must occur exactly once."""

    path: WorkspacePath
    old: str = Field(min_length=1)
    new: str
    replace_all: bool = False
    id: OwnId | None = Field(
        default=None, description="an id that the caller chooses; a second edit with it gets the first response again"
    )


class EditResult(Answer):
    """The number of replacements, and the file after them."""

    replaced: int
    file: FileInfo


class MoveRequest(Request):
    """Move or rename inside the workspace."""

    source: WorkspacePath
    destination: WorkspacePath
    overwrite: bool = False


class MkdirRequest(Request):
    """Make a directory and its parents."""

    path: WorkspacePath


class StatRequest(BaseModel):
    """The query of the route that describes a path. Unlike in a body, values are converted from text."""

    model_config = ConfigDict(defer_build=True)

    path: str = Field(min_length=1, max_length=MAX_PATH, description="relative to the workspace")


class ListRequest(BaseModel):
    """The query of the route that lists a directory."""

    model_config = ConfigDict(defer_build=True)

    path: str = Field(default=".", min_length=1, max_length=MAX_PATH, description="relative to the workspace")
    recursive: bool = False
    limit: int = Field(default=1000, ge=1, le=MOST_LISTED)


class DeleteRequest(BaseModel):
    """The query of the route that deletes a file or, with `recursive`, a tree."""

    model_config = ConfigDict(defer_build=True)

    recursive: bool = False
    path: str = Field(min_length=1, max_length=MAX_PATH, description="relative to the workspace")


class FilesRequest(Request):
    """The files to read, in this order."""

    paths: list[str] = Field(min_length=1, max_length=MOST_FILES, description="relative to the workspace")


class FilesWritten(Answer):
    """How much of a bundle was written."""

    files: int
    bytes: int
