"""The package tools of the host that every isolated sandbox can use, and their paths there. Blocking."""

from __future__ import annotations

import importlib.util
import os
import shutil

from carrel.isolation.inside import PIP, UV


def shared_tools() -> dict[str, str]:
    """Return the paths of uv and pip, by their path in a sandbox. A tool that is not installed is left out."""
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
    """Return the path of the uv that is installed with carrel, or of the one on the PATH."""
    try:
        from uv import find_uv_bin

        return os.path.realpath(find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")
