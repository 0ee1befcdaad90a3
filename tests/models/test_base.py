from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from carrel import models
from carrel.models import Answer, CommandRequest, ContextId, Request, SandboxRequest

ALL = [each for each in vars(models).values() if isinstance(each, type) and issubclass(each, BaseModel)]


@pytest.mark.parametrize("model", [each for each in ALL if each not in {Request, Answer, BaseModel}])
def test_requests_are_strict_and_answers_are_lenient(model: type[BaseModel]) -> None:
    assert issubclass(model, Request) != issubclass(model, Answer)
    assert model.model_config["extra"] == ("forbid" if issubclass(model, Request) else "ignore")
    assert model.__doc__


@pytest.mark.parametrize("model", [SandboxRequest, CommandRequest, models.ExecuteRequest, models.ToolRequest])
def test_an_unknown_field_is_refused(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"time_out": 1})
    assert "extra_forbidden" in {error["type"] for error in caught.value.errors()}


@given(st.text(max_size=140) | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,140}\n?"))
def test_context_ids(text: str) -> None:
    good = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", text) is not None
    try:
        assert SandboxRequest(context_id=text).context_id == text
        assert good
    except ValidationError:
        assert not good
    assert ContextId is not None
