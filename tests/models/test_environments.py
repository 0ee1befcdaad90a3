from __future__ import annotations

import pytest
from pydantic import ValidationError

from carrel.models import EnvironmentAttach, EnvironmentBuild


def test_an_environment_is_named_or_described() -> None:
    assert EnvironmentAttach(env="tools").requirements is None
    assert EnvironmentAttach(requirements=["a"], python="3.11", index="main").env is None
    for wrong in (
        {},
        {"env": "a", "requirements": ["b"]},
        {"env": "a", "index": "main"},
        {"env": "a/b"},
        {"requirements": ["a\nb"]},
        {"requirements": ["a"] * 257},
    ):
        with pytest.raises(ValidationError):
            EnvironmentAttach.model_validate(wrong)
    with pytest.raises(ValidationError):
        EnvironmentBuild(requirements=["a"], name="-x")
