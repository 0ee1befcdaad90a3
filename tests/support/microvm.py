"""Virtual machines for tests: the kernel that `scripts/fetch-kernel` has fetched, emulated where KVM does not work."""

from __future__ import annotations

import glob
import os

import pytest

from carrel.providers.microvm.options import MicrovmOptions
from carrel.providers.microvm.provider import MicrovmProvider


def find_kernel() -> str:
    """The path of the kernel that was fetched; nothing where none was."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return next(iter(glob.glob(f"{cache}/carrel/kernel/unpacked/boot/vmlinuz-*")), "")


def options() -> MicrovmOptions:
    """The options of every machine of the tests."""
    return MicrovmOptions(kernel=find_kernel(), allow_emulation=True, memory_mb=384)


def usable(bundles: str, run_dir: str, **more: object) -> MicrovmProvider:
    """A provider, if this host can have one; else the test is skipped with the reason."""
    provider = MicrovmProvider(run_dir, options=options(), bundles=bundles, **more)  # type: ignore[arg-type]
    if (missing := provider.missing()) is not None:
        pytest.skip(missing)
    return provider
