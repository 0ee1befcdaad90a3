from __future__ import annotations

from carrel.control.mcp.catalogue import catalogue_info, platform_info, redacted_log, server_info, url_of
from carrel.control.supervisor.client import McpProcess
from carrel.models import McpLog
from carrel.redaction.redact import Redactor
from carrel.store.mcp_servers import McpServerRecord

REDACTOR = Redactor({"KEY": "very-secret-value"})
DECLARATION: dict[str, object] = {"command": ["run", "very-secret-value"], "variables": {"A": "very-secret-value"}}
TOOL = {"name": "t", "description": "very-secret-value", "inputSchema": {"type": "object"}}
RECORD = McpServerRecord(
    "c", "s", DECLARATION, "g2", 0.0, 0.0,
    catalogue={"tools": [TOOL], "instructions": "be kind"}, catalogue_generation="g1", discovered_at=1.0,
)  # fmt: skip


def test_a_server_without_secrets() -> None:
    info = server_info("c", RECORD, None, REDACTOR)
    assert (info.state, info.starts, info.tools, info.url) == ("stopped", None, 1, url_of("c", "s"))
    assert info.command == ["run", "[secret:KEY]"] and info.variables == ["A"]
    assert "very-secret" not in info.model_dump_json()
    told = McpProcess(name="s", state="backing_off", started=3, reason="it died", retry_in_s=0.5)
    info = server_info("c", RECORD, told, REDACTOR)
    assert (info.state, info.starts, info.reason, info.retry_in_s) == ("backing_off", 3, "it died", 0.5)


def test_one_that_the_operator_runs() -> None:
    info = platform_info("c", "p", None, REDACTOR)
    assert (info.origin, info.state, info.tools, info.command) == ("platform", "running", 0, [])
    assert platform_info("c", "p", RECORD, REDACTOR).tools == 1


def test_what_it_offers() -> None:
    found = catalogue_info("s", RECORD, REDACTOR)
    assert found.tools[0].qualified == "s:t" and found.tools[0].description == "[secret:KEY]"
    assert not found.current and found.instructions == "be kind"


def test_a_part_of_a_log() -> None:
    before = McpLog(text="key very-se", offset=0, next=11)
    page = McpLog(text="cret-value end\n", offset=11, next=26)
    assert redacted_log(page, before, REDACTOR).text == " end\n"
    assert redacted_log(before, None, REDACTOR).text == "key very-se", "too little to tell"
    rolled = McpLog(text="ret-value\nvery-secret-value\n", offset=40, next=68, dropped=40)
    assert redacted_log(rolled, None, REDACTOR).text == "[secret:KEY]\n", "a line that lost its beginning is left out"
    assert redacted_log(rolled, before, REDACTOR).text == "[secret:KEY]\n"
    assert redacted_log(rolled.model_copy(update={"text": "one line"}), None, REDACTOR).text == "one line"
