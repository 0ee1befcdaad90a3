from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator

import pytest
from tests.support.sandboxes import until

from carrel.control.egress.client import EgressClient
from carrel.errors import PlatformError
from carrel.primitives.channel import ChannelClosed, Message
from carrel.primitives.keyed_lock import KeyedLocks


class Known:
    def __init__(self, directory: str, *, last: bool = True):
        self.said: list[Message] = []
        self.downs = 0
        self.client = EgressClient(
            directory,
            ["--cache", f"{directory}/cache"],
            on_message=self.said.append,
            on_down=self._down,
            locks=KeyedLocks().of,
            last=last,
        )

    def _down(self) -> None:
        self.downs += 1


@pytest.fixture
async def known() -> AsyncIterator[Known]:
    with tempfile.TemporaryDirectory(prefix="carrel-t-") as directory:
        known = Known(directory)
        yield known
        await known.client.close()


async def test_it_is_started_asked_and_ended(known: Known) -> None:
    client = known.client
    assert not client.up and client.pid == 0 and not client.left_behind()
    with pytest.raises(ChannelClosed):
        client.send("describe")
    assert await client.connect() == []
    assert client.up and client.left_behind()
    assert (await client.request("describe"))["pid"] == client.pid
    assert await client.connect() == []
    with pytest.raises(PlatformError, match="refused 'dance'"):
        await client.request("dance")
    pid = client.pid
    await client.close()
    assert not os.path.exists(f"/proc/{pid}") and not client.left_behind()
    await client.close()


async def test_one_that_died_is_noticed_and_replaced(known: Known) -> None:
    client = known.client
    await client.connect()
    first = client.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: known.downs == 1, what="the end")
    assert client.pid == 0
    with pytest.raises(PlatformError, match="gone"):
        await client.request("describe")
    await client.connect()
    assert client.pid not in {0, first}


async def test_another_worker_and_the_next_server_find_it(known: Known) -> None:
    await known.client.connect()
    pid = known.client.pid
    other = Known(os.path.dirname(known.client._path))
    await other.client.connect()
    assert other.client.pid == pid
    assert (await known.client.request("describe"))["pid"] == pid, "both are connected"
    await other.client.close()
    assert not os.path.exists(other.client._path)
    await until(lambda: known.downs == 1, what="the end")


async def test_one_that_is_not_the_last_leaves_it_running(known: Known) -> None:
    await known.client.connect()
    other = Known(os.path.dirname(known.client._path), last=False)
    await other.client.connect()
    await other.client.close()
    assert (await known.client.request("describe"))["pid"] == known.client.pid


async def test_who_gives_up_while_it_is_started_leaves_no_second_one(known: Known) -> None:
    client, spawn, begun, go = known.client, known.client._spawn, threading.Event(), threading.Event()

    def slowly() -> socket.socket:
        begun.set()
        go.wait(10)
        return spawn()

    client._spawn = slowly  # type: ignore[method-assign]
    given_up = asyncio.create_task(client.connect())
    await until(begun.is_set, what="its beginning")
    given_up.cancel()
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.close())
    await asyncio.wait([closing], timeout=0.2)
    go.set()
    await asyncio.gather(given_up, closing, return_exceptions=True)
    assert given_up.cancelled()
    assert client._process is None
    assert not client.left_behind()


async def test_what_cannot_run_is_told_with_its_log() -> None:
    with tempfile.TemporaryDirectory(prefix="carrel-t-") as directory:
        client = EgressClient(
            directory, ["--nonsense"], on_message=print, on_down=list, locks=KeyedLocks().of, last=True
        )
        with pytest.raises(PlatformError, match=r"egress process|it is gone"):
            await client.connect()
        await client.close()
