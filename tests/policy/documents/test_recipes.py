from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import CarrelError, InvalidRequest, UnknownSetting
from carrel.models import Network
from carrel.policy.documents.recipes import PoolSize, Recipe, load

WHOLE = b"""
description = "for numbers"
provider = "namespace"
network = "none"
limits = { memory_mb = 512, timeout_s = 60 }
env = { MODE = "batch" }
[labels]
team = "data"
"""


def test_everything_may_be_said_and_left_out() -> None:
    recipe = load(WHOLE)
    assert (recipe.description, recipe.provider, recipe.network) == ("for numbers", "namespace", Network.NONE)
    assert recipe.limits.model_dump(exclude_none=True) == {"memory_mb": 512, "timeout_s": 60.0}
    assert (recipe.env, recipe.labels) == ({"MODE": "batch"}, {"team": "data"})
    assert load(b"") == Recipe()
    assert load(b"pool = { size = 2, max = 4 }").pool == PoolSize(size=2, max=4)
    science = load(b'packages = ["pandas>=2"]\npython = "3.11"\nimports = ["pandas", "matplotlib.pyplot"]')
    assert (science.packages, science.python) == (["pandas>=2"], "3.11")
    assert science.imports == ["pandas", "matplotlib.pyplot"] and load(b"imports = []").imports == []


@pytest.mark.parametrize(
    ("text", "kind", "field", "hint"),
    [
        (b"netwrok = 'none'", UnknownSetting, "netwrok", "network"),
        (b"[limits]\nmemory = 5", UnknownSetting, "limits.memory", "memory_mb"),
        (b"network = 'wide'", InvalidRequest, "network", ""),
        (b"package = ['a']", UnknownSetting, "package", "packages"),
        (b"packages = 'a'", InvalidRequest, "packages", ""),
        (b"imports = ['a', 'os; x']", InvalidRequest, "imports[1]", ""),
        (b"python = '2.7'", InvalidRequest, "python", ""),
        (b"[limits]\nmemory_mb = 1", InvalidRequest, "limits.memory_mb", ""),
        (b"[env]\n'A B' = 'x'", InvalidRequest, "env.A B.[key]", ""),
        (b"pool = { size = -1 }", InvalidRequest, "pool.size", ""),
        (b"pool = { size = 3, max = 2 }", InvalidRequest, "pool", "lower"),
        (b"pool = 2", InvalidRequest, "pool", ""),
        (b"a = ", InvalidRequest, "t/template.toml", "correct"),
        (b"\xff", InvalidRequest, "t/template.toml", "correct"),
    ],
)
def test_what_is_wrong_is_named(text: bytes, kind: type[CarrelError], field: str, hint: str) -> None:
    with pytest.raises(kind) as caught:
        load(text, "t/template.toml")
    assert caught.value.field == field and hint in (caught.value.hint or "")
    assert "t/template.toml" in caught.value.detail


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_a_recipe_or_refused(text: bytes) -> None:
    try:
        load(text)
    except CarrelError as error:
        assert error.detail
