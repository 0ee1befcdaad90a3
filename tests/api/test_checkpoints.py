"""Checkpoints of a folder by the API: around runs, on request, compared, undone by a person."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.governed import Known
from tests.support.refusals import refused

from carrel.config import Settings, load
from carrel.server import RunningServer, running


@pytest.fixture
def project() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="carrel-p-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def settings(project: Path) -> Iterator[Settings]:
    path = tempfile.mkdtemp(prefix="carrel-t-")
    flags = {"data_dir": path, "port": 0, "volumes": "directory", "sandbox.folder_roots": str(project.parent)}
    yield load(flags, environ={})
    shutil.rmtree(path)


@pytest.fixture
async def server(settings: Settings) -> AsyncIterator[RunningServer]:
    async with running(settings) as server:
        if server.plane.providers["namespace"].missing():
            pytest.skip("folders need namespaces")
        yield server


async def test_a_run_is_recorded_compared_and_undone(http: httpx.AsyncClient, known: Known, project: Path) -> None:
    (project / "kept").write_text("first\n")
    (project / "gone").write_text("first\n")
    (project / "node_modules").mkdir()
    body = {"context_id": "agent", "workspace_path": str(project)}
    assert (await http.post("/v1/sandboxes", json=body)).status_code == 201
    run = "echo second > kept; rm gone; mkdir -p new/deep; echo x > new/deep/f; ln -s /etc/passwd link"
    assert (await http.post("/v1/sandboxes/agent/commands", json={"command": run})).json()["exit_code"] == 0
    at = "/v1/contexts/agent/checkpoints"
    asked = await http.post(at, json={"reason": "half way"})
    assert asked.status_code == 201 and asked.json()["kind"] == "request" and asked.json()["reason"] == "half way"
    await http.post("/v1/sandboxes/agent/stop", json={})
    end, middle, start = (await http.get(at)).json()["items"]
    assert [end["kind"], middle["kind"], start["kind"]] == ["end", "request", "start"]
    assert end["begin"] == start["id"] and start["ignored"] == ["node_modules"]
    found = (await http.get(f"{at}/{start['id']}/changes", params={"after": end["id"]})).json()
    assert [(each["kind"], each["path"]) for each in found["items"]] == [
        ("removed", "gone"), ("changed", "kept"), ("added", "link"),
        ("added", "new"), ("added", "new/deep"), ("added", "new/deep/f"),
    ]  # fmt: skip
    assert (found["added"], found["removed"], found["changed"], found["truncated"]) == (4, 1, 1, False)
    patch = (await http.get(f"{at}/{start['id']}/patch", params={"path": "kept"})).json()
    assert patch["text"] == "--- a/kept\n+++ b/kept\n@@ -1 +1 @@\n-first\n+second\n"
    (project / "kept").write_text("by a person\n")
    agent = await known("coder", "agent", "read", "operate")
    refused(await agent.post(f"{at}/{start['id']}/undo", json={}), 403, None)
    planned = (await http.post(f"{at}/{start['id']}/undo", json={"dry_run": True})).json()
    assert (project / "link").is_symlink() and planned["checkpoint_id"] is None
    done = (await http.post(f"{at}/{start['id']}/undo", json={})).json()
    assert done["undone"] == planned["undone"] and done["undone_count"] == 5
    assert done["left"] == [{"path": "kept", "reason": "changed after the run ended"}]
    assert sorted(each.name for each in project.iterdir()) == ["gone", "kept", "node_modules"]
    assert (project / "kept").read_text() == "by a person\n" and (project / "gone").read_text() == "first\n"
    again = (await http.post(f"{at}/{done['checkpoint_id']}/undo", json={"paths": ["new/deep"]})).json()
    assert again["left"] == [] and (project / "new/deep/f").read_text() == "x\n"
    assert (await http.delete("/v1/contexts/agent")).status_code == 204
    assert (await http.get(at)).json()["items"] == []
    assert (project / "kept").exists()


async def test_bad_requests(http: httpx.AsyncClient, project: Path) -> None:
    await http.post("/v1/sandboxes", json={"context_id": "plain"})
    at = "/v1/contexts/plain/checkpoints"
    refused(await http.post(at, json={}), 422, "context_id", "unsupported")
    refused(await http.post("/v1/contexts/absent/checkpoints", json={}), 404, "id")
    refused(await http.get(f"{at}/cp-absent/changes"), 404, "checkpoint_id", "not_found")
    refused(await http.get(f"{at}/cp-absent/patch"), 404, "checkpoint_id", "not_found")
    refused(await http.post(f"{at}/cp-absent/undo", json={}), 404, "checkpoint_id", "not_found")
    refused(await http.post(f"{at}/-x/undo", json={}), 400, "checkpoint_id")
    await http.post("/v1/sandboxes", json={"context_id": "folder", "workspace_path": str(project)})
    at = "/v1/contexts/folder/checkpoints"
    [start] = (await http.get(at)).json()["items"]
    for path in ("/etc/passwd", "../x", "."):
        refused(await http.post(f"{at}/{start['id']}/undo", json={"paths": [path]}), 400, "paths")
