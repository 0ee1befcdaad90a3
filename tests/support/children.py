"""Work that must happen in a process of its own, because it cannot be undone; and processes that end with their parent."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Be told to end when the parent of this process ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def in_child(work: Callable[[], object]) -> object:
    """What `work` returns in a forked child, or the words of what it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = {"value": work()}
        except BaseException as error:  # the child must never return into the test runner
            answer = {"value": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        data = source.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
    return json.loads(data)["value"]
