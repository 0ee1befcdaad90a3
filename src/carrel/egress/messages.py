"""The messages between the control plane and the proxy, which travel over a `carrel.primitives.channel`.

The control plane sends: `attach`, `change` and `detach` a sandbox, `answer` to a question, `ack` of log entries,
`describe`, `drain`. The proxy sends: `done` or `failed` for each of these that has a number, `ask`, `log`.
"""

from __future__ import annotations

import os

VERSION = 2
"""Of the messages: a control plane of another version drains the proxy it finds and starts its own."""


def memory_file(data: bytes) -> int:
    """Return the descriptor of a file in memory that holds these bytes."""
    descriptor = os.memfd_create("carrel-plan", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def content(descriptor: int) -> bytes:
    """Read such a file and close it."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
