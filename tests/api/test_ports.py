"""Requests to servers in a sandbox, some of them hostile, as visitors send them: by path, by host, with and without access."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support import port_server
from tests.support.ports import nobody
from tests.support.refusals import refused
from tests.support.worker_servers import server_with_workers
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from carrel import AsyncClient, AsyncSandbox
from carrel.config import Settings, load
from carrel.errors import Denied, NotRunning, PortNotOpen
from carrel.server import RunningServer, running

DOMAIN = "preview.localhost"
PROGRAM = Path(port_server.__file__).read_bytes()


@pytest.fixture
def settings() -> Iterator[Settings]:
    path = tempfile.mkdtemp(prefix="carrel-t-")
    flags = {
        "data_dir": path, "port": 0, "volumes": "directory",
        "ports.domain": f"http://{DOMAIN}", "ports.allow_public": True,
    }  # fmt: skip
    yield load(flags, environ={})
    shutil.rmtree(path)


async def started(client: AsyncClient, context: str = "served") -> AsyncSandbox:
    """A sandbox in which the server listens."""
    box = await client.sandbox(context)
    await box.files.write("server.py", PROGRAM)
    await box.commands.start("exec python3 server.py")
    await box.ports.wait(9013)
    return box


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, server.token) as client:
        yield client


@pytest.fixture
async def anyone(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    """A visitor without a token."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as visitor:
        yield visitor


def facts(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def sent_headers(answer: httpx.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in facts(answer)["headers"]}


async def test_by_path(
    server: RunningServer, client: AsyncClient, anyone: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    box = await started(client)
    assert {8000, 9001} <= {each.port for each in await box.ports.list()}
    base = f"/v1/sandboxes/{box.id}/ports/8000"
    for headers in ({}, {"authorization": "Bearer nonsense"}, {"cookie": "carrel-port=x"}, {"carrel-access": "x"}):
        assert (await anyone.get(f"{base}/", headers=headers)).status_code == 401
    assert (await anyone.get(f"{base}/~cp1.{box.id}.8000.99999999999..0.{'A' * 43}/")).status_code == 401
    owner = {"authorization": f"Bearer {server.token}"}
    answer = await anyone.get(
        f"{base}/a%2Fb/../c?x=%20&y", headers={**owner, "cookie": "a=b", "x-mine": "1", "carrel-wait": "0"}
    )
    assert facts(answer)["target"].endswith("c?x=%20&y")
    assert "sandbox" in answer.headers["content-security-policy"] and "set-cookie" not in answer.headers
    seen = sent_headers(answer)
    assert seen["host"] == "localhost:8000" and seen["x-forwarded-prefix"] == base and seen["x-mine"] == "1"
    assert not {"authorization", "cookie", "carrel-wait", "carrel-access"} & set(seen)
    assert (await anyone.get(f"{base}/", headers={**owner, "service-worker": "script"})).status_code == 403

    url = await box.ports.share(8000)
    assert url.access is not None and url.expires_at is not None
    data = bytes(range(256)) * 8192
    for content in (data, _pieces(data)):
        got = facts(await anyone.put(f"{url.path}upload", content=content))
        assert (got["method"], got["size"], got["sha256"]) == ("PUT", len(data), hashlib.sha256(data).hexdigest())
    head = await anyone.head(url.path)
    assert head.status_code == 200 and head.content == b"" and int(head.headers["content-length"]) > 0
    moved = await anyone.get(f"{url.path}redirect")
    assert moved.headers["location"] == f"{url.path}there", "it stays below the URL"
    other = url.path.replace("/8000/", "/9001/")
    assert (await anyone.get(other)).status_code == 401, "the access is for one port"
    assert (await anyone.get("/v1/sandboxes", headers={"carrel-access": url.access})).status_code == 401
    problem = refused(await anyone.get(f"{base.replace('8000', '8001')}/", headers=owner), 502, None, "port_not_open")
    assert problem["port"] == 8001
    page = await anyone.get(f"{base.replace('8000', '8001')}/", headers={**owner, "accept": "text/html"})
    assert page.status_code == 502 and page.text.startswith("<!doctype html>") and "8001" in page.text

    # the proxy of the sandbox has a port too
    reserved = await anyone.get(f"{base.replace('8000', '3128')}/", headers=owner)
    assert refused(reserved, 502, None, "port_not_open")["detail"].endswith("carrel's own in the sandbox")
    assert 3128 not in {each.port for each in await box.ports.list()}

    # every one of them was recorded
    found = (await http.get("/v1/audit", params={"context_id": "served", "limit": 200})).json()["items"]
    visits = [each for each in found if each["name"] in {"reach_port", "visit_port"}]
    assert {each["arguments"]["port"] for each in visits} == {8000, 8001, 3128}


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


async def test_by_host(
    server: RunningServer, client: AsyncClient, anyone: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    box = await started(client)
    url = await box.ports.share(8000)
    host, access = url.host, str(url.access)
    assert host == f"8000-{box.id}.{DOMAIN}" and url.url == f"http://{host}/?carrel-access={access}"

    async def ask(path: str = "/", method: str = "GET", **headers: str) -> httpx.Response:
        given = {"host": str(host), **{name.replace("_", "-"): value for name, value in headers.items()}}
        anyone.cookies.clear()
        return await anyone.request(method, path, headers=given)

    assert (await ask()).status_code == 401
    page = await ask(accept="text/html")
    assert page.status_code == 401 and "private" in page.text and "www-authenticate" not in page.headers
    answer = await ask(f"/x?a=1&carrel-access={access}&b", accept="*/*")
    assert facts(answer)["target"] == "/x?a=1&b", "the access does not go in"
    assert answer.headers.get_list("set-cookie") == ["mine=1"], "neither for other hosts nor carrel's own"
    moved = await ask(f"{server.url}//evil.example/?carrel-access={access}", accept="text/html")
    assert (moved.status_code, moved.headers["location"]) == (303, "/evil.example/")
    cookie = moved.headers["set-cookie"].partition(";")[0]
    assert "HttpOnly" in moved.headers["set-cookie"] and "SameSite=Lax" in moved.headers["set-cookie"]
    seen = sent_headers(await ask(cookie=f"own=1; {cookie}", authorization="Basic eA==", origin=f"http://{host}"))
    assert seen["cookie"] == "own=1" and seen["authorization"] == "Basic eA==" and seen["host"] == host
    # Another sandbox has the same site: a page of it must not act with the visitor's cookie.
    assert (await ask(cookie=cookie, origin=f"http://8000-sbx-0.{DOMAIN}")).status_code == 401
    assert (await ask(cookie=cookie, sec_fetch_site="same-site", sec_fetch_mode="no-cors")).status_code == 401
    assert (await ask(cookie=cookie, sec_fetch_site="same-site", sec_fetch_mode="navigate")).status_code == 200
    assert (await ask(carrel_access=access)).status_code == 200
    assert (await ask(carrel_access=str(server.token))).status_code == 200
    assert (await ask(f"/?carrel-access={server.token}")).status_code == 401, "a token does not belong into a URL"

    # no other route of the API is reached by such a host
    answer = await ask("/v1/sandboxes", authorization=f"Bearer {server.token}")
    assert facts(answer)["target"] == "/v1/sandboxes" and "authorization" not in sent_headers(answer)
    for wrong in (f"x.{DOMAIN}", f"0-{box.id}.{DOMAIN}", f"8000-{box.id}.x.{DOMAIN}", f"99999-{box.id}.{DOMAIN}"):
        assert (await anyone.get("/healthz", headers={"host": wrong})).status_code == 400
    assert (await anyone.get("/", headers={"host": f"8000-absent.{DOMAIN}"})).status_code == 401

    # public by choice, and private again
    made = await box.ports.share(8000, public=True)
    assert made.access is None and made.url == f"http://{host}/"
    assert (await ask()).status_code == 200
    await box.ports.close(8000)
    async with asyncio.timeout(10):
        while (await ask()).status_code != 401:
            await asyncio.sleep(0.05)

    # a URL ends with the token that made it
    token = (await http.post("/v1/tokens", json={"name": "a", "kind": "agent", "scopes": ["operate"]})).json()
    async with AsyncClient(server.url, token["token"]) as agent:
        theirs = await agent.attach(await box.info()).ports.share(8000)
    assert (await ask(carrel_access=str(theirs.access))).status_code == 200
    await http.delete(f"/v1/tokens/{token['id']}")
    assert (await ask(carrel_access=str(theirs.access))).status_code == 401


async def test_hostile_servers(client: AsyncClient, http: httpx.AsyncClient, server: RunningServer) -> None:
    box = await started(client)
    base = f"{server.url}/v1/sandboxes/{box.id}/ports"
    headers = {"authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as visitor:
        for port in (9001, 9002, 9003, 9005, 9006, 9007, 9008, 9011):
            refused(await visitor.get(f"{base}/{port}/"), 502, None, "port_not_open")
        for port in (9004, 9010):
            with pytest.raises(httpx.RemoteProtocolError):
                await visitor.get(f"{base}/{port}/")
        answer = await visitor.get(f"{base}/9009/")
        assert answer.content == b"hi"
        answer = await visitor.get(f"{base}/9012/")
        assert answer.status_code == 409 and "carrel-runs-elsewhere" not in answer.headers
        # The sandbox is as good as before, and nothing of one request is left for the next.
        answers = await asyncio.gather(*(visitor.get(f"{base}/8000/{number}") for number in range(200)))
        assert [facts(answer)["target"] for answer in answers] == [f"/{number}" for number in range(200)]
        for method in ("TRACE", "PROPFIND"):
            assert (await visitor.request(method, f"{base}/8000/")).status_code == 400
        for port in ("0", "65536", "x"):
            assert (await visitor.get(f"{base}/{port}/")).status_code == 404
    answer = await http.post(f"/v1/sandboxes/{box.id}/ports", json={"port": 70_000})
    refused(answer, 400, "port")


async def test_sockets_and_tunnels(client: AsyncClient, server: RunningServer) -> None:
    box = await started(client)
    url = await box.ports.share(8000)
    path = server.url.replace("http", "ws") + url.path
    with pytest.raises(InvalidStatus) as nobody:
        await connect(path.replace(str(url.access), "x"), proxy=None)
    assert nobody.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as closed:
        await connect(f"{path}refused", proxy=None)
    assert closed.value.response.status_code == 403 and closed.value.response.body == b"no"
    async with connect(f"{path}chat?room=1", proxy=None, subprotocols=["one", "two"]) as socket:  # type: ignore[list-item]
        told = json.loads(await socket.recv())
        assert told["target"] == "/chat?room=1" and socket.subprotocol == "one"
        assert "authorization" not in told["headers"]
        for message in ("text", b"bytes", "x" * 60_000):
            await socket.send(message)
            assert await socket.recv() == message
        await socket.send("close")
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (4321, "because")
    async with connect(f"{path}huge", proxy=None) as socket:
        with pytest.raises(ConnectionClosed):
            await socket.recv()

    async with await box.ports.connect(7000) as tunnel:
        sent = bytes(range(256)) * 4096
        sending = asyncio.ensure_future(tunnel.send(sent))
        got = b""
        while len(got) < len(sent):
            got += await tunnel.recv()
        await sending
        assert got == sent
        await tunnel.end()
        assert await tunnel.recv() == b"bye" and await tunnel.recv() == b"", "its other direction went on"
    with pytest.raises(PortNotOpen):
        await box.ports.connect(7001)
    with pytest.raises(PortNotOpen):
        await box.ports.wait(7001, 0.1)


async def test_policy_decides(client: AsyncClient, http: httpx.AsyncClient, anyone: httpx.AsyncClient) -> None:
    settings = {"permissions": {"allow": ["shell(exec python3:*)", "shell(python3:*)", "file(write:${WORKSPACE}/**)",
                                          "network(inbound:8000)"], "deny": ["network(inbound:9001)"]}}  # fmt: skip
    assert (await http.put("/v1/contexts/served/policy", json={"settings": settings})).status_code == 200
    box = await started(client)
    url = await box.ports.share(8000)
    assert (await anyone.get(url.path)).status_code == 200
    with pytest.raises(Denied) as denied:
        await box.ports.share(9001)
    assert denied.value.rule == "network(inbound:9001)"
    owner = {"authorization": http.headers["authorization"]}
    for port, code in ((9001, "denied_by_policy"), (9004, "approval_needed")):
        answer = await anyone.get(f"/v1/sandboxes/{box.id}/ports/{port}/", headers=owner)
        assert (answer.status_code, answer.json()["code"]) == (403, code)
    # What was shared is denied once a rule says so.
    settings["permissions"]["deny"].append("network(inbound:8000)")
    assert (await http.put("/v1/contexts/served/policy", json={"settings": settings})).status_code == 200
    assert (await anyone.get(url.path)).status_code == 403


async def test_a_stopped_sandbox(client: AsyncClient, anyone: httpx.AsyncClient) -> None:
    box = await started(client)
    url, waking = await box.ports.share(8000), await box.ports.share(8000, wake=True)
    assert (await anyone.get(url.path)).status_code == 200
    await box.stop()
    answer = await anyone.get(url.path)
    refused(answer, 409, "id", "not_running")
    with pytest.raises(NotRunning):
        await box.ports.list()
    answer = await anyone.get(waking.path)
    refused(answer, 502, None, "port_not_open")  # it runs again; its server does not
    await box.commands.start("exec python3 server.py")
    await box.ports.wait(8000)
    assert (await anyone.get(url.path)).status_code == 200, "the same URL"


async def test_a_restart_and_tls(settings: Settings, tmp_path: Path) -> None:
    """The URL of before leads to the same port of the same sandbox, also with carrel's own TLS."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=carrel",
    ]
    command += ["-addext", f"subjectAltName=DNS:*.{DOMAIN}", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    certificate, key = (str(tmp_path / name) for name in ("certificate.pem", "key.pem"))
    with nobody() as free:
        pass
    given = {"listen": f"127.0.0.1:{free}", "certificate_file": certificate, "key_file": key}
    domain = {"domain": f"https://{DOMAIN}:{free}"}
    secure = settings.model_copy(update={"ports": settings.ports.model_copy(update={**given, **domain})})
    async with running(secure) as server, AsyncClient(server.url, server.token) as client:
        url = str(await (await started(client)).ports.url(8000))
    assert url.startswith("https://8000-sbx-")
    trusting = ssl.create_default_context(cafile=certificate)
    async with running(secure) as server, AsyncClient(server.url, server.token) as client:
        await started(client)
        host = url.partition("//")[2].partition("/")[0]
        near = url.replace(host, f"127.0.0.1:{free}")
        async with httpx.AsyncClient(verify=trusting) as visitor:
            told = {"sni_hostname": host.partition(":")[0]}
            answer = await visitor.get(near, headers={"host": host}, extensions=told)
            assert sent_headers(answer)["x-forwarded-proto"] == "https"
            page = await visitor.get(near, headers={"host": host, "accept": "text/html"}, extensions=told)
        assert page.headers["set-cookie"].startswith("__Host-carrel-port=") and "Secure" in page.headers["set-cookie"]


async def test_any_worker_answers(settings: Settings) -> None:
    """Requests are forwarded to the worker that has the sandbox: with their bodies, in both directions, any method."""
    with server_with_workers(settings, 2) as several:
        async with AsyncClient(several.url, several.token) as client:
            box = await started(client)
            url = await box.ports.share(8000)
            data = b"x" * 3_000_000
            for index in range(2):
                async with several.worker(index) as worker:
                    del worker.headers["authorization"]
                    got = facts(await worker.put(f"{url.path}a%2Fb?c", content=_pieces(data)))
                    assert (got["target"], got["size"]) == ("/a%2Fb?c", len(data))
                    assert (await worker.head(url.path)).status_code == 200
                    assert (await worker.options(url.path)).status_code == 200
                    given = {"host": str(url.host), "carrel-access": str(url.access), "origin": f"http://{url.host}"}
                    seen = sent_headers(await worker.get("/by-host", headers={**given, "cookie": "own=1"}))
                    assert (seen["host"], seen["cookie"], seen["origin"]) == (url.host, "own=1", f"http://{url.host}")
                    answer = await worker.get(url.path.replace("8000", "9013"))
                    assert answer.status_code == 401
                    token = {"authorization": f"Bearer {several.token}"}
                    answer = await worker.get(f"/v1/sandboxes/{box.id}/ports/9013/", headers=token)
                    assert (answer.status_code, answer.json()) == (401, {"field": "Carrel-Forwarded"})
                    forged = {"carrel-port-visit": '[true,"x","https","","public",null,true]'}
                    assert (await worker.get(f"/v1/sandboxes/{box.id}/ports/8000/", headers=forged)).status_code == 401
            for _ in range(4):  # the listener is shared, so these reach both
                async with connect(several.url.replace("http", "ws") + url.path, proxy=None) as socket:
                    assert json.loads(await socket.recv())["target"] == "/"
                    await socket.send("hello")
                    assert await socket.recv() == "hello"
