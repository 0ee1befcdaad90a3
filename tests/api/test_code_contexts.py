from __future__ import annotations

import json

import httpx
from tests.support.refusals import refused


async def test_a_whole_life(http: httpx.AsyncClient, box: str) -> None:
    base = f"{box}/code-contexts"
    assert (await http.get(base)).json() == {"items": []}
    first = (await http.post(f"{base}/a/cells", json={"code": "x = 1; x"})).json()
    assert first["results"] == [{"kind": "result", "data": {"text/plain": "1"}}]
    streamed = await http.post(f"{base}/a/cells/stream", json={"code": "print(x)"})
    assert json.loads(streamed.text.splitlines()[0])["text"] == "1\n"
    name = streamed.headers["carrel-cell-id"]
    assert (await http.get(f"{base}/a/cells/{name}")).json()["stdout"] == "1\n"
    shown = await http.get(f"{base}/a/cells/{name}/output", params={"follow": False})
    assert json.loads(shown.text.splitlines()[-1])["stream"] == "end"
    assert (await http.get(f"{base}/a")).json()["cells"] == 2
    assert (await http.post(f"{base}/a/interrupt")).status_code == 200
    assert (await http.post(f"{base}/a/restart")).json()["cells"] == 0
    assert (await http.delete(f"{base}/a")).status_code == 204
    refused(await http.get(f"{base}/a"), 404, None)


async def test_refusals(http: httpx.AsyncClient, box: str) -> None:
    base = f"{box}/code-contexts"
    refused(await http.post(f"{base}/a/cells", json={}), 400, "code")
    refused(await http.post(f"{base}/a%20b/cells", json={"code": "1"}), 400, "name")
    refused(await http.post(f"{base}/a/cells", json={"code": "1", "env": "none"}), 404, "env")
    refused(await http.get(f"{base}/a/cells/1"), 404, None)
    for action in ("interrupt", "restart"):
        refused(await http.post(f"{base}/a/{action}"), 404, None)
