"""The output of a command or a cell as it may be shown, from an offset on. Callers have been admitted."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from carrel.control.governance.redaction import Current, clean_info, clean_output
from carrel.control.operations.call import Traffic
from carrel.control.operations.checks import check, json_object, query_of
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.frames import Chunk
from carrel.control.supervisor.memory import for_memory
from carrel.models import CommandInfo

IDLE_S = 30.0


async def written(
    box: LiveSandbox, traffic: Traffic, current: Current, path: str, offset: int, *, follow: bool
) -> AsyncGenerator[Chunk, None]:
    """First an empty `open`, last an `end` with the checked info as JSON."""
    skip = min(offset, (await current()).lookbehind)
    query = query_of(offset=offset - skip, follow=follow)
    stream = await box.connection.download(f"{path}{query}", idle=None if follow else IDLE_S)
    try:
        yield Chunk("open", b"")
        async with aclosing(clean_output(aiter(stream), current, skip)) as chunks:
            async for chunk in chunks:
                box.last_activity = time.time()
                if chunk.stream == "end":
                    info = check(CommandInfo, json_object(chunk.data))
                    info.oom_killed = await for_memory(box, info)
                    told = clean_info(await current(), info).model_dump(mode="json")
                    yield Chunk("end", json.dumps(told).encode())
                else:
                    traffic.gave(len(chunk.data) if chunk.raw is None else chunk.raw)
                    yield chunk
    finally:
        stream.close()
