"""The one entry that a killed supervisor may leave in a workspace, and its removal.

The supervisor gives unfinished files no other name than `RESERVED`, at the top of what can be written, so one system
call removes them when a sandbox starts. The name belongs to carrel: an entry of that name that an agent made is removed
as well. Random names would need a search of the whole workspace, and could not be told from files that an agent named
alike.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice

RESERVED = b".carrel-draft"
"""A file while it replaces another; on a file system without nameless files, a directory with all drafts."""
MOST_LEFT = 1000
"""How many drafts are looked for in such a directory: an agent may have put any number of files there."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_leftover(top: int) -> None:
    """Remove what a killed supervisor left in an open directory; links are not followed."""
    try:
        os.unlink(RESERVED, dir_fd=top)
    except IsADirectoryError:
        with suppress(OSError):
            folder = os.open(RESERVED, _FOLDER, dir_fd=top)
            try:
                with os.scandir(folder) as found:
                    names = [entry.name for entry in islice(found, MOST_LEFT)]
                for name in names:
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)
            os.rmdir(RESERVED, dir_fd=top)
    except OSError:
        pass  # there is none, or the directory is read-only
