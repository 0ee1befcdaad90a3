from __future__ import annotations

from pathlib import Path

import pytest

from carrel.errors import InvalidRequest
from carrel.policy.documents import settings

EXAMPLE = (Path(__file__).parents[1] / "examples" / "settings.json").read_text()


def test_the_example_loads_unchanged() -> None:
    loaded = settings.load(EXAMPLE)
    assert loaded.context_workspace == "/workspace/${CONTEXT_ID}"
    assert len(loaded.permissions.allow) == 39
    assert len(loaded.permissions.deny) == 16
    assert "shell(rm -rf /*:*)" in loaded.permissions.deny


def test_nothing_is_needed() -> None:
    assert settings.load("{}").permissions == settings.Permissions()


def test_bounds() -> None:
    with pytest.raises(InvalidRequest, match="absolute"):
        settings.load('{"context_workspace": "x"}')
    with pytest.raises(InvalidRequest, match="longer"):
        settings.load('{"permissions": {"allow": ["' + "x" * (settings.MAX_RULE + 1) + '"]}}')
