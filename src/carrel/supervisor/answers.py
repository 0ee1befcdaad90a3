"""The result of a command as JSON, and its output as a stream of frames."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator

from carrel.supervisor.command import SupervisedCommand, exit_of
from carrel.supervisor.http import Json
from carrel.supervisor.output import END, STOPPED
from carrel.supervisor.python.cell import Cell

FRAME = 256 * 1024


def result_of(command: SupervisedCommand) -> Json:
    code, name = exit_of(command.status)
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


async def frames_of(source: SupervisedCommand | Cell, offset: int, *, follow: bool) -> AsyncIterator[bytes]:
    """Yield the output from an offset on as frames. The last frame has the info object."""
    output = source.output
    stops = output.stops
    while True:
        stream, data = output.read(offset, FRAME)
        if stream != END:
            offset += len(data)
            yield frame(stream, data)
            output.passed(offset)
        elif stops != output.stops:
            stops = output.stops
            yield frame(STOPPED, b"")
        elif not follow or output.ended:
            break
        else:
            await output.changed()
    yield frame(END, json.dumps(source.info()).encode())


def frame(kind: int, data: bytes) -> bytes:
    """Return a frame as it is sent: the kind, the length and the data."""
    return kind.to_bytes(1, "big") + len(data).to_bytes(4, "big") + data
