from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.support.mcp_hosted import GOOD

from carrel.client import AsyncClient, Client, Sandbox
from carrel.errors import ApprovalNeeded, Conflict, Denied, McpServerFailed, NotFound


@pytest.fixture
def kept(client: Client) -> Iterator[Sandbox]:
    box = client.sandbox(f"mcp-{uuid.uuid4().hex}")
    box.files.write("good.py", GOOD.encode())
    yield box
    box.terminate(delete_files=True)


def test_everything_about_a_server(client: Client, kept: Sandbox) -> None:
    mcp = kept.mcp
    info = mcp.add("good", ["python3", "good.py"], variables={"CONTEXT": "mine"})
    assert info.discovery_error is None and info.tools == 9
    assert [each.name for each in mcp.list()] == ["good"] and mcp.get("good").state == "stopped"
    assert {each.qualified for each in mcp.tools()} == {each.qualified for each in mcp.tools("good")}
    assert mcp.request("good", "echo", {"text": "hi"}, timeout=20).text == "hi"
    assert mcp.call("good", "whoami").text.startswith("good mine")
    assert mcp.call("good", "fail").is_error
    page = mcp.log("good")
    assert "listening" in page.text and mcp.log("good", page.next).text == ""
    assert mcp.refresh("good").current and mcp.catalogue("good").instructions == "be kind"
    assert not mcp.stop("good").enabled
    with pytest.raises(Conflict):
        mcp.call("good", "whoami")
    assert mcp.start("good").state == "running"
    with pytest.raises(McpServerFailed, match="exit code 3"):
        mcp.call("good", "die")
    assert mcp.url("good").endswith(f"/v1/sandboxes/{kept.context_id}/mcp-servers/good/mcp")
    mcp.remove("good")
    with pytest.raises(NotFound):
        mcp.get("good")


def test_policy(client: Client, kept: Sandbox) -> None:
    kept.mcp.add("good", ["python3", "good.py"])
    rules = {"permissions": {"allow": ["mcp(good:echo)", "shell(python3:*)"], "deny": ["mcp(good:fail)"]}}
    client.policy(str(kept.context_id)).put(settings=rules)
    assert kept.mcp.call("good", "echo", text="x").text == "x"
    with pytest.raises(Denied) as denied:
        kept.mcp.call("good", "fail")
    assert denied.value.rule == "mcp(good:fail)"
    with pytest.raises(ApprovalNeeded):
        kept.mcp.call("good", "count")


async def test_the_other_client(async_client: AsyncClient) -> None:
    box = await async_client.sandbox(f"mcp-{uuid.uuid4().hex}")
    try:
        await box.files.write("good.py", GOOD.encode())
        await box.mcp.add("good", ["python3", "good.py"])
        await box.stop()
        assert len(await box.mcp.tools()) == 9 and (await box.info()).state == "stopped"
        assert (await box.mcp.call("good", "echo", text="again")).text == "again"
    finally:
        await box.terminate(delete_files=True)
