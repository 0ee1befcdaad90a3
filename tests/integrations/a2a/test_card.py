"""The agent card, as the official client reads it."""

from __future__ import annotations

import logging

import pytest
from a2a.utils.proto_utils import warn_on_missing_required_fields

from carrel.integrations.a2a.card import SCHEME, agent_card


@pytest.mark.parametrize("model", ["shell", "openai:gpt-5.5"])
def test_the_card_is_whole(model: str, caplog: pytest.LogCaptureFixture) -> None:
    card = agent_card("https://agents.example.org/carrel/", model=model, version="1.2.3")
    with caplog.at_level(logging.WARNING):
        assert warn_on_missing_required_fields(card, "card")
    assert card.version == "1.2.3"
    assert {each.url for each in card.supported_interfaces} == {
        "https://agents.example.org/carrel/",
        "https://agents.example.org/carrel/rest",
    }
    assert card.supported_interfaces[0].protocol_version == "1.0"
    assert card.capabilities.streaming
    assert card.capabilities.push_notifications
    assert len(card.skills) == 1


def test_a_token_is_asked_for() -> None:
    card = agent_card("http://127.0.0.1:1", model="shell", version="1")
    assert card.security_schemes[SCHEME].http_auth_security_scheme.scheme == "bearer"
    assert [list(each.schemes) for each in card.security_requirements] == [[SCHEME]]
