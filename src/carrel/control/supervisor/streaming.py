"""The output of a command or a cell, without secrets, from an offset on. Callers have been admitted."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from carrel.control.governance.redaction import Current, clean_info, clean_output
from carrel.control.operations.call import Traffic
from carrel.control.operations.checks import check, json_object
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.connection import SupervisorDownload
from carrel.control.supervisor.frames import StreamChunk
from carrel.control.supervisor.memory import for_memory
from carrel.models import CommandInfo


async def stream_output(
    box: LiveSandbox,
    traffic: Traffic,
    current: Current,
    open_at: Callable[[int], Awaitable[SupervisorDownload]],
    offset: int,
) -> AsyncGenerator[StreamChunk, None]:
    """Yield an empty `open`, then the output from `offset` on, then an `end` with the checked info as JSON. `open_at`
    opens the stream of the supervisor at an offset.
    """
    skip = min(offset, (await current()).lookbehind)
    stream = await open_at(offset - skip)
    try:
        yield StreamChunk("open", b"")
        async with aclosing(clean_output(aiter(stream), current, skip)) as chunks:
            async for chunk in chunks:
                box.last_activity = time.time()
                if chunk.stream == "end":
                    info = check(CommandInfo, json_object(chunk.data))
                    info.oom_killed = await for_memory(box, info)
                    shown = clean_info(await current(), info).model_dump(mode="json")
                    yield StreamChunk("end", json.dumps(shown).encode())
                else:
                    traffic.count_out(len(chunk.data) if chunk.raw is None else chunk.raw)
                    yield chunk
    finally:
        stream.close()
