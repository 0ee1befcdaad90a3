from __future__ import annotations

import io
import tarfile

import httpx
from tests.support.refusals import refused


async def test_the_life_of_a_snapshot(http: httpx.AsyncClient) -> None:
    await http.post("/v1/sandboxes", json={"context_id": "s"})
    at = "/v1/sandboxes/s"
    await http.put(f"{at}/files/content", params={"path": "f"}, content=b"one")
    first = await http.post(f"{at}/snapshots")
    assert first.status_code == 201 and first.json()["status"] == "ready"
    await http.put(f"{at}/files/content", params={"path": "g"}, content=b"two")
    second = (await http.post(f"{at}/snapshots")).json()
    page = (await http.get(f"{at}/snapshots", params={"limit": 1})).json()
    assert [each["id"] for each in page["items"]] == [second["id"]]
    rest = (await http.get(f"{at}/snapshots", params={"cursor": page["next"]})).json()
    assert [each["id"] for each in rest["items"]] == [first.json()["id"]] and rest["next"] is None
    changes = await http.get(f"{at}/diff", params={"before": first.json()["id"], "after": second["id"]})
    assert changes.json() == {"items": [{"path": "g", "kind": "added"}], "truncated": False}
    tar = await http.get(f"{at}/snapshots/{second['id']}/tar")
    assert tar.headers["content-type"] == "application/x-tar"
    assert {"f", "g"} <= set(tarfile.open(fileobj=io.BytesIO(tar.content)).getnames())
    restored = await http.post(f"{at}/restore", json={"snapshot_id": first.json()["id"]})
    assert restored.json()["state"] == "running"
    refused(await http.get(f"{at}/files/content", params={"path": "g"}), 404, "path", "file_not_found")
    fork = await http.post(f"{at}/fork", json={"context_id": "s2", "snapshot_id": second["id"]})
    assert fork.status_code == 201
    assert (await http.get("/v1/sandboxes/s2/files/content", params={"path": "g"})).content == b"two"
    assert (await http.delete(f"{at}/snapshots/{second['id']}")).status_code == 204
    refused(await http.delete(f"{at}/snapshots/{second['id']}"), 404, "snapshot_id", "not_found")


async def test_bad_requests(http: httpx.AsyncClient, box: str) -> None:
    await http.post("/v1/sandboxes", json={"context_id": "bad"})
    at = "/v1/sandboxes/bad"
    refused(await http.post(f"{at}/restore", json={}), 400, "snapshot_id")
    refused(await http.post(f"{at}/restore", json={"snapshot_id": "snap-absent"}), 404, "snapshot_id")
    refused(await http.post(f"{at}/fork", json={"context_id": "/"}), 400, "context_id")
    refused(await http.post(f"{at}/fork", json={"context_id": "bad"}), 409, "context_id", "already_exists")
    refused(await http.get(f"{at}/diff", params={"before": "x"}), 400, "after")
    ephemeral = (await http.post("/v1/sandboxes", json={})).json()["id"]
    refused(await http.post(f"/v1/sandboxes/{ephemeral}/snapshots"), 409, "id", "conflict")
