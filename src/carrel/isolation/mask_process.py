"""Applies masks in sandboxes that run already, before any code of an agent runs there.

The main program of a process of root. It reads requests from standard input, one JSON object a line, and forks a
process for each, which enters the mounts of the sandbox: patterns and links mean the sandbox's own root. That process
writes the answer to standard output: the number of the request, and the reason of a failure or nothing.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys

from carrel.isolation import late_masks, mask_mounts
from carrel.isolation.late_mounts import Sandbox

_LONGEST_REASON = 500
"""In characters: the kernel writes a short line at once, so that lines are never mixed."""


def main() -> None:
    """Serve requests until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children by itself
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            _answer(line)


def _answer(line: bytes) -> None:
    """Carry out a request, and say how it ended. Never returns."""
    number, reason = -1, ""
    try:
        request = json.loads(line)
        number = request["number"]
        apply(
            Sandbox(request["pid"], request["started"]),
            base64.b64decode(request["masks"]),
            request["place"],
            request["path"],
        )
    except Exception as error:
        reason = str(error)[:_LONGEST_REASON] or type(error).__name__
    finally:
        os.write(1, json.dumps([number, reason]).encode() + b"\n")
        os._exit(0)


def apply(sandbox: Sandbox, masks: bytes, place: str, path: list[str]) -> None:
    """Apply packed masks in a sandbox. This process stays there.

    `place` is a directory in the sandbox that covers are kept in meanwhile, `path` are further directories of programs.
    """
    # From here on, paths are those of the sandbox: nothing may be imported, because its image is hostile.
    sys.path.clear()
    sys.meta_path.clear()
    sandbox.enter()
    late_masks.cover_here(place, lambda files: mask_mounts.read(files.plan(masks, image=True)), path)


if __name__ == "__main__":
    main()
