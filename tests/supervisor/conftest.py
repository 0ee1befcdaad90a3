"""Which tests of the supervisor run with both kinds of provider.

The two differ in how process trees are ended and in which files can be reached. Tests of cells, streams, environments and
MCP declarations touch neither: they run with one kind. That every promise holds with both is in `tests/testing`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS

HERE = Path(__file__).parent
ONE_KIND = {
    "test_answers", "test_cells", "test_contexts", "test_environment", "test_command_input", "test_hosts", "test_mcp_servers",
    "test_mcp_starting", "test_secrets",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_second_kind(item)]


def _is_second_kind(item: pytest.Item) -> bool:
    chosen = getattr(item, "callspec", None)
    return (
        item.path.is_relative_to(HERE)
        and item.path.stem in ONE_KIND
        and chosen is not None
        and chosen.params.get("house") in KINDS[1:]
    )
