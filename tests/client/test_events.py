from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from carrel import AsyncClient, Client
from carrel.errors import Denied, InvalidRequest, ServerUnreachable, Unauthorized


@asynccontextmanager
async def cutting(address: str) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A relay to the server whose connections a test can cut."""
    where = urlsplit(address)
    open_ones: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(where.hostname, where.port)
        open_ones.extend((writer, far_writer))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", open_ones
    finally:
        server.close()
        for writer in open_ones:
            writer.close()


def token_of(data_dir: Path) -> str:
    return (data_dir / "token").read_text().strip()


async def test_events_go_on_after_broken_connections_without_loss_or_repetition(address: str, data_dir: Path) -> None:
    count, seen = 60, list[str]()
    async with (
        cutting(address) as (url, connections),
        AsyncClient(url, token_of(data_dir)) as reader,
        AsyncClient(address, token_of(data_dir)) as writer,
    ):
        ready = asyncio.Event()

        async def read() -> None:
            async for event in reader.events("cut", kinds=["log"]):
                seen.append(str(event.body["message"]))
                ready.set()
                if seen[-1] == f"m{count - 1}":
                    return

        reading = asyncio.create_task(read())
        async with asyncio.timeout(60):
            while not ready.is_set():  # it reads only what is new
                await writer.publish_log([{"message": "first"}], context="cut")
                await asyncio.sleep(0.05)
            for number in range(count):
                await writer.publish_log([{"message": f"m{number}"}], context="cut")
                if number % 10 == 5:
                    for each in connections:
                        each.transport.abort()
                    connections.clear()
            await reading
    assert [each for each in seen if each != "first"] == [f"m{number}" for number in range(count)]


def test_the_blocking_client_reads_what_is_stored_and_what_comes(address: str) -> None:
    with Client(administrator=True) as client:
        client.publish_log([{"message": "one"}, {"message": "two"}], context="plain")
        events = list(client.events("plain", after=0, follow=False))
        assert [event.body["message"] for event in events] == ["one", "two"]
        assert [event.context_id for event in events] == ["plain", "plain"]
        later = threading.Timer(0.2, client.publish_log, [[{"message": "three"}]], {"context": "plain"})
        later.start()
        assert next(client.events("plain", kinds=["log"], after=events[-1].id)).body["message"] == "three"
        later.join()
        with pytest.raises(InvalidRequest):
            next(client.events(kinds=["comand"]))


async def test_what_cannot_be_mended_is_raised(address: str, data_dir: Path) -> None:
    async with AsyncClient(address, token_of(data_dir)) as root:
        made = await root.tokens.create("reader", kind="agent", scopes=["read"], contexts=["mine"])
        await root.publish_log([{"message": "x"}], context="mine")
        async with AsyncClient(address, made.token) as reader:
            with pytest.raises(Denied):
                await anext(reader.events("theirs"))
            events = reader.events("mine", after=0)
            assert (await anext(events)).body["message"] == "x"
            await root.tokens.revoke(made.id)
            with pytest.raises(Unauthorized):
                async with asyncio.timeout(60):
                    await anext(events)
    async with AsyncClient("http://127.0.0.1:9", "carrel_x") as nobody:
        with pytest.raises(ServerUnreachable):
            await anext(nobody.events())
