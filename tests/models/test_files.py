from __future__ import annotations

import pytest
from pydantic import ValidationError

from carrel.models import EditRequest, MoveRequest


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 4097])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ValidationError):
        EditRequest(path=path, old="a", new="b")
    with pytest.raises(ValidationError):
        MoveRequest(source=path, destination="b")


def test_there_must_be_something_to_replace() -> None:
    with pytest.raises(ValidationError):
        EditRequest(path="a", old="", new="b")
