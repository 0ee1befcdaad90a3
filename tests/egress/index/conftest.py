"""An index, and a front on an empty cache."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.indexes import IndexServer, fronting, serving

from carrel.egress.index.front import Front


@pytest.fixture
async def server() -> AsyncIterator[IndexServer]:
    async with serving(IndexServer()) as server:
        yield server


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with fronting(str(tmp_path / "cache")) as front:
        yield front
