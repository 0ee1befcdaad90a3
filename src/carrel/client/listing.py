"""Directory listings, and the safe local path of a listed file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from carrel.errors import InvalidPath
from carrel.models import FileInfo


class Listing(list[FileInfo]):
    """The entries of a directory. `truncated` is true when there were more than the limit."""

    def __init__(self, items: Iterable[FileInfo], *, truncated: bool = False):
        super().__init__(items)
        self.truncated = truncated


def local_target(directory: Path, root: str, path: str) -> Path:
    """Return the local path for the entry `path` of a listing of `root`; it is always inside `directory`."""
    try:
        inside = PurePosixPath(path).relative_to(PurePosixPath(root))
    except ValueError:
        raise InvalidPath(f"the sandbox listed '{path}', which is not inside '{root}'", field="path") from None
    if not inside.parts or ".." in inside.parts or "\0" in path:
        raise InvalidPath(f"the sandbox listed '{path}', which cannot be copied", field="path")
    return directory.joinpath(*inside.parts)
