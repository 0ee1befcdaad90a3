"""Requests to the wrong server: three servers on one PostgreSQL and one archive."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import asyncpg
import httpx
import httpx2
import pytest
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client
from tests.support.fleet import TOKEN, Fleet, eventually
from tests.support.governed import POLICY
from tests.support.mcp_hosted import GOOD
from tests.support.postgres import Postgres
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from carrel.control.nodes.passes import Forwardable, Passes, digest_of, kept_headers
from carrel.secrets import Vault, decoded_key

ALL = ("a", "b", "c")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose folders may be workspaces."""
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def fleet(postgres: Postgres, carrel_forks: None, folders: Path) -> Iterator[Fleet]:
    schema = f"fleet_{secrets.token_hex(4)}"
    asyncio.run(postgres.execute(f"CREATE SCHEMA {schema}"))
    fleet = Fleet(postgres.url(search_path=schema), CARREL_SANDBOX_FOLDER_ROOTS=str(folders))
    for name in ALL:
        fleet.start(name)
        fleet.ready(name)  # one after the other: the first makes the tables
    yield fleet
    fleet.close()


@pytest.fixture
async def at(fleet: Fleet) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """A client of each server."""
    found = {name: fleet.http(name) for name in ALL}
    yield found
    for each in found.values():
        await each.aclose()


async def started(client: httpx.AsyncClient, context: str, **given: object) -> tuple[str, str]:
    """Start a context; return the server that has it, and its path."""
    answer = await eventually(client, "POST", "/v1/sandboxes", json={"context_id": context, "trust": "high", **given})
    assert answer.status_code in {200, 201}, answer.text
    return answer.json()["node"], f"/v1/sandboxes/{context}"


async def ended(client: httpx.AsyncClient, context: str) -> None:
    answer = await client.delete(f"/v1/contexts/{context}")
    assert answer.status_code == 204, answer.text


def socket(fleet: Fleet, name: str, path: str) -> AbstractAsyncContextManager[ClientConnection]:
    url = fleet.url(name).replace("http", "ws") + path
    return connect(url, additional_headers={"authorization": f"Bearer {TOKEN}"}, proxy=None)


async def until(connection: ClientConnection, wanted: bytes) -> None:
    seen = b""
    async with asyncio.timeout(30):
        while wanted not in seen:
            message = await connection.recv()
            assert isinstance(message, bytes), message
            seen += message


async def test_every_kind_of_request_through_the_wrong_server(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    owner, box = await started(at["a"], "every-kind")
    wrong, third = (name for name in ALL if name != owner)
    http = at[wrong]
    # JSON, with its request id, and its errors
    answer = await http.post(f"{box}/commands", json={"command": "echo hi"}, headers={"x-request-id": "mine-7"})
    assert (answer.status_code, answer.json()["stdout"]) == (200, "hi\n")
    assert answer.headers.get_list("x-request-id") == ["mine-7"]
    assert (await http.post(f"{box}/commands", json={"comand": "x"})).json()["code"] == "invalid_request"
    assert (await http.get(f"{box}/commands/none")).status_code == 404
    assert (await http.get("/v1/sandboxes/no-such-context")).status_code == 404
    assert (await http.patch(f"{box}/commands")).status_code in {404, 405}
    assert (await http.get(box)).json()["node"] == owner
    assert (await started(http, "every-kind"))[0] == owner, "it is found, not started again"
    # the caller's trace, and no header that only looks like one
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1"}
    answer = await http.post(f"{box}/commands", json={"command": "echo $TRACEPARENT $TRACESTATE"}, headers=trace)
    assert answer.json()["stdout"] == f"{trace['traceparent']} x=1\n"
    trace["traceparent"] += "-more"
    answer = await http.post(f"{box}/commands", json={"command": "echo ${TRACEPARENT-none}"}, headers=trace)
    assert answer.json()["stdout"] == "none\n"
    # streams
    answer = await http.post(f"{box}/commands/stream", json={"command": "echo one; echo two"})
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(each.get("text", "") for each in events) == "one\ntwo\n" and events[-1]["result"]["exit_code"] == 0
    command = answer.headers["carrel-command-id"]
    answer = await at[third].get(f"{box}/commands/{command}/output", headers={"accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.text.startswith("data: ")
    # files: small and large, with and without a length, and what is too large
    for content in (b"", b"small", secrets.token_bytes(3_000_000)):
        answer = await http.put(f"{box}/files/content?path=f", content=content)
        assert answer.status_code == 200, answer.text
        got = await at[third].get(f"{box}/files/content?path=f")
        assert got.content == content and got.headers["content-length"] == str(len(content))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"z" * 50_000

    assert (await http.put(f"{box}/files/content?path=p%20q", content=pieces())).status_code == 200
    assert (await http.get(f"{box}/files/stat", params={"path": "p q"})).json()["size"] == 2_000_000
    too_large = await http.post(f"{box}/commands", content=b'{"command":"' + b"x" * 3_000_000)
    assert too_large.status_code == 413, too_large.text
    assert (await http.request("DELETE", f"{box}/files", params={"path": "p q"})).status_code in {200, 204}
    # Python, code contexts, usage, snapshots, the context's policy and secrets
    assert (await http.post(f"{box}/python", json={"code": "print(6*7)"})).json()["stdout"] == "42\n"
    assert (await http.get(f"{box}/usage")).json()["bytes"] >= 3_000_000
    snapshot = (await http.post(f"{box}/snapshots")).json()["id"]
    tar = await at[third].get(f"{box}/snapshots/{snapshot}/tar")
    assert "./f" in tarfile.open(fileobj=io.BytesIO(tar.content)).getnames() or b"f\0" in tar.content
    assert (await http.put("/v1/contexts/every-kind/secrets/KEY", json={"value": "hushhush"})).status_code < 300
    assert (await http.put("/v1/filespaces/every-kind/content?path=n", content=b"note")).status_code == 200
    assert (await at[third].get("/v1/filespaces/every-kind/content?path=n")).content == b"note"
    policy = {"settings": POLICY}
    assert (await http.put("/v1/contexts/every-kind/policy", json=policy)).status_code == 200
    denied = await http.post(f"{box}/commands", json={"command": "curl x"})
    assert denied.json()["code"] == "denied_by_policy", "the owner knows of the policy at once"
    assert (await http.delete("/v1/contexts/every-kind/policy")).status_code < 300
    # stop, and start again: where the files are
    assert (await http.post(f"{box}/stop")).json()["state"] == "stopped"
    assert (await http.post(f"{box}/commands", json={"command": "true"})).json()["code"] == "not_running"
    assert (await started(at[third], "every-kind"))[0] == owner
    assert (await http.get(f"{box}/files/stat?path=f")).json()["size"] == 3_000_000
    counted = (await http.get("/metrics")).text
    assert 'carrel_forwarded_requests_total{outcome="answered"}' in counted
    await ended(http, "every-kind")


async def test_terminals_and_attached_commands(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    owner, box = await started(at["b"], "terminals")
    wrong = next(name for name in ALL if name != owner)
    async with socket(fleet, wrong, f"{box}/terminals?rows=30&cols=100&command=sh") as terminal:
        await terminal.send(b"stty size\n")
        await until(terminal, b"30 100")
        await terminal.send(json.dumps({"resize": {"rows": 40, "cols": 120}}))
        await terminal.send(b"stty size\n")
        await until(terminal, b"40 120")
        await terminal.send(b"exit 7\n")
        while isinstance(message := await terminal.recv(), bytes):
            pass
        assert json.loads(message)["exit"]["exit_code"] == 7
        await terminal.wait_closed()
        assert terminal.close_code == 1000
    async with socket(fleet, wrong, f"{box}/terminals?command=sleep%20999") as terminal:
        await terminal.close()
    async with asyncio.timeout(20):
        while any(each["running"] for each in (await at[wrong].get(f"{box}/commands")).json()["items"]):
            await asyncio.sleep(0.02)
    async with socket(fleet, wrong, f"{box}/commands/attached") as attached:
        await attached.send(json.dumps({"command": "cat", "interactive": True}))
        assert "started" in json.loads(await attached.recv())
        await attached.send(b"x" * 200_000)
        await attached.send(b"")
        size = 0
        while isinstance(message := await attached.recv(), bytes):
            size += len(message) - 1
        assert (size, json.loads(message)["exit"]["exit_code"]) == (200_000, 0)
    with pytest.raises(InvalidStatus) as refused:
        async with socket(fleet, wrong, f"{box}/terminals?rows=0"):
            pass
    assert refused.value.response.status_code == 400
    assert json.loads(refused.value.response.body or b"")["field"] == "rows"
    await ended(at[wrong], "terminals")


async def test_hosted_mcp_urls(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    owner, box = await started(at["c"], "mcp-hosted")
    wrong, third = (name for name in ALL if name != owner)
    await at[wrong].put(f"{box}/files/content?path=good.py", content=GOOD.encode())
    added = await at[wrong].put(f"{box}/mcp-servers/good", json={"command": ["python3", "good.py"]})
    assert added.status_code == 200 and added.json()["discovery_error"] is None, added.text
    steps: list[float] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(progress)

    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, timeout=30) as client:
        transport = streamable_http_client(f"{fleet.url(third)}{added.json()['url']}", http_client=client)
        async with McpClient(transport) as session:
            assert "echo" in [tool.name for tool in (await session.list_tools()).tools]
            assert (await session.call_tool("echo", {"text": "hi"})).structured_content == {"text": "hi"}
            await session.call_tool("step", {}, progress_callback=progress)
    assert steps == [1, 2, 3]
    await ended(at[wrong], "mcp-hosted")


async def test_any_server_streams_the_events_of_all(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    owner, box = await started(at["a"], "watched")
    wrong, third = (name for name in ALL if name != owner)

    async def ended_commands(name: str, count: int, **headers: str) -> list[tuple[int, str]]:
        """The ids of ends of commands, as they come."""
        found: list[tuple[int, str]] = []
        query = {"context_id": "watched", "kind": "command.ended", "after": "0"}
        async with (
            asyncio.timeout(30),
            at[name].stream("GET", "/v1/events", params=query, headers=headers) as stream,
        ):
            assert stream.status_code == 200
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    found.append((event["id"], event["node"]))
                if len(found) == count:
                    break
        return found

    following = asyncio.ensure_future(ended_commands(third, 4))
    for name in (owner, wrong, third, wrong):
        assert (await at[name].post(f"{box}/commands", json={"command": "true"})).status_code == 200
    found = await following
    ids = [number for number, _ in found]
    assert ids == sorted(set(ids)) and {node for _, node in found} == {owner}
    # What was seen on one server is not repeated by another.
    rest = await ended_commands(wrong, 2, **{"last-event-id": str(ids[1])})
    assert [number for number, _ in rest] == ids[2:]
    await ended(at["a"], "watched")


async def test_the_owner_applies_scopes_reach_and_approvals(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    owner, box = await started(at["a"], "team:governed")
    wrong, third = (name for name in ALL if name != owner)
    rules = {"permissions": {"allow": ["shell(echo:*)", "shell(sleep:*)"]}}
    put = await at[wrong].put("/v1/contexts/team:governed/policy", json={"settings": rules})
    assert put.status_code == 200, put.text

    async def token(**given: object) -> tuple[str, str]:
        made = (await at[third].post("/v1/tokens", json={"name": "t", "kind": "agent", **given})).json()
        return made["token"], made["id"]

    agent, agent_id = await token(scopes=["operate"], namespace="team")
    reader, _ = await token(scopes=["read"], namespace="team")
    stranger, _ = await token(scopes=["operate"], namespace="other")
    command = {"command": "touch made"}
    async with fleet.http(wrong, agent) as mine, fleet.http(wrong, reader) as reads, fleet.http(wrong, stranger) as no:
        for refused in (reads, no):
            assert (await refused.post(f"{box}/commands", json={"command": "echo"})).json()[
                "code"
            ] == "denied_by_policy"
        assert (await mine.post(f"{box}/commands", json={"command": "echo"})).status_code == 200
        asked = await mine.post(f"{box}/commands", json=command)
        approval = asked.json()["approval"]
        assert asked.json()["code"] == "approval_needed"
        assert (await at[third].get(f"/v1/approvals/{approval}")).json()["requested_by"] == "agent:t"
        waiting = asyncio.ensure_future(mine.post(f"{box}/commands", json=command, headers={"carrel-wait": "60"}))
        assert (await at[third].post(f"/v1/approvals/{approval}/decide", json={"approve": True})).status_code == 200
        assert (await waiting).status_code == 200, "it waited on the owner"
        again = await mine.post(f"{box}/commands", json=command, headers={"carrel-approval": approval})
        assert again.status_code == 409, "an approval is for one run, whichever server is asked"
        records = await at[third].get("/v1/audit", params={"context_id": "team:governed", "limit": 200})
        actors = {each["actor"] for each in records.json()["items"] if each["name"] == "run_command"}
        assert actors == {"agent:t"}, "the log has the caller, not the server that forwarded"
        # a stream ends when its token is revoked anywhere
        async with mine.stream("POST", f"{box}/commands/stream", json={"command": "echo on; sleep 60"}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await at[third].delete(f"/v1/tokens/{agent_id}")
            async with asyncio.timeout(30):
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in lines:
                        pass
    await ended(at["a"], "team:governed")


async def test_new_contexts_are_spread(at: dict[str, httpx.AsyncClient]) -> None:
    names = [f"spread-{number}" for number in range(6)]
    before = {each["name"]: each["sandboxes"] for each in (await at["a"].get("/v1/nodes")).json()["items"]}
    assert set(before.values()) == {0}, "the tests before ended theirs"
    where = [(await started(at["a"], name))[0] for name in names]
    assert sorted(where) == ["a", "a", "b", "b", "c", "c"]
    again = await asyncio.gather(*(started(at[ALL[number % 3]], name) for number, name in enumerate(names)))
    assert [node for node, _ in again] == where
    for name in names:
        await ended(at["b"], name)


async def test_a_folder_is_used_on_the_server_that_was_asked_for_it(
    at: dict[str, httpx.AsyncClient], folders: Path
) -> None:
    await started(at["b"], "busy")
    (folders / "work").mkdir()
    asked = {"context_id": "of-folder", "workspace_path": str(folders / "work")}
    for name in ("b", "c", "a"):  # the first has most to do, and the folder is there; then it has the session
        answer = await eventually(at[name], "POST", "/v1/sandboxes", json=asked)
        assert answer.status_code in {200, 201} and answer.json()["node"] == "b", answer.text
    for given in (asked, {"context_id": "of-folder"}):
        assert (await at["c"].post("/v1/sandboxes/of-folder/stop")).json()["state"] == "stopped"
        answer = await eventually(at["a"], "POST", "/v1/sandboxes", json=given)
        assert answer.status_code == 201 and answer.json()["node"] == "b", answer.text
        assert answer.json()["workspace_path"] == str(folders / "work")
    for context in ("of-folder", "busy"):
        await ended(at["a"], context)


async def test_many_at_once_for_one_context_on_all_servers(at: dict[str, httpx.AsyncClient]) -> None:
    body = {"context_id": "crowd"}
    answers = await asyncio.gather(
        *(eventually(at[ALL[number % 3]], "POST", "/v1/sandboxes", json=body) for number in range(12))
    )
    assert {each.status_code for each in answers} == {200, 201}, [each.text for each in answers]
    assert len({each.json()["id"] for each in answers}) == 1
    await ended(at["a"], "crowd")


async def test_forged_replayed_and_looping_requests(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    owner, box = await started(at["a"], "forged")
    wrong = next(name for name in ALL if name != owner)
    boots = await nodes_of(fleet)
    vault = Vault(decoded_key(fleet._environment["CARREL_SECRET_KEY"], "key"))
    body = b'{"command": "echo done >> runs"}'
    url = f"{box}/commands"
    headers = {"content-type": "application/json", "accept": "*/*"}
    sent = kept_headers([(name.encode(), value.encode()) for name, value in headers.items()])

    def passed(to: str, *, key: bytes = b"", **changed: object) -> dict[str, str]:
        given = {"method": "POST", "target": url.encode(), "headers": sent, "body": digest_of(body), **changed}
        made = Passes(key or vault.derived("forwarding"), "a", "x", time.time)
        value = made.make(Forwardable(**given), "administrator", to, boots[to])  # type: ignore[arg-type]
        return {**headers, "carrel-forwarded": value.decode()}

    async with httpx.AsyncClient(timeout=30) as bare:

        async def post(name: str, given: dict[str, str], path: str = url, content: bytes = body) -> httpx.Response:
            return await bare.post(fleet.url(name) + path, content=content, headers=given)

        good = passed(owner)
        assert (await post(owner, good)).status_code == 200
        for given, path, content in (
            (good, url, body),  # a replay
            ({**headers, "carrel-forwarded": "1;a;b"}, url, body),
            (passed(owner, key=b"z" * 32), url, body),
            (passed(wrong), url, body),
            (passed(owner), f"{box}/commands/start", body),
            (passed(owner), url, b'{"command": "echo evil >> runs"}'),
            ({**passed(owner), "carrel-approval": "apr-1"}, url, body),
            (passed(owner, method="PUT"), url, body),
        ):
            answer = await post(owner, given, path, content)
            assert (answer.status_code, answer.json()["field"]) == (401, "Carrel-Forwarded"), answer.text
        # A caller of another server cannot pass one through either.
        answer = await at[wrong].post(url, json={"command": "true"}, headers={"carrel-forwarded": "1;a;b"})
        assert answer.status_code == 401
        # A pass for a server that is not the owner: it does not forward again.
        answer = await post(wrong, passed(wrong))
        assert (answer.status_code, answer.json()["code"]) == (409, "runs_elsewhere")
        assert answer.headers["carrel-runs-elsewhere"] == owner
    assert (await at[owner].get(f"{box}/files/content?path=runs")).text == "done\n"
    await ended(at["a"], "forged")


async def nodes_of(fleet: Fleet) -> dict[str, str]:
    """The process of each server, as the database has it."""
    async with database(fleet) as connection:
        return {row["name"]: row["boot"] for row in await connection.fetch("SELECT name, boot FROM nodes")}


@asynccontextmanager
async def database(fleet: Fleet) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(fleet._environment["CARREL_DATABASE"])
    try:
        yield connection
    finally:
        await connection.close()


class Peer:
    """A server that says it is a node, and answers what a test wants."""

    def __init__(self) -> None:
        self.answer: bytes | None = b""
        self.asked = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            if self.answer is None:
                await reader.read()
            else:
                writer.write(self.answer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()


async def test_hostile_and_broken_servers_are_bounded(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    _, box = await started(at["a"], "hostile")
    await at["a"].post(f"{box}/stop")
    peer = Peer()
    url = await peer.open()
    async with database(fleet) as connection:
        await connection.execute(
            "INSERT INTO nodes SELECT 'evil', 'boot', $1, machine, key_id, version, providers, 0, 1000, started_at, "
            "seen_at + 100, 1000 FROM nodes WHERE name = 'a'",
            url,
        )
        await connection.execute(
            "UPDATE sessions SET node = 'evil', lease_owner = 'evil', lease_until = extract(epoch from now()) + 1000 "
            "WHERE context_id = 'hostile'"
        )
        try:
            for answer in (
                b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",
                b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
                b"SSH-2.0-x\r\n",
                b"HTTP/1.1 101 Switching\r\n\r\n",
                b"HTTP/1.1 401 No\r\ncontent-length: 2\r\n\r\n{}",
                b"",
            ):
                peer.answer = answer
                got = await at["b"].post(f"{box}/commands", json={"command": "true"})
                if b"401" in answer:
                    assert got.status_code == 401
                else:
                    assert (got.status_code, got.json()["code"]) == (503, "node_unreachable"), got.text
            for marker in (b"HTTP/1.1 409 C\r\ncarrel-runs-elsewhere: b\r\n", b"HTTP/1.1 401 No\r\n"):
                document = b'{"field":"Carrel-Forwarded"}'
                peer.asked, peer.answer = 0, marker + b"content-length: %d\r\n\r\n%s" % (len(document), document)
                got = await at["b"].post(f"{box}/commands", json={"command": "true"})
                assert (got.status_code, got.json()["code"]) == (503, "node_unreachable"), got.text
                assert 1 <= peer.asked <= 4, "it is not asked for ever"
            # a body that breaks off is not a complete answer
            peer.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort"
            with pytest.raises(httpx.RemoteProtocolError):
                await at["b"].get(f"{box}/files/content?path=x")
            # one that never answers: the caller can go, and nothing stays
            peer.answer = None
            with pytest.raises(httpx.ReadTimeout):
                await at["b"].post(f"{box}/commands", json={"command": "true"}, timeout=0.5)
        finally:
            await connection.execute("UPDATE sessions SET node = 'a', lease_owner = NULL WHERE context_id = 'hostile'")
            await connection.execute("DELETE FROM nodes WHERE name = 'evil'")
            await peer.close()
    await asyncio.sleep(0)
    answer = await eventually(at["b"], "POST", "/v1/sandboxes", json={"context_id": "hostile", "trust": "high"})
    assert answer.status_code in {200, 201}, answer.text
    await ended(at["a"], "hostile")


async def test_a_server_with_another_secret_is_not_sent_anything(
    fleet: Fleet, at: dict[str, httpx.AsyncClient]
) -> None:
    fleet.start("other", CARREL_SECRET_KEY=base64.b64encode(b"o" * 32).decode())
    try:
        fleet.ready("other")
        async with fleet.http("other") as other:
            answer = await other.post("/v1/sandboxes", json={"context_id": "foreign"})
            assert answer.json()["node"] == "other", "it can place sandboxes only on itself"
            async with asyncio.timeout(30):
                while True:  # on a busy machine the server may not have answered the one that asks yet
                    refused = await at["a"].post("/v1/sandboxes/foreign/commands", json={"command": "true"})
                    assert (refused.status_code, refused.json()["code"]) == (503, "node_unreachable")
                    if not refused.json()["retry"]:
                        break
            assert "CARREL_SECRET_KEY" in refused.json()["detail"] and refused.json()["retry"] is False
            found = {each["name"]: each for each in (await at["a"].get("/v1/nodes")).json()["items"]}
            assert found["other"]["state"] == "unreachable" and "CARREL_SECRET_KEY" in found["other"]["notice"]
            assert (found["a"]["state"], found["a"]["here"], found["b"]["here"]) == ("running", True, False)
            await ended(other, "foreign")
    finally:
        fleet.stop("other")
    names = [each["name"] for each in (await at["a"].get("/v1/nodes")).json()["items"]]
    assert names == ["a", "b", "c"], "a server that ends signs off"


async def test_the_owner_is_killed_in_the_middle(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    fleet.start("k", CARREL_LEASE_S="5")
    fleet.ready("k")
    async with fleet.http("k") as http:
        # Its sandboxes are its own because this one is asked, and all have none.
        owner, box = await started(http, "killed")
        assert owner == "k"
        await http.put(f"{box}/files/content?path=kept", content=b"archived")
        await http.post(f"{box}/snapshots")
        async with asyncio.timeout(60):
            while not (await at["a"].get(f"{box}/snapshots")).json()["items"][0]["archived"]:
                await asyncio.sleep(0.05)
    wrong = at["b"]
    async with (
        socket(fleet, "c", f"{box}/terminals?command=sh") as terminal,
        wrong.stream("POST", f"{box}/commands/stream", json={"command": "echo on; sleep 60"}) as stream,
    ):
        lines = stream.aiter_lines()
        assert "on" in await anext(lines)
        waiting = asyncio.ensure_future(wrong.post(f"{box}/commands", json={"command": "sleep 60"}))
        async with asyncio.timeout(30):
            while sum(each["running"] for each in (await wrong.get(f"{box}/commands")).json()["items"]) < 3:
                await asyncio.sleep(0.05)
        fleet.kill("k")
        answer = await waiting
        assert (answer.status_code, answer.json()["code"]) == (503, "node_unreachable"), answer.text
        assert answer.json()["node"] == "k" and "may have been done" in answer.json()["hint"]
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in lines:
                pass
        with pytest.raises(ConnectionClosed) as closed:
            while isinstance(message := await terminal.recv(), bytes):
                pass
            assert json.loads(message)["error"]["code"] == "node_unreachable"
            await terminal.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
    # While its lease runs nobody else may act; the record can be read, and the answer says how long to wait.
    answer = await wrong.post(f"{box}/commands", json={"command": "true"})
    assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 6, answer.text
    assert (await wrong.get(box)).json()["node"] == "k"
    found = {each["name"]: each["state"] for each in (await wrong.get("/v1/nodes")).json()["items"]}
    assert found["k"] == "gone" and found["a"] == "running"
    # Then the next start takes it over, on whichever server, with a new fence.
    answer = await eventually(at["a"], "POST", "/v1/sandboxes", json={"context_id": "killed", "trust": "high"})
    assert answer.status_code == 201 and answer.json()["node"] in ALL, answer.text
    assert (await wrong.get(f"{box}/files/content?path=kept")).content == b"archived"
    # The killed server comes back: it ends its own sandbox, and leaves the session alone.
    fleet.start("k")
    fleet.ready("k")
    async with fleet.http("k") as http:
        assert (await http.get(f"{box}/files/content?path=kept")).content == b"archived"
    fleet.stop("k")
    assert (await wrong.post(f"{box}/commands", json={"command": "true"})).status_code == 200
    await ended(wrong, "killed")


async def test_a_command_for_a_server_that_is_gone_says_how_to_go_on(
    fleet: Fleet, at: dict[str, httpx.AsyncClient]
) -> None:
    async with database(fleet) as connection:
        _, box = await started(at["a"], "orphan")
        await at["a"].post(f"{box}/stop")
        await connection.execute(
            "UPDATE sessions SET state = 'running', node = 'gone', lease_owner = 'gone', lease_until = 1 "
            "WHERE context_id = 'orphan'"
        )
    answer = await at["b"].post(f"{box}/commands", json={"command": "true"})
    assert (answer.status_code, answer.json()["code"]) == (409, "not_running")
    assert "deploy_or_resume" in answer.json()["hint"]
    assert (await started(at["b"], "orphan"))[0] in ALL
    assert (await at["c"].post(f"{box}/commands", json={"command": "true"})).status_code == 200
    await ended(at["a"], "orphan")
