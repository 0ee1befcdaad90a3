from __future__ import annotations

import os

import httpx
from tests.support.refusals import refused


async def test_files_beside_and_inside(http: httpx.AsyncClient) -> None:
    at = "/v1/filespaces/fs/content"
    big = os.urandom(3 << 20)  # larger than a request body may be
    made = await http.put(at, params={"path": "data/in.bin", "mode": "600"}, content=big)
    assert made.status_code == 200
    assert (made.json()["path"], made.json()["size"], made.json()["mode"]) == ("data/in.bin", len(big), "600")
    odd = await http.put(f"{at}?path=not%FFutf8", content=b"odd")
    assert odd.json()["path"] == "not\udcffutf8"
    assert (await http.get(f"{at}?path=not%FFutf8")).content == b"odd"
    await http.post("/v1/sandboxes", json={"context_id": "fs"})
    await http.put("/v1/sandboxes/fs/files/content", params={"path": "out"}, content=b"made inside")
    done = (await http.post("/v1/sandboxes/fs/sync", json={})).json()
    assert (done["direction"], done["pushed"], done["pulled"], done["conflicts"]) == ("both", 1, 2, [])
    assert (await http.get("/v1/sandboxes/fs/files/content", params={"path": "data/in.bin"})).content == big
    out = await http.get(at, params={"path": "out"})
    assert out.content == b"made inside" and out.headers["content-length"] == "11"
    page = (await http.get("/v1/filespaces/fs/files", params={"limit": 2})).json()
    assert [each["path"] for each in page["items"]] == ["data/in.bin", "not\udcffutf8"]
    rest = (await http.get("/v1/filespaces/fs/files", params={"cursor": page["next"]})).json()
    assert [each["path"] for each in rest["items"]] == ["out"] and rest["next"] is None
    some = (await http.get("/v1/filespaces/fs/files", params={"prefix": "data/"})).json()
    assert [each["path"] for each in some["items"]] == ["data/in.bin"]
    assert (await http.delete(at, params={"path": "out"})).status_code == 204
    pulled = (await http.post("/v1/sandboxes/fs/sync", json={"direction": "pull"})).json()
    assert pulled["pull_deleted"] == 1
    refused(await http.get("/v1/sandboxes/fs/files/content", params={"path": "out"}), 404, "path", "file_not_found")
    assert (await http.get("/v1/filespaces/nobody/files")).json() == {"items": [], "next": None}


async def test_bad_requests(http: httpx.AsyncClient) -> None:
    at = "/v1/filespaces/bad/content"
    refused(await http.get(at, params={"path": "absent"}), 404, "path", "file_not_found")
    refused(await http.delete(at, params={"path": "absent"}), 404, "path", "file_not_found")
    refused(await http.get(at), 400, "path")
    for path in ("/etc/passwd", "a/../b", "a/.venv/x"):
        refused(await http.put(at, params={"path": path}, content=b"x"), 400, "path", "invalid_path")
    refused(await http.put(at, params={"path": "f", "mode": "999"}, content=b"x"), 400, "mode")
    refused(await http.get("/v1/filespaces/-bad/files"), 400, "context_id")
    refused(await http.get("/v1/filespaces/bad/files", params={"cursor": "?"}), 400, "cursor")
    refused(await http.get("/v1/filespaces/bad/files", params={"limt": 1}), 400, "limt")
    refused(await http.post("/v1/sandboxes/absent/sync", json={}), 404, "id")
    await http.post("/v1/sandboxes", json={"context_id": "bad", "limits": {"disk_mb": 1}})
    refused(await http.post("/v1/sandboxes/bad/sync", json={"direction": "up"}), 400, "direction")
    refused(await http.put(at, params={"path": "f"}, content=bytes(2 << 20)), 429, "disk_mb", "limit_exceeded")
    ephemeral = (await http.post("/v1/sandboxes", json={})).json()["id"]
    refused(await http.post(f"/v1/sandboxes/{ephemeral}/sync", json={}), 409, "id", "conflict")


async def test_write_without_a_body_is_refused_and_an_empty_body_is_an_empty_file(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/sandboxes", json={"context_id": "c"})).status_code == 201
    for at in ("/v1/filespaces/c/content", "/v1/sandboxes/c/files/content"):
        request = http.build_request("PUT", at, params={"path": "f"})
        del request.headers["content-length"]
        assert "no body" in refused(await http.send(request), 400, "body")["detail"]
        assert (await http.get(at, params={"path": "f"})).status_code == 404
        assert (await http.put(at, params={"path": "f"}, content=b"")).status_code == 200
        assert (await http.get(at, params={"path": "f"})).content == b""
