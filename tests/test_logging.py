"""`carrel.logging` against a real server."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from carrel.client import Client
from carrel.config import load
from carrel.logging import BusHandler
from carrel.models import EventInfo
from carrel.server import RunningServer, running


@pytest.fixture
def server(forked: None) -> Iterator[RunningServer]:
    path = tempfile.mkdtemp(prefix="carrel-t-")
    started, found, stop = threading.Event(), list[RunningServer](), list[asyncio.Event]()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        stop.append(asyncio.Event())
        async with running(load({"data_dir": path, "port": 0, "volumes": "directory"}, environ={})) as server:
            found.append(server)
            started.set()
            await stop[0].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    yield found[0]
    loops[0].call_soon_threadsafe(stop[0].set)
    thread.join()
    shutil.rmtree(path)


@contextmanager
def logger(handler: BusHandler) -> Iterator[logging.Logger]:
    found = logging.getLogger(f"tests.{id(handler)}")
    found.setLevel(logging.DEBUG)
    found.propagate = False
    found.addHandler(handler)
    yield found
    found.removeHandler(handler)
    handler.close()


def logged(server: RunningServer) -> list[EventInfo]:
    with Client(server.url, server.token) as client:
        return list(client.events(kinds=["log"], after=0, follow=False))


def test_records_become_events(server: RunningServer) -> None:
    handler = BusHandler("c", url=server.url, token=server.token, level=logging.INFO)
    with logger(handler) as log:
        log.debug("not this")
        log.info("%d of %d", 1, 2)
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")
        handler.flush()
        first, second = logged(server)
    assert (first.context_id, first.body["message"], first.body["level"]) == ("c", "1 of 2", "INFO")
    assert str(first.body["logger"]).startswith("tests.")
    assert "ValueError: broken" in str(second.body["message"])
    assert handler.dropped == 0


def test_what_finds_no_room_is_dropped_and_counted_and_nobody_waits(server: RunningServer) -> None:
    handler = BusHandler("c", url=server.url, token=server.token, capacity=10)
    with logger(handler) as log:
        began = time.process_time()
        for number in range(2000):
            log.info("record %d", number)
        assert time.process_time() - began < 5
        handler.flush()
        log.info("the last one")
        handler.flush()
        events = logged(server)
    assert events[-1].body["message"] == "the last one"
    assert handler.dropped > 0
    assert len(events) + handler.dropped == 2001
    assert sum(int(str(event.body.get("dropped", 0))) for event in events) == handler.dropped


def test_a_server_that_is_away_costs_no_wait_and_a_refusal_is_counted(server: RunningServer) -> None:
    refused = BusHandler("c", url=server.url, token="carrel_wrong")
    with logger(refused) as log:
        log.info("x")
        refused.flush()
        assert refused.dropped == 1
    away = BusHandler("c", url="http://127.0.0.1:9", token="carrel_x")
    with logger(away) as log:
        began = time.monotonic()
        log.info("x")
        assert time.monotonic() - began < 1
