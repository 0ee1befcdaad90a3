"""The files of a snapshot as a client downloads it, and which files count."""

from __future__ import annotations

import io
import re
import tarfile

from carrel.workspaces.layout import CONTEXT_FILE

_PASSING = re.compile(r"(.*/)?\.carrel-(?:[0-9a-f]{32}|sync-[0-9a-f]{16})")
"""A file on its way to its place: a snapshot that is taken meanwhile, or after a kill, has it too."""


def files_in(data: io.BytesIO) -> dict[str, bytes]:
    """The files in a tar archive."""
    data.seek(0)
    with tarfile.open(fileobj=data) as tar:
        files = {each.name.removeprefix("./"): tar.extractfile(each) for each in tar if each.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None and counts(name)}


def counts(name: str) -> bool:
    """Whether a file is one that clients know of."""
    return name != CONTEXT_FILE and not _PASSING.fullmatch(name)
