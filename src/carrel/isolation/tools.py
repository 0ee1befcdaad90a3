"""The package tools of the host that every isolated sandbox sees, and where it sees them. Blocking."""

from __future__ import annotations

import importlib.util
import os
import shutil

from carrel.isolation.rootfs import PIP, UV


def shared_tools() -> dict[str, str]:
    """uv and pip of the host: the path in a sandbox, and the path here. A tool that is not installed is left out."""
    found: dict[str, str] = {}
    if (uv := find_uv()) is not None:
        found[UV] = uv
    spec = importlib.util.find_spec("pip")
    pips = [*(list(spec.submodule_search_locations or ()) if spec else ()), "/usr/lib/python3/dist-packages/pip"]
    for place in pips:
        if os.path.isdir(os.path.join(place, "_internal")):
            return found | {PIP: place}
    return found


def find_uv() -> str | None:
    """The uv that is installed beside carrel, or the one on the PATH."""
    try:
        from uv import find_uv_bin

        return os.path.realpath(find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")
