"""A real server with a real audit log behind the audit's routes, for the client and the command line."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Query
from starlette.responses import StreamingResponse
from tests.support.no_events import no_event

from carrel.audit import AuditLog, Filter, SigningKey, chain_of
from carrel.models import AuditKey, AuditPage, AuditPruned
from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.batches import BatchesHere

Moment = Annotated[datetime | None, Query()]


def routes(log: AuditLog) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/audit")
    async def search_audit(
        context_id: str | None = None,
        actor: str | None = None,
        kind: str | None = None,
        name: str | None = None,
        decision: str | None = None,
        result: str | None = None,
        since: Moment = None,
        until: Moment = None,
        text: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> AuditPage:
        wanted = Filter(
            None if context_id is None else chain_of(context_id),
            actor,
            kind,
            name,
            decision,
            result,
            None if since is None else since.timestamp(),
            None if until is None else until.timestamp(),
            text,
        )
        return await log.search(wanted, limit=limit, cursor=cursor)

    @app.get("/v1/audit/export")
    async def export_audit(context_id: str | None = None, compress: bool = False) -> StreamingResponse:
        chains = None if context_id is None else [chain_of(context_id)]
        return StreamingResponse(log.export(chains, compress=compress), media_type="application/x-ndjson")

    @app.post("/v1/audit/prune")
    async def prune_audit() -> AuditPruned:
        await log.seal()
        now = datetime.now(UTC)
        return AuditPruned(before=now, records=await log.prune(now.timestamp()))

    @app.get("/v1/audit/key")
    async def get_audit_key() -> AuditKey:
        return AuditKey(node=log.node, key=log.key.public)

    return app


class Auditing:
    """The server: its address, its log, and a way to work on the log where it lives."""

    def __init__(self, url: str, log: AuditLog, loop: asyncio.AbstractEventLoop):
        self.url = url
        self.log = log
        self._loop = loop

    def do(self, work: Callable[[AuditLog], Awaitable[None]]) -> None:
        async def run() -> None:
            await work(self.log)
            await self.log.flush()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)


@contextmanager
def auditing(directory: Path) -> Iterator[Auditing]:
    """Serve until the block ends."""
    started = threading.Event()
    made: list[Auditing] = []
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        database = await Database.open(str(directory / "audit.db"))
        log = AuditLog(AuditStore(database, BatchesHere(database)), SigningKey.load(str(directory)), "n", no_event)
        await log.open()
        server = uvicorn.Server(uvicorn.Config(routes(log), log_level="error", lifespan="off"))
        made.append(Auditing(f"http://127.0.0.1:{listener.getsockname()[1]}", log, asyncio.get_running_loop()))
        stop.append(server)
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        started.set()
        try:
            await serving
        finally:
            await log.close()
            await database.close()

    stop: list[uvicorn.Server] = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield made[0]
    finally:
        for server in stop:
            server.should_exit = True
        thread.join(30)
        listener.close()
