"""A storage for images, and progress that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.images.layer_reading import LayerLimits
from carrel.images.storage import ImageStorage


@pytest.fixture
def storage(tmp_path: Path) -> ImageStorage:
    storage = ImageStorage(str(tmp_path / "images"), LayerLimits(64 << 20, 10_000, 100))
    storage.prepare()
    return storage
