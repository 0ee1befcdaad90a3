"""The sandbox a command runs in, by name on the server or an ephemeral one that needs no server, until it has ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from carrel.cli.connecting import tell_new
from carrel.cli.failures import Terminated
from carrel.client.locate import local_server
from carrel.errors import NotFound, ServerUnreachable

if TYPE_CHECKING:
    from carrel.cli.options import Wanted
    from carrel.client import AsyncClient, AsyncSandbox, Sandbox
    from carrel.local import LocalSandbox

T = TypeVar("T")
Box = TypeVar("Box", "AsyncSandbox", "Sandbox")


@asynccontextmanager
async def kept(name: str, wanted: Wanted) -> AsyncIterator[AsyncSandbox]:
    """The sandbox of that name on the server, made or resumed when needed; it stays. What runs must be as wanted."""
    from carrel.client import AsyncClient

    async with AsyncClient(administrator=True) as client:
        try:
            info = await client.find(name)
        except NotFound:
            box = await client.sandbox(name, **wanted.arguments())
            tell_new(name)
            yield box
            return
        if info.context_id is None or (info.state == "running" and not wanted):
            yield client.attach(info)
        else:
            yield await client.sandbox(info.context_id, **wanted.arguments())


@asynccontextmanager
async def ephemeral(wanted: Wanted, *, keep: bool = False) -> AsyncIterator[AsyncSandbox]:
    """A sandbox that is gone afterwards: on the server that runs here, else on one inside this process."""
    from carrel.client import AsyncClient

    named = bool(os.environ.get("CARREL_URL"))
    if named or local_server() is not None:
        async with AsyncClient(administrator=True) as client:
            box: AsyncSandbox | None = None
            try:
                box = await client.sandbox(**wanted.arguments())
            except ServerUnreachable:
                if named or keep:
                    raise
            if box is not None:
                if keep:
                    yield box
                    return
                async with box:
                    yield box
                return
    if keep:
        raise ServerUnreachable(
            "a sandbox can only be kept by a server, and none runs here", hint="start one with `carrel serve`"
        )
    async with _own_server(wanted) as client, await client.sandbox(**wanted.arguments()) as made:
        yield made


@asynccontextmanager
async def single(wanted: Wanted, *, keep: bool = False) -> AsyncIterator[AsyncSandbox | LocalSandbox]:
    """A sandbox for one command. Without a server it is made without one where that is possible, which is quicker."""
    if not keep and not os.environ.get("CARREL_URL") and local_server() is None:
        from carrel.local import local_sandbox

        async with local_sandbox({}, **wanted.arguments()) as local:
            if local is not None:
                yield local
                return
    async with ephemeral(wanted, keep=keep) as box:
        yield box


@asynccontextmanager
async def _own_server(wanted: Wanted) -> AsyncIterator[AsyncClient]:
    from carrel.client import AsyncClient, data_dir
    from carrel.config import load
    from carrel.local import short_temporary_directory
    from carrel.server import running

    # What the server logs reaches the caller as an error already; stderr belongs to the command that is run.
    logging.getLogger().addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory(
        prefix="carrel-", dir=short_temporary_directory(), ignore_cleanup_errors=True
    ) as directory:
        flags: dict[str, object] = {
            "data_dir": directory,
            "host": "127.0.0.1",
            "port": 0,
            "log_level": "error",
        }
        if wanted.provider == "process":
            # Whoever types the name on their own machine has chosen; a server asks its operator instead.
            flags["sandbox.allow_process"] = True
        settings = load(flags)
        if settings.templates_dir is None:  # those of the server that would run here
            usual = os.path.join(data_dir(), "templates")
            settings = settings.model_copy(update={"templates_dir": usual})
        async with running(settings) as server, AsyncClient(server.url, server.token) as client:
            yield client


def to_the_end(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine so that SIGTERM and SIGHUP let it tidy up, as Ctrl-C does."""

    async def attended() -> T:
        task = asyncio.ensure_future(work)
        heard: list[int] = []

        def stop(number: int) -> None:
            heard.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        try:
            return await task
        except asyncio.CancelledError:
            if heard:
                raise Terminated(heard[0]) from None
            raise
        finally:
            if not task.done():
                task.cancel()

    return asyncio.run(attended())
