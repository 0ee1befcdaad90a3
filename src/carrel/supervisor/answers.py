"""How the supervisor tells of a command: its result, and its output in frames. Starts and changes nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Protocol

from carrel.supervisor.command import Command
from carrel.supervisor.http import Json
from carrel.supervisor.output import END, Output

FRAME = 256 * 1024


class Written(Protocol):
    """What writes output."""

    @property
    def output(self) -> Output:
        """What it has written."""

    def info(self) -> Json:
        """The info object of the protocol."""


def result_of(command: Command) -> Json:
    """The result of a command that has ended."""
    code, name = command.exit()
    result: Json = {
        "id": command.id,
        "exit_code": code,
        "signal": name,
        "timed_out": command.timed_out,
        "duration_ms": command.duration_ms(),
        "truncated": command.output.dropped > 0,
        "dropped_bytes": command.output.dropped,
    }
    for key, data in zip(("stdout", "stderr"), command.output.whole(), strict=True):
        try:
            result[key] = data.decode()
        except UnicodeDecodeError:
            result[key] = data.decode(errors="replace")
            result[f"{key}_base64"] = base64.b64encode(data).decode()
    return result


async def frames_of(command: Written, offset: int, *, follow: bool) -> AsyncIterator[bytes]:
    """Output from an offset on as frames; the last has the info."""
    output = command.output
    while True:
        stream, data = output.read(offset, FRAME)
        if stream != END:
            offset += len(data)
            yield stream.to_bytes(1, "big") + len(data).to_bytes(4, "big") + data
        elif not follow or output.ended:
            break
        else:
            await output.changed()
    info = json.dumps(command.info()).encode()
    yield END.to_bytes(1, "big") + len(info).to_bytes(4, "big") + info
