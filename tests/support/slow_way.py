"""A way to a server that holds one request back, as a slow disk or a slow network would, and then lets it arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class SlowWay:
    """Holds back the first request whose line ends its path in `path`, until `release`. It arrives whoever left."""

    def __init__(self, server: str, path: str):
        parts = urlsplit(server)
        self._server = (parts.hostname or "", parts.port or 80)
        self._path = path.encode()
        self.url = ""
        self.held, self.release, self.answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        behind, ahead = await asyncio.open_connection(*self._server)
        answers = asyncio.create_task(self._back(behind, writer))
        self.tasks.add(answers)
        try:
            while data := await reader.read(65536):
                line = data.split(b"\r\n", 1)[0].split(b" ")
                if line[0] == b"POST" and line[1].endswith(self._path) and not self.held.is_set():
                    self.held.set()
                    await self.release.wait()
                ahead.write(data)
                await ahead.drain()
            await answers
        finally:
            answers.cancel()
            ahead.close()
            writer.close()

    async def _back(self, behind: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await behind.read(65536):
            if self.release.is_set():
                self.answered.set()
            if not writer.is_closing():
                writer.write(data)


@asynccontextmanager
async def slow_way(server: str, path: str) -> AsyncIterator[SlowWay]:
    """A slow way to a server."""
    way = SlowWay(server, path)
    listener = await asyncio.start_server(way.accept, "127.0.0.1", 0)
    way.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        listener.close()
        for task in way.tasks:
            task.cancel()
        await asyncio.gather(*way.tasks, return_exceptions=True)
