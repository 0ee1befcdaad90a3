from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from carrel import Client
from carrel.errors import Denied, InvalidRequest, NotFound, Unauthorized


def test_create_use_list_revoke(client: Client) -> None:
    name = f"coder-{uuid.uuid4().hex[:8]}"
    made = client.tokens.create(
        name, kind="agent", scopes=["operate"], contexts=[f"{name}:a"], namespace=name, expires=timedelta(days=1)
    )
    assert made.expires_at is not None and made.expires_at > datetime.now(UTC)
    assert made.token.startswith("carrel_")
    [listed] = [info for info in client.tokens.list() if info.name == name]
    assert listed == client.tokens.get(made.id) and listed.contexts == [f"{name}:a"]
    with Client(token=made.token) as agent:
        assert list(agent.sandboxes()) == []
        with pytest.raises(Denied):
            agent.sandbox("other")
        with pytest.raises(Denied):
            agent.tokens.get(made.id)
        client.tokens.revoke(made.id)
        with pytest.raises(Unauthorized):
            list(agent.sandboxes())
    with pytest.raises(NotFound):
        client.tokens.revoke("tok-0")
    with pytest.raises(InvalidRequest):
        client.tokens.create(name, kind="agent", scopes=["approve"])
    with pytest.raises(InvalidRequest):
        client.tokens.create(name, kind="agent", scopes=["read"], expires=datetime(2001, 1, 1, tzinfo=UTC))
