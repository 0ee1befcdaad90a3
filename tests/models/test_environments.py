from __future__ import annotations

import pytest
from pydantic import ValidationError

from carrel.models import EnvironmentAttach, EnvironmentBuild


def test_an_environment_is_named_or_described() -> None:
    assert EnvironmentAttach(env="tools").requirements is None
    assert EnvironmentAttach(requirements=["a"], python="3.11", index="main").env is None
    assert EnvironmentAttach(template=True).env is None
    for wrong in (
        {},
        {"template": True, "env": "a"},
        {"template": True, "requirements": ["a"]},
        {"template": True, "venv": True},
        {"template": True, "python": "3.11"},
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
