"""Trees of directories deeper than any path, for tests; they are removed afterwards, which pytest itself cannot do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carrel.primitives import walk
from carrel.primitives.trees import empty_directory


@contextmanager
def nested(top: Path | str, levels: int, name: str = "d" * 100, *, beside: bool = False) -> Iterator[None]:
    """Nest directories beneath `top`; `beside` puts a second, empty one next to each."""
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        here = os.dup(root)
        try:
            for _ in range(levels):
                os.mkdir(name, dir_fd=here)
                if beside:
                    os.mkdir("beside", dir_fd=here)
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
        finally:
            os.close(here)
        yield
    finally:
        empty_directory(root)
        os.close(root)


def give(top: Path | str, user: int) -> None:
    """Give a tree to a user, however deep it is."""
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for visited in walk.visit(root):
            os.fchown(visited.fd, user, user)
            for name, _ in visited.entries:
                os.chown(name, user, user, dir_fd=visited.fd, follow_symlinks=False)
    finally:
        os.close(root)
