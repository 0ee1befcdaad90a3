from __future__ import annotations

import json
import re
from datetime import datetime
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from carrel import models
from carrel.models import Answer, CommandRequest, ContextId, Moment, Request, SandboxRequest

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


def _requests() -> list[type[Request]]:
    found, pending = [], [Request]
    while pending:
        each = pending.pop()
        pending += each.__subclasses__()
        found.append(each)
    return found


def _wrong_types() -> list[tuple[type[Request], str, object]]:
    """A value of another type for each boolean, number and date of each request."""
    wrong: dict[object, tuple[object, ...]] = {
        bool: (0, 1, "true", 1.0),
        int: ("5", 5.0, True),
        float: ("5", True),
        datetime: (0.5, 5, "0.5", "5"),
        str: (5, True, 1.5),
    }
    found = []
    for model in _requests():
        for name, field in model.model_fields.items():
            kinds = {field.annotation, *get_args(field.annotation)}
            kinds |= {inner for kind in kinds for inner in get_args(kind)}
            for kind, values in wrong.items():
                if kind in kinds:
                    found += [(model, name, value) for value in values if type(value) not in kinds]
    return found


@pytest.mark.parametrize("parse", ["python", "json"])
def test_values_of_another_type_are_not_converted(parse: str) -> None:
    wrong = _wrong_types()
    assert {type(value) for _, _, value in wrong} == {int, str, float, bool} and len(wrong) > 50
    for model, name, value in wrong:
        with pytest.raises(ValidationError) as caught:
            if parse == "json":
                model.model_validate_json(json.dumps({name: value}))
            else:
                model.model_validate({name: value})
        assert name in {error["loc"][0] for error in caught.value.errors()}, (model, name, value)


def test_moments_are_read_as_they_are_written() -> None:
    for text in ("2026-01-31T12:00:00Z", "2026-01-31", "2026-01-31T12:00:00+02:00"):
        assert TypeAdapter(Moment).validate_python(text).year == 2026
    assert TypeAdapter(Moment).validate_python(datetime(2026, 1, 1)).year == 2026
