from __future__ import annotations

import pytest
from pydantic import ValidationError

from carrel.models import ForkRequest, SyncDirection, SyncRequest


def test_a_sync_goes_both_ways_unless_told_otherwise() -> None:
    assert SyncRequest().direction is SyncDirection.BOTH
    with pytest.raises(ValidationError):
        SyncRequest.model_validate({"direction": "sideways"})


@pytest.mark.parametrize("context", ["", "-x", "a b", "a/b", "x" * 129])
def test_a_fork_needs_a_context(context: str) -> None:
    with pytest.raises(ValidationError):
        ForkRequest(context_id=context)
