"""The provider keeps every promise, and refuses what it does not promise: the suite of carrel itself."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from carrel_bubblewrap import open_provider

from carrel.providers import ProviderContext
from carrel.testing import Check, Harness, Outcome, parameters, run_check, workspaces_in


@pytest.mark.parametrize(**parameters())
def test_promise(check: Check, place: Path, bundles: Path) -> None:
    context = ProviderContext(str(place / "run"), shared={}, images="", bundles=str(bundles), settings={})

    async def outcome() -> Outcome:
        harness = Harness(lambda: open_provider(context), workspaces_in(str(place)))
        try:
            if (missing := harness.provider.missing()) is not None:
                pytest.skip(missing)
            return await run_check(check, harness)
        finally:
            await harness.close()

    kept = asyncio.run(outcome())
    assert kept.kept, f"{check.promise}\n{kept.failure}"
    assert not list(place.glob("run/*")), "a sandbox is left behind"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path: the address of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="b") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The supervisor's bundle, which is made once."""
    return tmp_path_factory.mktemp("bundles")
