"""Provides the sandbox that a command runs in: that of a context, or an ephemeral one, also without a server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from carrel.cli.connecting import note_created
from carrel.cli.failures import Terminated
from carrel.cli.progress import pulling
from carrel.client.locate import local_server
from carrel.errors import InvalidRequest, NotFound, ServerUnreachable

if TYPE_CHECKING:
    from carrel.cli.options import SandboxOptions
    from carrel.client import AsyncClient, AsyncSandbox, Sandbox
    from carrel.local import LocalSandbox

T = TypeVar("T")
Box = TypeVar("Box", "AsyncSandbox", "Sandbox")


@asynccontextmanager
async def context_sandbox(name: str, sandbox: SandboxOptions) -> AsyncIterator[AsyncSandbox]:
    """Find, create or resume the sandbox of a context; it stays. A running one must match the options."""
    from carrel.client import AsyncClient

    async with AsyncClient(administrator=True) as client:
        try:
            info = await client.find(name)
        except NotFound:
            with pulling() as progress:
                box = await client.sandbox(name, **sandbox.arguments(), progress=progress)
            note_created(name)
            yield box
            return
        if info.context_id is None or (info.state == "running" and not sandbox):
            yield client.attach(info)
        else:
            with pulling() as progress:
                box = await client.sandbox(info.context_id, **sandbox.arguments(), progress=progress)
            yield box


@asynccontextmanager
async def ephemeral_sandbox(sandbox: SandboxOptions, *, keep: bool = False) -> AsyncIterator[AsyncSandbox]:
    """Create a sandbox and remove it afterwards: on the server that runs here, else on one inside this process."""
    from carrel.client import AsyncClient

    named = bool(os.environ.get("CARREL_URL"))
    if named or local_server() is not None:
        async with AsyncClient(administrator=True) as client:
            box: AsyncSandbox | None = None
            try:
                with pulling() as progress:
                    box = await client.sandbox(**sandbox.arguments(), progress=progress)
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
        raise ServerUnreachable("--keep needs a server, and none runs here", hint="start one with `carrel serve`")
    async with _own_server(sandbox) as client:
        with pulling() as progress:
            made = await client.sandbox(**sandbox.arguments(), progress=progress)
        async with made:
            yield made


@asynccontextmanager
async def one_command_sandbox(
    sandbox: SandboxOptions, *, keep: bool = False
) -> AsyncIterator[AsyncSandbox | LocalSandbox]:
    """Create a sandbox for one command. Where no server runs it is made without one if possible, which is quicker."""
    if not keep and not os.environ.get("CARREL_URL") and local_server() is None:
        from carrel.isolation import probe
        from carrel.local import local_sandbox

        probe.begin()
        async with local_sandbox({}, **sandbox.arguments()) as local:
            if local is not None:
                yield local
                return
    async with ephemeral_sandbox(sandbox, keep=keep) as box:
        yield box


async def image_command(box: AsyncSandbox | LocalSandbox) -> list[str]:
    """Return the entry point of the sandbox's image with its arguments."""
    from carrel.client import AsyncSandbox

    image = await box.image() if isinstance(box, AsyncSandbox) else None
    words = [] if image is None else [*image.entry_point, *image.command]
    if not words:
        raise InvalidRequest("the image has no command", field="COMMAND", hint="name one after --")
    return words


@asynccontextmanager
async def _own_server(sandbox: SandboxOptions) -> AsyncIterator[AsyncClient]:
    from carrel.client import AsyncClient, data_dir
    from carrel.config import MAX_DAYS, load
    from carrel.local import short_temporary_directory
    from carrel.server import running

    # Errors of the server reach the user through the client; stderr belongs to the command that is run.
    logging.getLogger().addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory(
        prefix="carrel-", dir=short_temporary_directory(), ignore_cleanup_errors=True
    ) as directory:
        flags: dict[str, object] = {
            "data_dir": directory,
            "host": "127.0.0.1",
            "port": 0,
            "log_level": "error",
            # The images of the server that would run here. Only that one removes images.
            "images.max_mb": 1 << 40,
            "images.ttl_days": MAX_DAYS,
        }
        if sandbox.provider == "process":
            # The user who types the name on their own machine has chosen it; on a server the operator must allow it.
            flags["sandbox.allow_process"] = True
        settings = load(flags)
        if settings.templates_dir is None:  # use the templates of the server that would run here
            usual = os.path.join(data_dir(), "templates")
            settings = settings.model_copy(update={"templates_dir": usual})
        if settings.images.directory is None:
            images = settings.images.model_copy(update={"directory": os.path.join(data_dir(), "images")})
            settings = settings.model_copy(update={"images": images})
        async with running(settings) as server, AsyncClient(server.url, server.token) as client:
            yield client


def run_with_cleanup(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine; SIGTERM and SIGHUP cancel it, as Ctrl-C does, so that it can clean up."""

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
