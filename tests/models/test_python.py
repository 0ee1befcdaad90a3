from __future__ import annotations

import pytest
from pydantic import ValidationError

from carrel.models import CellRequest, CellResult, PythonRequest, RichResult


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"code": ""},
        {"code": "1", "timeout": 121},
        {"code": "1", "timeout": 0},
        {"code": "1", "output_limit": 2_000_000},
        {"code": "1", "env": "../x"},
        {"code": "1", "env": "a", "requirements": ["b"]},
        {"code": "1", "requirements": []},
        {"code": "1", "variables": {"a-b": "c"}},
        {"code": "1", "more": 1},
    ],
)
def test_calls_that_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PythonRequest.model_validate(wrong)


def test_cells() -> None:
    assert CellRequest(code="1").figures == ["png"]
    with pytest.raises(ValidationError):
        CellRequest.model_validate({"code": "1", "figures": ["gif"]})


def test_forms_of_a_result() -> None:
    shown = RichResult(
        kind="result",
        data={
            "text/plain": "t",
            "text/html": "h",
            "image/png": "cG5n",
            "image/svg+xml": "<svg/>",
            "application/json": "{}",
        },
    )
    assert (shown.text, shown.html, shown.png, shown.svg, shown.json_text) == ("t", "h", b"png", "<svg/>", "{}")
    empty = RichResult(kind="display", data={})
    assert (empty.text, empty.html, empty.png, empty.svg, empty.json_text) == (None,) * 5
    told = {"id": "1", "context": "a", "number": 1, "status": "ok", "stdout": "", "stderr": "", "duration_ms": 1}
    cell = CellResult.model_validate({**told, "results": [shown, empty]})
    assert cell.ok and cell.text == "t"
    assert CellResult.model_validate(told).text is None
