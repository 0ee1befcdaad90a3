"""Finds `runsc`, and checks that it can be used. The answer is kept: a server asks often."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

from carrel.providers.gvisor import oci

_DEADLINE_S = 20


def find(configured: str) -> str | None:
    """Return the path of the program: the configured one, or the one on PATH."""
    if configured:
        return configured if os.access(configured, os.X_OK) and os.path.isfile(configured) else None
    return shutil.which("runsc")


@cache
def problem(program: str) -> str | None:
    """Return why a program cannot be used, or None: it must run, and know every flag of ours. Blocking, the first time.

    Versions say too little: releases, packages and builds name them in different ways.
    """
    version = _say(program, "--version")
    if version is None:
        return f"{program} does not run; install gVisor again"
    if _say(program, *oci.FLAGS, "--version") is None:
        return f"{program} is too old ({version}): it does not know flags that carrel needs; install a newer gVisor"
    return None


def _say(*words: str) -> str | None:
    """Return the first line that a command prints; None if it fails."""
    try:
        run = subprocess.run(words, capture_output=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.decode(errors="replace").partition("\n")[0].strip()[:100]
