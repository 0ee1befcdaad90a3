from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.types import Receive, Scope, Send

from carrel.api.serving import HttpServer
from carrel.connections import Connections


class App:
    """Answers once it may."""

    def __init__(self) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.set()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[tuple[HttpServer, asyncio.Task[None], str]]:
    server = HttpServer(app, Connections(64))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(30):
                while not server.started:
                    await asyncio.sleep(0.001)
            yield server, task, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.end()
            app.go.set()
            await task


async def test_what_was_asked_is_answered_before_the_end() -> None:
    app = App()
    async with serving(app) as (server, task, url), httpx.AsyncClient() as client:
        asking = asyncio.ensure_future(client.get(url))
        await app.asked.wait()
        server.end()
        assert not task.done()
        app.go.set()
        answer = await asking
        assert (answer.status_code, answer.text) == (200, "done")
        assert "server" not in answer.headers and "date" not in answer.headers
        async with asyncio.timeout(30):
            await task


async def test_signals_are_left_to_others() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving(App()):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_the_end_may_come_before_the_start() -> None:
    server = HttpServer(App(), Connections(64))
    server.end()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.timeout(30):
            await server.serve(sockets=[listener])
