from __future__ import annotations

import pytest
from pydantic import ValidationError

from carrel.models import ApprovalBatch, ApprovalDecision, SecretValue


def test_a_secret_is_text_or_bytes_and_does_not_show() -> None:
    assert SecretValue(value="open").bytes() == b"open"
    assert SecretValue(value_base64="/w==").bytes() == b"\xff"
    assert "open" not in repr(SecretValue(value="open"))
    for wrong in ({}, {"value": "a", "value_base64": "YQ=="}, {"value_base64": "?"}):
        with pytest.raises(ValidationError):
            SecretValue.model_validate(wrong)


def test_a_batch_is_not_empty() -> None:
    with pytest.raises(ValidationError):
        ApprovalBatch(ids=[], decision=ApprovalDecision(approve=True))
