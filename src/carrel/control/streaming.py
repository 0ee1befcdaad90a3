"""The output of a command or a cell as it may be shown, from an offset on. Whoever asks has passed the door."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from carrel.control.door import Traffic
from carrel.control.exchange import checked_end, query_of
from carrel.control.frames import Chunk
from carrel.control.live import LiveSandbox
from carrel.control.redacting import clean_info, clean_output
from carrel.events.redact import Redactor

IDLE_S = 30.0


async def written(
    box: LiveSandbox, traffic: Traffic, redactor: Redactor, path: str, offset: int, *, follow: bool
) -> AsyncGenerator[Chunk, None]:
    """First an empty `open`, last an `end` with the checked info as JSON."""
    skip = min(offset, redactor.lookbehind)
    query = query_of(offset=offset - skip, follow=follow)
    stream = await box.connection.download(f"{path}{query}", idle=None if follow else IDLE_S)
    try:
        yield Chunk("open", b"")
        async with aclosing(clean_output(aiter(stream), redactor, skip)) as chunks:
            async for chunk in chunks:
                box.last_activity = time.time()
                if chunk.stream == "end":
                    yield checked_end(chunk, partial(clean_info, redactor))
                else:
                    traffic.gave(len(chunk.data) if chunk.raw is None else chunk.raw)
                    yield chunk
    finally:
        stream.close()
