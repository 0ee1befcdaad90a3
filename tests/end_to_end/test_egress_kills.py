"""The egress process and the server are killed under load: nobody goes around, and what lives on goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from tests.support.egress_ground import Carrel, Outside, Site, ground, outbound, processes, run, until

from carrel.client import Sandbox

KILLS = 10
LOAD = """
import http.client, os, sys, time, urllib.request
with open("log", "a", buffering=1) as log:
    while not os.path.exists("enough"):
        began = time.time()
        try:
            said = urllib.request.urlopen(sys.argv[1], timeout=20).read()
        except (OSError, http.client.HTTPException) as error:
            log.write(f"{began} {time.time()} failed {error!r}\\n")
        else:
            log.write(f"{began} {time.time()} {said.decode()}\\n")
        time.sleep(0.005)
"""


@dataclass
class Try:
    """One request of the load."""

    began: float
    ended: float
    said: str


class Load:
    """A sandbox that asks for the same thing over and over."""

    def __init__(self, box: Sandbox, url: str):
        self.box = box
        box.files.write("load.py", LOAD.encode())
        box.files.write("log", b"")
        box.commands.start(["python3", "load.py", url], timeout=300)

    def tries(self) -> list[Try]:
        lines = self.box.files.read("log").decode().splitlines()
        return [Try(float(a), float(b), c) for a, b, c in (line.split(" ", 2) for line in lines if line.count(" ") > 1)]

    def served(self, after: float) -> Try | None:
        """The first request that began after a moment and was answered."""
        return next((each for each in self.tries() if each.began > after and each.said == "served"), None)

    def end(self) -> list[Try]:
        self.box.files.write("enough", b"")
        return until(lambda: not any(each.running for each in self.box.commands.list()) and self.tries(), "its end")


@pytest.fixture
def place() -> Iterator[tuple[Outside, Carrel, Site]]:
    with ground() as (outside, carrel):
        yield outside, carrel, outside.site(lambda *_: b"served")


def served(load: Load, after: float) -> Callable[[], Try | None]:
    return lambda: load.served(after)


def test_a_killed_proxy_is_back(
    place: tuple[Outside, Carrel, Site], record_property: Callable[[str, object], None]
) -> None:
    _outside, carrel, site = place
    url = f"http://files.test:{site.port}/"
    loads = [Load(carrel.context(name, *outbound("files.test", port=site.port)), url) for name in ("a", "b")]
    away = []
    for _ in range(KILLS):
        for load in loads:
            until(served(load, time.time()), "load")
        proxy = carrel.proxy
        killed = time.time()
        os.kill(proxy, signal.SIGKILL)
        back = [until(served(load, killed), "the next answer") for load in loads]
        away.append(max(each.ended for each in back) - killed)
        until(lambda gone=proxy: carrel.proxy != gone, "the next proxy")
    record_property("away_ms", [round(each * 1000) for each in away])
    print(f"from SIGKILL to the next answer, ms: {sorted(round(each * 1000) for each in away)}")
    print(f"median {statistics.median(away) * 1000:.0f}")
    for load in loads:
        tries = load.end()
        failed = [each for each in tries if each.said != "served"]
        assert len(failed) <= KILLS, failed  # at most what was under way
        assert not [each for each in failed if "refused" in each.said], failed  # a new one waits in the queue instead
    keepers = [pid for pid, (above, words) in processes().items() if _keeps(carrel, above, words)]
    assert len(keepers) == 1
    # The keeper too: then all is started anew, and the sandboxes see no more of it than a pause.
    for pid in (keepers[0], carrel.proxy):
        os.kill(pid, signal.SIGKILL)
    assert run(loads[0].box, ["curl", "-sS", "-m", "30", url]) == "served"
    # Whatever reached the site is in the log, also what the killed ones had just let out.
    until(lambda: sum(len(carrel.records(name)) for name in ("a", "b")) >= len(site.requests), "all records")
    results = {each.result for name in ("a", "b") for each in carrel.records(name)}
    assert results <= {"ok", "unknown", "broken_off", "cancelled"}
    carrel.stop()
    until(lambda: not carrel.left(), f"nothing to be left of {carrel.left()}")


def _keeps(carrel: Carrel, above: int, words: str) -> bool:
    assert carrel.process is not None
    return above == carrel.process.pid and "carrel.egress" in words


def test_without_the_server_what_is_allowed_goes_on(place: tuple[Outside, Carrel, Site]) -> None:
    outside, carrel, site = place
    slow = outside.site(lambda *_: b"x" * 1_000_000)
    outside.call(lambda: _shut(slow))
    until(lambda: slow.gate, "the gate")
    rules = [*outbound("files.test", port=site.port), *outbound("api.test", port=slow.port)]
    box = carrel.context("c", *rules)
    load = Load(box, f"http://files.test:{site.port}/")
    box.commands.start(["curl", "-sS", "-o", "large", f"http://api.test:{slow.port}/"], timeout=300)
    until(lambda: slow.requests, "the download")
    until(served(load, time.time()), "load")
    proxy = carrel.proxy
    killed = time.time()
    carrel.kill()
    before = len(site.requests)
    until(lambda: len(site.requests) > before + 20, "requests without a server")
    outside.call(lambda: slow.gate and slow.gate.set())
    started = time.time()
    carrel.start()
    assert carrel.proxy == proxy
    box = load.box = carrel.client.sandbox("c")
    until(lambda: not [each for each in box.commands.list() if each.running and "curl" in each.command], "curl")
    assert len(box.files.read("large")) == 1_000_000
    tries = load.end()
    assert [each for each in tries if killed < each.began < started and each.said == "served"]
    assert not [each for each in tries if each.said != "served"]
    # What the proxy let out meanwhile is in the log.
    assert len(carrel.records("c", len(tries))) >= len(tries)
    carrel.stop()
    until(lambda: not carrel.left(), f"nothing to be left of {carrel.left()}")


def test_the_next_server_brings_the_way_out_back_when_both_were_killed(place: tuple[Outside, Carrel, Site]) -> None:
    _outside, carrel, site = place
    box = carrel.context("c", *outbound("files.test", port=site.port))
    load = Load(box, f"http://files.test:{site.port}/")
    for _ in range(3):
        until(served(load, time.time()), "load")
        proxy = carrel.proxy
        carrel.kill()
        os.kill(proxy, signal.SIGKILL)
        killed = time.time()
        carrel.start()
        load.box = carrel.client.sandbox("c")
        until(served(load, killed), "the next answer")
    tries = load.end()
    assert not [each for each in tries if "refused" in each.said]
    assert len([each for each in tries if each.said != "served"]) <= 3
    carrel.stop()
    until(lambda: not carrel.left(), f"nothing to be left of {carrel.left()}")


def _shut(site: Site) -> None:
    site.gate = asyncio.Event()


def test_the_proxy_lets_go_of_what_has_ended(place: tuple[Outside, Carrel, Site]) -> None:
    _outside, carrel, site = place
    url = f"http://files.test:{site.port}/"

    def held() -> int:
        return len(os.listdir(f"/proc/{carrel.proxy}/fd"))

    kept = carrel.context("kept", *outbound("files.test", port=site.port))
    assert run(kept, ["curl", "-sS", url]) == "served"
    before = held()
    for number in range(4):
        box = carrel.context(f"c{number}", *outbound("files.test", port=site.port))
        assert run(box, ["curl", "-sS", url]) == "served"
        box.terminate(delete_files=True)
    until(lambda: held() <= before, "sockets to be closed")
    assert run(kept, ["curl", "-sS", url]) == "served"
