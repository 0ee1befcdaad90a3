from __future__ import annotations

import base64
import json
import math
from urllib.parse import parse_qs, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from carrel.control.operations.checks import (
    asked,
    check,
    checked_path,
    checked_result,
    command_body,
    deadline_of,
    json_object,
    query_of,
    require_id,
    result_size,
    size_of,
)
from carrel.errors import InvalidPath, InvalidRequest, SandboxLost
from carrel.models import CommandRequest, CommandResult, EditRequest, FileInfo, PythonResult
from carrel.models.operations import EDIT_FILE

RESULT = {"id": "c", "stdout": "", "stderr": "", "exit_code": 0, "duration_ms": 1.0}


def test_a_command_has_a_deadline() -> None:
    body, timeout = command_body(CommandRequest(command="true", timeout=5), 7.0)
    assert (json.loads(body)["timeout"], timeout) == (5, 5)
    assert command_body(CommandRequest(command="true"), 7.0)[1] == 7.0
    assert command_body(CommandRequest(command="true"), None)[1] is None


@pytest.mark.parametrize("given", [0, None, math.inf, 0.0])
def test_zero_null_and_infinity_mean_no_deadline(given: float | None) -> None:
    request = CommandRequest.model_validate({"command": "true", "timeout": given})
    body, timeout = command_body(request, 7.0)
    assert (json.loads(body)["timeout"], timeout) == (None, None)
    assert deadline_of(CommandRequest.model_validate({"command": "true", "timeout": "default"}).timeout, 7.0) == 7.0


@pytest.mark.parametrize("given", [-1, math.nan, -math.inf, 86_401, "soon", True, [1]])
def test_a_timeout_that_is_no_deadline_is_refused(given: object) -> None:
    with pytest.raises(ValidationError, match="0 means no deadline"):
        CommandRequest.model_validate({"command": "true", "timeout": given})


def test_what_decides_what_a_command_does_is_asked() -> None:
    assert asked(CommandRequest(command=["ls"], cwd="a", output_limit=3)) == {"command": ["ls"], "cwd": "a"}


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_text_comes_back_out_of_a_query(text: str) -> None:
    assert parse_qs(query_of(path=text, n=3, flag=True, no=None)[1:], keep_blank_values=True) == {
        "path": [text],
        "n": ["3"],
        "flag": ["1"],
    }


def test_a_path_goes_as_its_bytes() -> None:
    path = b"caf\xe9".decode(errors="surrogateescape")
    assert unquote_to_bytes(query_of(path=checked_path(path)).removeprefix("?path=")) == b"caf\xe9"
    assert query_of(path=None) == ""


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 4097, "\ud800"])
def test_what_cannot_be_a_path(path: str) -> None:
    with pytest.raises(InvalidPath):
        checked_path(path)


@pytest.mark.parametrize("name", ["", "a/b", "..", "é", "x" * 129, "a?b"])
def test_what_cannot_be_a_command_id(name: str) -> None:
    with pytest.raises(InvalidRequest):
        require_id(name)
    require_id("cmd-1_a")


def test_nonsense_is_not_believed() -> None:
    for nonsense in (None, [], {"path": 1}, "x"):
        with pytest.raises(SandboxLost):
            check(FileInfo, nonsense)
    with pytest.raises(SandboxLost):
        json_object(b"{")
    with pytest.raises(SandboxLost):
        checked_result(b"[]", CommandResult)


def test_names_that_are_not_text_are_believed() -> None:
    answer = json.dumps({**RESULT, "files_produced": ["a\udcff"]}).encode()
    assert checked_result(answer, PythonResult).files_produced == ["a\udcff"]


def test_only_the_control_plane_knows_of_memory() -> None:
    assert checked_result(json.dumps({**RESULT, "oom_killed": True}).encode(), CommandResult).oom_killed is False


@given(st.binary(max_size=50))
def test_sizes_are_those_of_the_bytes(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    assert size_of(data.decode(errors="replace"), encoded) == len(data)
    text = data.decode("latin-1")
    assert size_of(text) == len(text.encode())
    assert size_of(None) == 0
    assert result_size(len(data)) > 8 * len(data)


def test_a_size_that_is_a_lie() -> None:
    with pytest.raises(SandboxLost):
        size_of("", "a")


@given(st.tuples(st.text(min_size=1), st.text()), st.tuples(st.text(min_size=1), st.text()))
def test_another_edit_is_another_operation(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Who approved one has not approved the other, also where the difference is beyond what is shown."""
    first, second = (
        EDIT_FILE.arguments(EditRequest(path="f", old="x" * 5000 + old, new=new)) for old, new in (one, other)
    )
    assert (first == second) == (one == other)
    assert str(first["old"]).endswith(f" […] and {3000 + len(one[0])} characters more"), "it is told what is not shown"
