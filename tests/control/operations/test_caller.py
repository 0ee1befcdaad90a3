from __future__ import annotations

import pytest
from tests.support.calls import caller_named

from carrel.control.operations.call import SELF, Call
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.models.operations import HEALTH


def test_no_call_is_built_without_a_caller() -> None:
    with pytest.raises(TypeError, match="caller"):
        Call(HEALTH, {})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="caller"):
        Call(HEALTH, {}, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="identity"):
        Caller()  # type: ignore[call-arg]
    assert Call(HEALTH, {}, OWN_WORK).subject == SELF
    assert Call(HEALTH, {}, caller_named("agent:a")).subject == "agent:a"
