from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from carrel import models
from carrel.models import Answer, CommandRequest, CommandResult, ContextId, Limits, Request, SandboxRequest

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


@pytest.mark.parametrize("command", ["", [], "a\0b", ["a", "b\0"], None, 5, ["a"] * 4097, "x" * 131_073, [None]])
def test_what_is_no_command(command: object) -> None:
    with pytest.raises(ValidationError):
        CommandRequest.model_validate({"command": command})


def test_the_bytes_of_a_result_are_exact() -> None:
    result = CommandResult(id="c", stdout="�", stderr="é", exit_code=0, duration_ms=1, stdout_base64="/w==")
    assert (result.stdout_bytes, result.stderr_bytes, result.ok) == (b"\xff", "é".encode(), True)
    newer = {**result.model_dump(), "exit_code": None, "of_a_newer_server": 1}
    assert not CommandResult.model_validate(newer).ok
