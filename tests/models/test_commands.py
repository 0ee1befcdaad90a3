from __future__ import annotations

import pytest
from pydantic import ValidationError

from carrel.models import CommandRequest, CommandResult


@pytest.mark.parametrize("command", ["", [], "a\0b", ["a", "b\0"], None, 5, ["a"] * 4097, "x" * 131_073, [None]])
def test_what_is_no_command(command: object) -> None:
    with pytest.raises(ValidationError):
        CommandRequest.model_validate({"command": command})


def test_the_bytes_of_a_result_are_exact() -> None:
    result = CommandResult(id="c", stdout="�", stderr="é", exit_code=0, duration_ms=1, stdout_base64="/w==")
    assert (result.stdout_bytes, result.stderr_bytes, result.ok) == (b"\xff", "é".encode(), True)
    newer = {**result.model_dump(), "exit_code": None, "of_a_newer_server": 1}
    assert not CommandResult.model_validate(newer).ok
