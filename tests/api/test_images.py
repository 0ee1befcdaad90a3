from __future__ import annotations

import json

import httpx
import pytest
from tests.support.governed import Known
from tests.support.stored_images import docker_archive, layer, small

from carrel.client import AsyncClient
from carrel.errors import Conflict, Denied, NotFound, RegistryFailed
from carrel.models.images import ImageProgress
from carrel.server import RunningServer

CONFIG = {"environment": {"PATH": "/usr/bin:/bin"}, "entry_point": ("/bin/echo",), "command": ("from", "inside")}


@pytest.fixture(scope="module")
def archive() -> bytes:
    return docker_archive("team/small:1", layer(small), **CONFIG)


async def test_imported_listed_used_removed(http: httpx.AsyncClient, server: RunningServer, archive: bytes) -> None:
    assert len(archive) > 1 << 20, "larger than a body may be: it is a stream"
    async with AsyncClient(server.url, server.token) as carrel:
        [imported] = await carrel.images.import_archive(archive)
        assert (imported.names, imported.in_use) == (["team/small:1"], False)
        if not any("images" in each.capabilities for each in (await carrel.host()).providers if each.available):
            pytest.skip("no provider of this host runs images")
        seen: list[ImageProgress] = []
        async with await carrel.sandbox(image="team/small:1", progress=seen.append) as box:
            assert seen == [], "it is there already"
            assert (await box.commands.run("cat /etc/os-release")).stdout == "ID=copied\n"
            found = await box.image()
            assert found is not None and (found.digest, found.entry_point) == (imported.digest, ["/bin/echo"])
            assert found.used_by == [box.id] and found.working_directory == "/"
            with pytest.raises(Conflict, match=f"is the root of {box.id}"):
                await carrel.images.delete("team/small:1")
        await carrel.images.import_archive(archive, name="other:2")
        await carrel.images.delete("team/small:1")
        [left] = await carrel.images.list()
        assert left.names == ["other:2"], "an image with several names loses one"
        await carrel.images.delete(left.digest)
        assert await carrel.images.list() == []
        for name in ("other:2", left.digest, "team/small:1"):
            with pytest.raises(NotFound):
                await carrel.images.get(name)
        with pytest.raises(RegistryFailed, match="localhost:1 cannot be reached"):
            await carrel.images.pull("localhost:1/x", progress=seen.append)
    answer = await http.post("/v1/images/import", content=b"no archive")
    assert (answer.status_code, answer.json()["code"]) == (422, "image_refused")


async def test_who_may_do_what(http: httpx.AsyncClient, known: Known, archive: bytes) -> None:
    assert (await http.post("/v1/images/import", content=archive)).status_code == 200
    agent = await known("coder", "agent", "operate")
    [shown] = (await agent.get("/v1/images")).json()["items"]
    assert (await agent.get("/v1/images/team%2Fsmall:1")).json()["digest"] == shown["digest"]
    assert (await agent.get(f"/v1/images/{shown['digest'][7:19]}")).json()["command"] == ["from", "inside"]
    for refused in (
        await agent.delete("/v1/images/team%2Fsmall:1"),
        await agent.post("/v1/images/import", content=archive),
    ):
        assert (refused.status_code, refused.json()["code"]) == (403, Denied.code)
    answer = await agent.post("/v1/images", json={"image": "10.0.0.1/x"})
    assert (answer.status_code, answer.json()["field"]) == (400, "image")
    async with agent.stream("POST", "/v1/images?follow=true", json={"image": "10.0.0.1/x"}) as stream:
        lines = [json.loads(line) async for line in stream.aiter_lines()]
    assert [list(each) for each in lines] == [["problem"]]
    narrow = await known("narrow", "agent", "operate", namespace="team")
    assert (await narrow.post("/v1/images", json={"image": "x"})).status_code == 403, "pulling is for all contexts"
    assert (await narrow.get("/v1/images")).status_code == 200
