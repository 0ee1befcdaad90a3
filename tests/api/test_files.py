from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.refusals import Contract, refused

from carrel.server import RunningServer

Sent = dict[str, Any]


async def test_files(http: httpx.AsyncClient, box: str) -> None:
    data = bytes(range(256)) * 20_000
    put = await http.put(f"{box}/files/content", params={"path": "deep/er/x", "mode": "640"}, content=data)
    assert put.json()["size"] == len(data) and put.json()["mode"] == "640"
    got = await http.get(f"{box}/files/content", params={"path": "deep/er/x"})
    assert got.content == data and got.headers["content-length"] == str(len(data))
    part = await http.get(f"{box}/files/content", params={"path": "deep/er/x", "offset": 254, "length": 4})
    assert part.content == b"\xfe\xff\x00\x01"
    again = await http.put(f"{box}/files/content", params={"path": "deep/er/x", "exclusive": "true"}, content=b"")
    assert (again.status_code, again.json()["code"]) == (409, "already_exists")
    await http.put(f"{box}/files/content", params={"path": "t"}, content=b"one one")
    edit = await http.post(f"{box}/files/edit", json={"path": "t", "old": "one", "new": "two"})
    assert (edit.status_code, edit.json()["code"]) == (409, "edit_mismatch")
    edit = await http.post(f"{box}/files/edit", json={"path": "t", "old": "one", "new": "two", "replace_all": True})
    assert edit.json()["replaced"] == 2
    assert (await http.get(f"{box}/files/content", params={"path": "t"})).text == "two two"
    assert (await http.post(f"{box}/files/mkdir", json={"path": "new/dir"})).json()["kind"] == "directory"
    moved = await http.post(f"{box}/files/move", json={"source": "t", "destination": "new/t"})
    assert moved.json()["path"] == "new/t"
    listed = await http.get(f"{box}/files", params={"path": "new", "recursive": "true"})
    assert {each["path"] for each in listed.json()["items"]} == {"new/dir", "new/t"}
    assert (await http.get(f"{box}/files", params={"path": "new", "limit": 1})).json()["truncated"] is True
    full = await http.delete(f"{box}/files", params={"path": "new"})
    assert full.status_code == 409 and full.json()["hint"]
    assert (await http.delete(f"{box}/files", params={"path": "new", "recursive": "true"})).status_code == 204
    assert (await http.get(f"{box}/files/stat", params={"path": "new"})).status_code == 404


async def test_names_that_are_not_utf8(http: httpx.AsyncClient, box: str) -> None:
    await http.put(f"{box}/files/content?path=data/%FF", content=b"x")
    assert [each["path"] for each in (await http.get(f"{box}/files?path=data")).json()["items"]] == ["data/\udcff"]
    assert (await http.get(f"{box}/files/content?path=data/%FF")).content == b"x"


async def test_uploads_may_be_larger_than_any_other_body(http: httpx.AsyncClient, box: str) -> None:
    async def long() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    upload = await http.put(f"{box}/files/content", params={"path": "big"}, content=long())
    assert upload.json()["size"] == 40 * 65536


async def test_who_leaves_in_the_middle_of_an_upload_is_no_failure_of_carrel(
    http: httpx.AsyncClient, server: RunningServer, box: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was written down as unexpected, with a traceback in the server's log."""
    where = urlsplit(server.url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"PUT {box}/files/content?path=part HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: 1000\r\n"
    writer.write(f"{head}authorization: Bearer {server.token}\r\n\r\nsome".encode())
    await writer.drain()
    found: list[Sent] = []
    asked = {"kind": "file", "name": "write"}
    while not found:
        found = (await http.get("/v1/audit", params=asked)).json()["items"]
    writer.close()
    await writer.wait_closed()
    while found[0]["result"] is None:
        found = (await http.get("/v1/audit", params=asked)).json()["items"]
    assert found[0]["result"] == "invalid_request"
    assert (await http.get(f"{box}/files/stat", params={"path": "part"})).status_code == 404
    assert "Traceback" not in caplog.text


BAD: list[tuple[str, str, Sent, int, str]] = [
    ("GET", "/content", {}, 400, "path"),
    ("GET", "/content", {"params": {"path": ""}}, 400, "path"),
    ("GET", "/content", {"params": {"path": "../../etc/passwd"}}, 400, "path"),
    ("GET", "/content", {"params": {"path": "/etc/passwd"}}, 400, "path"),
    ("GET", "/content", {"params": {"path": "a\0b"}}, 400, "path"),
    ("GET", "/content", {"params": {"path": "x", "offset": "-1"}}, 400, "offset"),
    ("GET", "/content", {"params": {"path": "absent"}}, 404, "path"),
    ("GET", "/stat", {"params": {"path": "absent"}}, 404, "path"),
    ("GET", "", {"params": {"path": "absent"}}, 404, "path"),
    ("GET", "", {"params": {"recurisve": "1"}}, 400, "recurisve"),
    ("GET", "", {"params": {"limit": "0"}}, 400, "limit"),
    ("DELETE", "", {"params": {"path": "absent"}}, 404, "path"),
    ("DELETE", "", {"params": {"path": ".", "recursive": "1"}}, 400, "path"),
    ("PUT", "/content", {"params": {"path": "x", "mode": "999"}}, 400, "mode"),
    ("PUT", "/content", {"params": {"path": "../x"}, "content": b"x"}, 400, "path"),
    ("PUT", "/content", {"params": {"path": "absent/x", "parents": "0"}, "content": b"x"}, 404, "path"),
    ("POST", "/edit", {"json": {"path": "x", "old": "", "new": ""}}, 400, "old"),
    ("POST", "/edit", {"json": {"path": "absent", "old": "a", "new": ""}}, 404, "path"),
    ("POST", "/move", {"json": {"source": "x"}}, 400, "destination"),
    ("POST", "/move", {"json": {"source": "absent", "destination": "y"}}, 404, "source"),
    ("POST", "/mkdir", {"json": {"path": "/etc/x"}}, 400, "path"),
    ("PATCH", "", {}, 405, "method"),
]


async def test_bad_requests(http: httpx.AsyncClient, box: str) -> None:
    before = (await http.get(f"{box}/files")).json()
    wrong = []
    for method, path, sent, status, field in BAD:
        answer = await http.request(method, f"{box}/files{path}", **sent)
        try:
            refused(answer, status, field)
        except (AssertionError, KeyError) as error:
            wrong.append(f"{method} {path} {sent}: {answer.text} {error!r:.50}")
    assert not wrong, "\n".join(wrong)
    assert (await http.get(f"{box}/files")).json() == before


async def test_documented_limits_of_a_listing_are_accepted(
    http: httpx.AsyncClient, contract: Contract, box: str
) -> None:
    parameters = contract.document["paths"]["/v1/sandboxes/{id}/files"]["get"]["parameters"]
    [schema] = [each["schema"] for each in parameters if each["name"] == "limit"]
    for limit, status in ((schema["minimum"], 200), (schema["maximum"], 200), (schema["maximum"] + 1, 400)):
        assert (await http.get(f"{box}/files", params={"limit": limit})).status_code == status
