"""Which requests are about a session; the rest is in tests/end_to_end/test_forwarding.py."""

from __future__ import annotations

import re
from typing import Any, cast

import httpx
import pytest

from carrel.api.forwarding import Forwarding, Subject
from carrel.control.sessions.live import LiveSandboxes
from carrel.models.operations import DEPLOY_OR_RESUME, OPERATIONS, Operation


class NoSandboxes:
    """No sandbox runs here."""

    def find(self, name: str) -> None:
        return None


def subject_of(row: Operation) -> Subject | None:
    none = cast(Any, None)
    forwarding = Forwarding(
        none, none, cast(LiveSandboxes, NoSandboxes()), none, none, authenticated=True, verified=False
    )
    path = re.sub(r"{(\w+)(:path)?}", r"a-\1", row.path)
    scope: dict[str, Any] = {"path": path, "type": "http", "method": row.method}
    if row.method == "WEBSOCKET":
        scope = {"path": path, "type": "websocket"}
    return forwarding.elsewhere(scope)


@pytest.mark.parametrize("row", [row for row in OPERATIONS.values() if row.http], ids=lambda row: row.id)
def test_the_table_of_operations_says_what_is_about_a_session(row: Operation) -> None:
    found = subject_of(row)
    if row is DEPLOY_OR_RESUME:
        assert found == Subject(starts=True)
    elif row.id == "stream_context":
        assert found is None, "any server has the event log"
    elif "{id}" in row.path or "{context_id}" in row.path:
        assert found is not None and found.name in {"a-id", "a-context_id"}
        assert found.readable == (row.id == "get_sandbox"), "all others need the owner"
    else:
        assert found is None


async def test_a_server_alone_takes_no_forwarded_request(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/sandboxes", headers={"carrel-forwarded": "1;a;b"})
    assert (answer.status_code, answer.json()["field"]) == (401, "Carrel-Forwarded")


async def test_a_server_alone_lists_itself(http: httpx.AsyncClient, pytestconfig: pytest.Config) -> None:
    items = (await http.get("/v1/nodes")).json()["items"]
    assert len(items) == pytestconfig.getoption("--workers-of-server")
    assert {each["state"] for each in items} == {"running"}
    [found] = [each for each in items if each["here"]]
    urls = {str(http.base_url).rstrip("/")} if len(items) == 1 else {each["url"] for each in items}
    assert found["url"] in urls
