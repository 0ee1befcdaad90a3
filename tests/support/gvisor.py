"""gVisor for tests: the `runsc` that `scripts/build-runsc` has built, or the one of this host."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from carrel.providers.gvisor.options import GvisorOptions
from carrel.providers.gvisor.provider import GvisorProvider

_MODULES = Path(__file__).parents[2] / "scripts" / "runsc" / "go.mod"
VERSION = re.findall(r"^require gvisor.dev/gvisor (\S+)$", _MODULES.read_text(), re.MULTILINE)[0]


def find_runsc() -> str | None:
    """The path of a `runsc`: the built one, else one on PATH."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    built = os.path.join(cache, "carrel", "runsc", VERSION, "runsc")
    return built if os.access(built, os.X_OK) else shutil.which("runsc")


def usable(bundles: str, run_dir: str, **more: object) -> GvisorProvider:
    """A provider, if this host can have one; else the test is skipped with the reason."""
    runsc = find_runsc()
    if runsc is None:
        pytest.skip("runsc is not there: scripts/build-runsc builds it, which needs Go")
    provider = GvisorProvider(run_dir, options=GvisorOptions(runsc), bundles=bundles, **more)  # type: ignore[arg-type]
    if (missing := provider.missing()) is not None:
        pytest.skip(missing)
    return provider
