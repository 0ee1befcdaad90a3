from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory below which sandboxes may work on folders, open to every user."""
    path = Path(os.path.realpath(tempfile.mkdtemp(prefix="carrel-roots-")))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
