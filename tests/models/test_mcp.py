from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from carrel.models import McpRequest, McpResult, McpServerRequest


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"command": []},
        {"command": [""]},
        {"command": ["a\0b"]},
        {"command": ["x"], "variables": {"A": "1"}, "secret_variables": {"A": "B"}},
        {"command": ["x"], "secret_variables": {"A": "../etc/passwd"}},
        {"command": ["x"], "python": "3.11"},
        {"command": ["x"], "requirements": []},
        {"command": ["x"], "npm": ["--registry=elsewhere"]},
        {"command": ["x"], "npm": ["git+ssh://host/x"]},
        {"command": ["x"], "npm": ["../x"]},
        {"command": ["x"], "more": 1},
    ],
)
def test_what_cannot_be_a_server(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        McpServerRequest.model_validate(wrong)


@pytest.mark.parametrize("package", ["a", "@scope/name", "@scope/name@1.2.3", "name@^1", "name@latest", "a.b_c~d"])
def test_packages_of_npm(package: str) -> None:
    assert McpServerRequest(command=["x"], npm=[package]).npm == [package]


@given(st.text(max_size=40))
def test_no_package_is_an_option_or_a_path(text: str) -> None:
    try:
        McpServerRequest(command=["x"], npm=[text])
    except ValidationError:
        return
    assert text[0] not in "-./" and ".." not in text.split("/") and " " not in text


@given(st.text(max_size=140))
def test_names_of_tools(text: str) -> None:
    try:
        McpRequest(tool=text)
    except ValidationError:
        return
    assert text.isascii() and 0 < len(text) <= 128 and not set(text) & set(" :*()\n")


def test_the_text_of_a_result() -> None:
    content: list[dict[str, object]] = [{"type": "text", "text": "a"}, {"type": "image", "data": ""}, {"type": "text"}]
    assert McpResult(server="s", tool="t", content=content, duration_ms=1).text == "a\n"
