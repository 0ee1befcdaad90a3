"""What a fleet does when something is lost: a server with its disk, the database, the archive, the right time, the line
between two servers. The table in docs/explanation/durability.md has a row for each test.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.support.fleet import Fleet, eventually
from tests.support.postgres import Postgres
from tests.support.relays import UnixLine
from tests.support.s3 import S3Server
from tests.support.two_networks import ADDRESSES, TwoNetworks

LEASE_S = 3.0
PACE_S = 0.1
"""From one look to the next while a lease is waited for."""
SOCKET = ".s.PGSQL.5432"
SHIFTED = """
import sys, time
shift = float(sys.argv.pop(1))
time_of_day, time_of_day_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: time_of_day() + shift, lambda: time_of_day_ns() + int(shift * 1e9)
from carrel.cli import main
main(sys.argv[1:])
"""
"""The command line, with another time of day."""
DEPLOY = "/v1/sandboxes", {"context_id": "parted"}


@dataclass
class Place:
    """Servers with short leases, a client of each, and the line of each to the database."""

    fleet: Fleet
    database: Callable[[str], str]
    """Returns the URL by which a server uses the database."""
    http: dict[str, httpx.AsyncClient] = field(default_factory=dict)
    lines: dict[str, UnixLine] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)

    async def start(
        self, name: str, connect: Callable[[str], httpx.AsyncClient] | None = None, **settings: Any
    ) -> None:
        """Start a server, again or for the first time. `connect` makes its client."""
        self.began[name] = time.monotonic()
        self.fleet.start(name, CARREL_DATABASE=self.database(name), **settings)
        await asyncio.to_thread(self.fleet.ready, name)
        if name in self.http:
            await self.http[name].aclose()
        self.http[name] = (connect or self.fleet.http)(name)

    async def begun(self, name: str, context: str) -> str:
        """Start a context on a server that has less to do than the others; return its path."""
        answer = await eventually(self.http[name], "POST", "/v1/sandboxes", json={"context_id": context})
        assert answer.status_code == 201 and answer.json()["node"] == name, answer.text
        return f"/v1/sandboxes/{context}"

    async def resumed(self, name: str, context: str) -> dict[str, Any]:
        """Ask a server for a context."""
        answer = await eventually(self.http[name], "POST", "/v1/sandboxes", json={"context_id": context})
        assert answer.status_code in {200, 201}, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def run(self, name: str, box: str, command: str) -> str:
        """Run a command and return its output."""
        answer = await eventually(self.http[name], "POST", f"{box}/commands", json={"command": command})
        assert answer.status_code == 200 and answer.json()["exit_code"] == 0, answer.text
        return str(answer.json()["stdout"])

    async def load(self, name: str, box: str) -> None:
        """Run commands until the server is gone."""
        with suppress(httpx.TransportError):
            while True:
                await self.http[name].post(f"{box}/commands", json={"command": "true"})

    async def archived(self, name: str, box: str) -> None:
        """Take a snapshot and wait until it is in the archive."""
        taken = (await self.http[name].post(f"{box}/snapshots")).json()["id"]
        async with asyncio.timeout(60):
            while taken not in {each["id"] for each in await self.snapshots(name, box) if each["archived"]}:
                await asyncio.sleep(0.05)

    async def counted(self, name: str, sandboxes: list[int]) -> None:
        """Wait until a server knows that the servers have so many sandboxes."""
        async with asyncio.timeout(60):
            while sandboxes != [each["sandboxes"] for each in (await self.http[name].get("/v1/nodes")).json()["items"]]:
                await asyncio.sleep(0.05)

    async def snapshots(self, name: str, box: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.http[name].get(f"{box}/snapshots")).json()["items"]
        return found


@asynccontextmanager
async def serving(postgres: Postgres, *names: str, **settings: str) -> AsyncIterator[Place]:
    """Servers that have started."""
    schema = f"failures_{secrets.token_hex(4)}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    directory = Path(tempfile.mkdtemp(prefix="l"))
    common = {"CARREL_LEASE_S": str(LEASE_S), "CARREL_POOL_SIZE": "0", **settings}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(postgres.execute, f"DROP SCHEMA {schema} CASCADE")
        stack.callback(shutil.rmtree, directory)

        def database(name: str) -> str:
            if name not in place.lines:
                (directory / name).mkdir()
                line = UnixLine(str(directory / name / SOCKET), str(postgres.directory / SOCKET))
                stack.callback(line.close)
                place.lines[name] = line
            direct, by_line = (quote(str(path), safe="") for path in (postgres.directory, directory / name))
            return postgres.url(search_path=schema).replace(direct, by_line)

        place = Place(Fleet("", **common), database)
        try:
            for name in names:
                await place.start(name)
            yield place
        finally:
            for line in place.lines.values():
                line.set("passes")
            for client in place.http.values():
                await client.aclose()
            await asyncio.to_thread(place.fleet.close)


async def test_a_server_is_lost_with_its_disk(postgres: Postgres, carrel_forks: None) -> None:
    async with serving(postgres, "a") as place:
        busy = await place.begun("a", "busy")
        await place.run("a", busy, "echo kept > file")
        await place.archived("a", busy)
        await place.run("a", busy, "echo lost > file")
        stopped = await place.begun("a", "stopped")
        await place.run("a", stopped, "echo all > file")
        await place.http["a"].post(f"{stopped}/stop")
        fresh = await place.begun("a", "fresh")
        await place.run("a", fresh, "echo lost > file")
        await place.start("b")
        at_b = await place.begun("b", "elsewhere")
        async with asyncio.timeout(60):  # the others have seen it for long enough
            while time.monotonic() - place.began["b"] < 1.5 * LEASE_S:
                await asyncio.sleep(0.05)
        async with asyncio.TaskGroup() as working:  # so that it is lost in the middle of transactions
            for _ in range(4):
                working.create_task(place.load("a", fresh))
            await place.run("a", fresh, "sleep 0.5")
            place.lines["a"].set("silent")  # nobody tells the database
            place.fleet.lose("a")
            began = time.monotonic()
        # At once: what was stopped, and what runs elsewhere. After the lease: what ran there.
        assert await place.run("b", at_b, "echo on") == "on\n"
        assert (await place.resumed("b", "stopped"))["node"] == "b"
        assert await place.run("b", stopped, "cat file") == "all\n"
        answer = await place.http["b"].post(f"{busy}/commands", json={"command": "true"})
        told = answer.status_code, answer.json()["code"]
        soon = time.monotonic() - began < LEASE_S / 2  # on a machine that is very busy the lease may have ended by now
        assert told == (503, "node_unreachable") or (not soon and told == (409, "not_running")), answer.text
        answer = await eventually(place.http["b"], "POST", f"{busy}/commands", json={"command": "true"})
        assert (answer.status_code, answer.json()["code"]) == (409, "not_running"), answer.text
        assert (await place.resumed("b", "busy"))["node"] == "b"
        assert await place.run("b", busy, "cat file") == "kept\n"
        found = await place.resumed("b", "fresh")
        assert "had archived nothing" in found["notice"]
        assert "file" not in (await place.run("b", fresh, "ls")).split()
        assert time.monotonic() - began < LEASE_S + 45
        place.lines["a"].set("passes")
        # A new machine of that name starts with nothing, and takes what it is given.
        await place.start("a")
        assert await place.run("a", busy, "cat file") == "kept\n"
        assert (await place.http["a"].post(f"{busy}/stop")).status_code == 200


async def test_a_server_that_comes_back_late_still_has_the_newest_files(postgres: Postgres, carrel_forks: None) -> None:
    async with serving(postgres, "a", "b") as place:
        box = await place.begun("a", "late")
        await place.run("a", box, "echo archived > file")
        await place.archived("a", box)
        await place.run("a", box, "echo newest > file")
        place.fleet.kill("a")
        async with asyncio.timeout(60):
            while (await place.http["b"].get(box)).json()["state"] != "stopped":
                await asyncio.sleep(0.05)
        await place.start("a", CARREL_MAX_SANDBOXES="1")
        filler = await place.begun("a", "filler")
        await place.counted("b", [1, 0])
        # It has no room. The archive has older files, and another server has room: that is no reason to lose the newest.
        answer = await place.http["b"].post("/v1/sandboxes", json={"context_id": "late"})
        assert answer.status_code == 429, answer.text
        assert (await place.http["b"].post(f"{filler}/terminate")).status_code == 200
        assert (await place.resumed("b", "late"))["node"] == "a"
        assert await place.run("b", box, "cat file") == "newest\n"
        # A session that was stopped and archived may move when its server is full.
        assert (await place.http["b"].post(f"{box}/stop")).json()["state"] == "stopped"
        await place.begun("a", "filler")
        await place.counted("b", [1, 0])
        assert (await place.resumed("b", "late"))["node"] == "b"
        assert await place.run("a", box, "cat file") == "newest\n"


async def test_the_database_is_away_for_longer_than_the_leases(postgres: Postgres, carrel_forks: None) -> None:
    async with serving(postgres, "a", "b") as place:
        box = await place.begun("a", "on")
        await place.run("a", box, "echo archived > file")
        await place.archived("a", box)
        await place.run("a", box, "echo newest > file; sleep 1000 & echo $! > pid")
        for line in place.lines.values():
            line.set("refuses")
        refused: set[str] = set()
        async with asyncio.timeout(60):
            began = time.monotonic()
            while time.monotonic() - began < 2.5 * LEASE_S:  # the leases end meanwhile
                for name in ("a", "b"):
                    answer = await place.http[name].post(f"{box}/commands", json={"command": "true"})
                    assert answer.status_code == 503 and answer.json().get("retry") is True, answer.text
                    assert int(answer.headers["retry-after"]) >= 1
                    refused.add(answer.json()["code"])
                await asyncio.sleep(PACE_S)
        assert "database_unavailable" in refused and refused <= {"database_unavailable", "node_unreachable"}
        for line in place.lines.values():
            line.set("passes")
        # Everybody asks for it at once. The server that has it is not robbed of it because all were without the database.
        found = await asyncio.gather(*(place.resumed(name, "on") for name in ("b", "a", "b", "b")))
        assert {each["node"] for each in found} == {"a"}
        assert await place.run("b", box, "cat file; kill -0 $(cat pid) && echo lives") == "newest\nlives\n"


async def test_one_server_loses_the_database(postgres: Postgres, carrel_forks: None) -> None:
    async with serving(postgres, "a", "b") as place:
        box = await place.begun("a", "one")
        await place.run("a", box, "echo archived > file")
        await place.archived("a", box)
        place.lines["a"].set("refuses")
        # It stops working on its sandbox before its lease ends, and another takes the session over after that.
        answer = await place.http["a"].post(f"{box}/commands", json={"command": "echo ghost > file"})
        assert answer.status_code == 503, answer.text
        async with asyncio.timeout(60):
            while (await place.resumed("b", "one"))["node"] != "b":
                answer = await place.http["a"].post(f"{box}/commands", json={"command": "echo ghost > file"})
                assert answer.status_code == 503, answer.text
                await asyncio.sleep(0.1)
        assert await place.run("b", box, "cat file") == "archived\n"
        place.lines["a"].set("passes")
        # It gives its own sandbox up, and forwards.
        assert await place.run("a", box, "echo mended >> file; cat file") == "archived\nmended\n"
        assert (await place.resumed("a", "one"))["node"] == "b"


async def test_the_archive_is_away(postgres: Postgres, s3: S3Server, carrel_forks: None) -> None:
    prefix = secrets.token_hex(4)
    settings = {"CARREL_ARCHIVE": s3.url(prefix), "CARREL_SANDBOX_CHECKPOINT_S": "4", **s3.environment}
    async with serving(postgres, "a", "b", **settings) as place:
        box = await place.begun("a", "kept")
        await place.run("a", box, "echo one > file")
        s3.stop()
        try:
            await place.run("a", box, "echo two > file")
            taken = (await place.http["a"].post(f"{box}/snapshots")).json()
            assert taken["status"] == "ready" and not taken["archived"]
            assert (await place.http["b"].post(f"{box}/stop")).json()["state"] == "stopped"
            found = (await place.http["b"].get(box)).json()
            assert "archive" in found["notice"], found
            # It is resumed where its files are, whoever is asked.
            assert (await place.resumed("b", "kept"))["node"] == "a"
            assert await place.run("b", box, "cat file") == "two\n"
            assert (await place.http["b"].post(f"{box}/stop")).json()["state"] == "stopped"
            # Without that server it is not resumed with older files: its newest are safe, but there.
            place.fleet.kill("a")
            refused = await eventually(place.http["b"], "POST", "/v1/sandboxes", json={"context_id": "kept"})
            assert refused.status_code == 409 and "not in the archive yet" in refused.json()["detail"], refused.text
            await place.start("a")
        finally:
            s3.start()
        async with asyncio.timeout(60):
            while not all(each["archived"] for each in await place.snapshots("a", box)):
                await asyncio.sleep(0.1)
        await asyncio.to_thread(place.fleet.stop, "a")
        assert (await place.resumed("b", "kept"))["node"] == "b"
        assert await place.run("b", box, "cat file") == "two\n"


async def test_clocks_differ_by_hours(postgres: Postgres, carrel_forks: None) -> None:
    clocks = {"a": ["-c", SHIFTED, "7200"], "b": ["-c", SHIFTED, "-7200"]}
    async with serving(postgres) as place:
        for name, program in clocks.items():
            await place.start(name, program=program)
        boxes = {name: await place.begun(name, f"of-{name}") for name in ("a", "b")}
        began = time.monotonic()
        while time.monotonic() - began < 2.5 * LEASE_S:  # nobody thinks that a lease has ended, or a pass
            for other, name in (("a", "b"), ("b", "a")):
                assert await place.run(other, boxes[name], "echo $((6*7))") == "42\n"
            await asyncio.sleep(PACE_S)
        states = {each["name"]: each["state"] for each in (await place.http["a"].get("/v1/nodes")).json()["items"]}
        assert states == {"a": "running", "b": "running"}
        # An approval that is asked for on one server and decided on the other.
        rules = {"settings": {"permissions": {"allow": ["shell(true)"]}}}
        assert (await place.http["a"].put("/v1/contexts/of-a/policy", json=rules)).status_code == 200
        made = await place.http["a"].post("/v1/tokens", json={"name": "t", "kind": "agent", "scopes": ["operate"]})
        command = {"command": "touch asked"}
        async with place.fleet.http("b", made.json()["token"]) as agent:
            asked = (await agent.post(f"{boxes['a']}/commands", json=command)).json()
            assert asked["code"] == "approval_needed", asked
            approval = asked["approval"]
            decided = await place.http["b"].post(f"/v1/approvals/{approval}/decide", json={"approve": True})
            assert decided.status_code == 200, decided.text
            done = await agent.post(f"{boxes['a']}/commands", json=command, headers={"carrel-approval": approval})
            assert done.status_code == 200 and done.json()["exit_code"] == 0, done.text
        assert (await place.http["a"].delete("/v1/contexts/of-a/policy")).status_code < 300
        # From server to server and back, always with the newest files: a snapshot of the fast clock is not the newest.
        await place.run("a", boxes["a"], "echo first > file")
        for number, (name, other) in enumerate((("a", "b"), ("b", "a"), ("a", "b"))):
            await place.archived(name, boxes["a"])
            await place.run(name, boxes["a"], f"echo {number} >> file")
            assert (await place.http[name].post(f"{boxes['a']}/stop")).json()["state"] == "stopped"
            place.fleet.lose(name)
            found = await place.resumed(other, "of-a")
            assert (found["node"], found["notice"]) == (other, None)
            expected = "".join(f"{each}\n" for each in ("first", *range(number + 1)))
            assert await place.run(other, boxes["a"], "cat file") == expected
            await place.start(name, program=clocks[name])
        # A session that is ended on one and made anew on the other.
        assert (await place.http["b"].post(f"{boxes['b']}/terminate")).status_code == 200
        assert (await place.resumed("a", "of-b"))["state"] == "running"
        assert await place.run("b", boxes["b"], "echo anew") == "anew\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
async def test_two_servers_lose_each_other_and_keep_the_database(
    postgres: Postgres, tmp_path: Path, carrel_forks: None
) -> None:
    with TwoNetworks() as networks:
        async with serving(postgres) as place:

            def connect(name: str) -> httpx.AsyncClient:
                return networks.http(name, place.fleet.url(name), tmp_path)

            for name in ("a", "b"):
                await place.start(name, connect, host=ADDRESSES[name], within=networks.within(name))
            box = await place.begun("a", "parted")
            await place.run("b", box, "echo one >> file")
            slow = {"command": "echo slow >> file; sleep 600"}
            waiting = asyncio.ensure_future(place.http["b"].post(f"{box}/commands", json=slow))
            async with asyncio.timeout(30):
                while "slow" not in await place.run("a", box, "cat file"):
                    await asyncio.sleep(0.05)
            networks.cut()
            cut = time.monotonic()
            # The owner goes on. The other does not take the session, and tells its callers at once.
            while time.monotonic() - cut < 3 * LEASE_S:
                assert await place.run("a", box, "echo on") == "on\n"
                began = time.monotonic()
                for path, body in ((f"{box}/commands", {"command": "echo no >> file"}), DEPLOY):
                    answer = await place.http["b"].post(path, json=body)
                    assert (answer.status_code, answer.json()["code"]) == (503, "node_unreachable"), answer.text
                    assert answer.json()["retry"] is True
                assert time.monotonic() - began < 40
                await asyncio.sleep(PACE_S)
            answer = await waiting
            assert (answer.status_code, answer.json()["code"]) == (503, "node_unreachable"), answer.text
            assert "may have been done" in answer.json()["hint"]
            assert time.monotonic() - cut < 60
            networks.mend()
            assert await place.run("b", box, "cat file") == "one\nslow\n"
            assert (await place.resumed("b", "parted"))["node"] == "a"
