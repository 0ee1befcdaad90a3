from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from carrel.models import CommandRequest, Limits


@given(st.text(max_size=12), st.text(max_size=12))
def test_environment(name: str, value: str) -> None:
    good = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,255}", name) is not None and "\0" not in value
    try:
        assert CommandRequest(command="x", env={name: value}).env == {name: value}
        assert good
    except ValidationError:
        assert not good


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, "much", True, [1]])
@pytest.mark.parametrize("field", ["cpus", "timeout_s", "memory_mb", "processes", "disk_mb"])
def test_limits_are_numbers_with_bounds(field: str, value: object) -> None:
    if value is True and field in {"cpus", "timeout_s", "disk_mb"}:
        return  # pydantic reads it as 1, which is within these bounds
    with pytest.raises(ValidationError) as caught:
        Limits.model_validate({field: value})
    assert caught.value.errors()[0]["loc"] == (field,)
