"""Starts processes that run a module of carrel as root, beside the server: they build roots, and apply masks."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import carrel

_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main()"


async def start(module: str, *, stdout: int, stderr: int) -> Process:
    """Start a process that runs the `main` of a module and reads its work from standard input. It has nothing of this
    process's environment, and none of its descriptors.
    """
    source = str(Path(carrel.__file__).parent.parent)
    words = (sys.executable, "-I", "-S", "-c", _CODE.format(module), source)
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    return await asyncio.create_subprocess_exec(
        *words, stdin=PIPE, stdout=stdout, stderr=stderr, env=environment, start_new_session=True, cwd="/"
    )
