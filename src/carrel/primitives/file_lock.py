"""Locks on files that show whether a process lives: the kernel releases them when it ends, also when it is killed.

Imports little, because `carrel here` must start quickly.
"""

from __future__ import annotations

import fcntl
import os


def is_locked(path: str) -> bool:
    """Return whether a process holds the file exclusively. A file that cannot be opened is held by none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
