"""Ends a forked process as an interpreter ends, but leaves its objects to the kernel.

To free everything that was imported before the fork takes up to a tenth of a second, longer than most commands run.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def end_of(main: Callable[[], object]) -> NoReturn:
    """Call `main` and end with its exit code. Threads, exit functions and buffers come to their end; an exception, and an
    output that cannot be written, are left to the interpreter.
    """
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            raise
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)
    os._exit(code & 0xFF)
