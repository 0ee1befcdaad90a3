"""The log of an MCP server read in pages that begin or end inside a secret."""

from __future__ import annotations

import pytest
from tests.support.calls import ADMIN
from tests.support.mcp_hosted import GOOD

from carrel.config import Settings, load
from carrel.control.plane import ControlPlane
from carrel.models import McpRequest, McpServerRequest, SandboxRequest

VALUE = "correct-horse-battery-staple"
LOUD = f"import sys\nsys.stderr.write('key ' + open('/run/secrets/KEY').read() + ' end\\n')\nsys.stderr.flush()\n{GOOD}"


@pytest.fixture
def settings(data_dir: str) -> Settings:
    return load({"data_dir": data_dir, "volumes": "directory", "max_sandboxes": 6}, environ={})


async def test_no_page_shows_a_part_of_a_secret(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.secrets.put("c", "KEY", VALUE.encode())
    await plane.operations.write_file(ADMIN, "c", "loud.py", LOUD.encode())
    await plane.mcp.add(ADMIN, "c", "loud", McpServerRequest(command=["python3", "loud.py"]))
    await plane.mcp.request(ADMIN, "c", "loud", McpRequest(tool="whoami"))
    whole = await plane.mcp.log(ADMIN, "c", "loud")
    assert "key [secret:KEY] end\n" in whole.text
    begin = whole.text.index("[secret:KEY]")
    for offset in range(begin - 4, begin + len(VALUE) + 4):
        page = await plane.mcp.log(ADMIN, "c", "loud", offset=offset)
        assert page.offset == offset and page.next == whole.next
        assert VALUE[-4:] not in page.text and page.text.endswith(whole.text[begin + len("[secret:KEY] end") :])
    pages, offset = "", 0
    while offset < whole.next:
        page = await plane.mcp.log(ADMIN, "c", "loud", offset=offset, limit=11)
        pages, offset = pages + page.text, page.next
    assert VALUE[-10:] not in pages and " end\n" in pages
