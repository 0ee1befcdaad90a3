"""Directory listings as a client sees them, and where a listed file may be put locally. Opens nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from carrel.errors import InvalidPath
from carrel.models import FileInfo


class Listing(list[FileInfo]):
    """Entries of a directory; `truncated` when there were more than the limit."""

    def __init__(self, items: Iterable[FileInfo], *, truncated: bool = False):
        super().__init__(items)
        self.truncated = truncated


def local_target(directory: Path, root: str, path: str) -> Path:
    """Where the entry `path` of a listing of `root` goes beneath `directory`; never outside of it."""
    try:
        inside = PurePosixPath(path).relative_to(PurePosixPath(root))
    except ValueError:
        raise InvalidPath(f"the sandbox listed '{path}', which is not inside '{root}'", field="path") from None
    if not inside.parts or ".." in inside.parts or "\0" in path:
        raise InvalidPath(f"the sandbox listed '{path}', which cannot be copied", field="path")
    return directory.joinpath(*inside.parts)
