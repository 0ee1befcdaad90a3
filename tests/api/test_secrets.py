from __future__ import annotations

import uuid

import httpx
from tests.support.refusals import refused


async def test_values_go_in_and_never_come_out(http: httpx.AsyncClient) -> None:
    at = f"/v1/contexts/{uuid.uuid4().hex}/secrets"
    assert (await http.get(at)).json() == {"items": []}
    put = await http.put(f"{at}/KEY", json={"value": "open-sesame"})
    assert put.status_code == 200 and put.json()["version"] == 1
    assert (await http.put(f"{at}/KEY", json={"value_base64": "b3Blbi1zZXNhbWUy"})).json()["version"] == 2
    listed = await http.get(at)
    assert [each["name"] for each in listed.json()["items"]] == ["KEY"]
    assert "sesame" not in put.text + listed.text
    for body in ({}, {"value": "a", "value_base64": "YQ=="}, {"value_base64": "?"}):
        refused(await http.put(f"{at}/KEY", json=body), 400, "body")
    refused(await http.put(f"{at}/KEY", json={"value": "abc"}), 400, "value")
    refused(await http.put(f"{at}/a%20b", json={"value": "open-sesame"}), 400, "name")
    assert (await http.delete(f"{at}/KEY")).status_code == 204
    refused(await http.delete(f"{at}/KEY"), 404, "name")
