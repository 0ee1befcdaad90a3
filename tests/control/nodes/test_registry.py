from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carrel.control.nodes.registry import Nodes, beat_every, default_url, machine_id
from carrel.control.nodes.workers import Worker
from carrel.control.sessions.live import LiveSandboxes
from carrel.store import Database
from carrel.store.nodes import NodeStore


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await Database.open(str(tmp_path / "shared.db"))
    yield database
    await database.close()


def node(database: Database, name: str, *, key: str = "key", lease_s: float = 30.0, shared: bool = True) -> Nodes:
    return Nodes(
        NodeStore(database),
        LiveSandboxes(),
        {},
        worker=Worker(name),
        key_id=key,
        capacity=4,
        lease_s=lease_s,
        shared=shared,
        identity=None,
    )


async def test_servers_know_of_each_other_until_they_sign_off(database: Database) -> None:
    a, b = node(database, "a"), node(database, "b")
    await a.join("http://127.0.0.1:1", "1.0")
    assert await a.find("b") is None
    await b.join("http://127.0.0.1:2", "1.0")
    a._beaten = 0.0  # an unknown server is looked for, but not at every request
    found = await a.find("b")
    assert found is not None and found.url == "http://127.0.0.1:2" and a.obstacle(found) is None
    assert sorted(a.candidates()) == ["a", "b"] and not a.is_silent(found)
    assert [(each.name, each.here, each.state) for each in await a.page()] == [
        ("a", True, "running"),
        ("b", False, "running"),
    ]
    await b.leave()
    await b.beat()
    await a.beat()
    assert await a.find("b") is None and [each.name for each in await a.page()] == ["a"]


async def test_a_silent_server_is_gone_after_its_lease(database: Database) -> None:
    a, b = node(database, "a"), node(database, "b", lease_s=0.05)
    await a.join("http://127.0.0.1:1", "1")
    await b.join("http://127.0.0.1:2", "1")
    await a.beat()
    record = a._known["b"]
    async with asyncio.timeout(10):
        while await a.find("b") is not None:
            await asyncio.sleep(0.01)
    assert a.is_silent(record) and sorted(a.candidates()) == ["a"]
    assert [each.state for each in await a.page() if each.name == "b"] == ["gone"]
    await b.beat()
    await a.beat()
    again = node(database, "b")
    await again.join("http://127.0.0.1:3", "1")
    await a.beat()
    assert a.is_silent(record), "a new process under the same name is another server"


async def test_a_server_that_cannot_be_reached_is_gone_until_its_next_sign_of_life(database: Database) -> None:
    a, b = node(database, "a"), node(database, "b")
    await a.join("http://127.0.0.1:1", "1")
    await b.join("http://127.0.0.1:2", "1")
    await a.beat()
    a.suspect("b")
    assert await a.find("b") is None and sorted(a.candidates()) == ["a"]
    await a.beat()
    assert await a.find("b") is None
    await b.beat()
    await a.beat()
    assert await a.find("b") is not None


async def test_what_keeps_a_request_from_being_forwarded(database: Database) -> None:
    a, b = node(database, "a"), node(database, "b", key="another")
    await a.join("http://127.0.0.1:1", "1")
    await b.join("http://127.0.0.1:2", "1")
    await a.beat()
    assert await a.find("b") is None and "CARREL_SECRET_KEY" in str(a.why_not("b"))
    assert [(each.name, each.state) for each in await a.page()] == [("a", "running"), ("b", "unreachable")]
    far = node(database, "far")
    object.__setattr__(far.me, "machine", "another machine")
    for url, reached in (("http://127.0.0.1:3", False), ("http://[::1]:3", False), ("http://10.0.0.9:3", True)):
        await far.join(url, "1")
        await a.beat()
        assert (await a.find("far") is not None) is reached
        assert ("CARREL_NODE_URL" in str(a.why_not("far"))) is not reached


async def test_starts_between_two_signs_of_life_are_counted(database: Database) -> None:
    a, b = node(database, "a"), node(database, "b")
    await a.join("http://127.0.0.1:1", "1")
    await b.join("http://127.0.0.1:2", "1")
    await a.beat()
    a.placed("b")
    assert a.candidates()["b"].sandboxes == 1
    await a.beat()
    assert a.candidates()["b"].sandboxes == 1, "b has not spoken since"
    with b.starting():
        await b.beat()
    await a.beat()
    assert a.candidates()["b"].sandboxes == 1, "now b counts it by itself"
    await b.beat()
    await a.beat()
    assert a.candidates()["b"].sandboxes == 0


async def test_a_server_alone_writes_nothing(database: Database) -> None:
    alone = node(database, "a", shared=False)
    await alone.join("http://127.0.0.1:1", "1")
    await alone.beat()
    assert [each.name for each in await alone.page()] == ["a"]
    other = node(database, "b")
    await other.join("http://127.0.0.1:2", "1")
    assert [each.name for each in await other.page()] == ["b"]


def test_addresses() -> None:
    assert default_url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert default_url("::1", 80) == "http://[::1]:80"
    assert default_url("0.0.0.0", 80).startswith("http://") and "0.0.0.0" not in default_url("0.0.0.0", 80)
    assert default_url("::", 80).startswith("http://[") and "[::]" not in default_url("::", 80)
    assert machine_id() == machine_id()
    assert (beat_every(30.0), beat_every(3.0)) == (2.0, 1.0)
