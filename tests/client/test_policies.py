from __future__ import annotations

import uuid

import pytest
from tests.support.governed import POLICY

from carrel import Client
from carrel.errors import Conflict, Denied, InvalidRequest


def test_get_put_explain_delete(client: Client) -> None:
    policy = client.policy(f"p:{uuid.uuid4().hex[:12]}")
    assert policy.get().version == 0
    sources = {"runtime": {"languages": ["bash"]}}
    assert policy.put(settings=POLICY, sources=sources, version=0).version == 1
    with pytest.raises(Conflict):
        policy.put(settings=POLICY, version=0)
    assert policy.put(sources=None).settings == POLICY, "what is not given stays"
    assert policy.get().sources is None
    assert policy.explain("curl x").verdict == "deny"
    assert policy.explain(["id"], cwd="a").verdict == "ask"
    with pytest.raises(InvalidRequest):
        policy.put(settings={"permissions": {"allow": [object()]}})
    with pytest.raises(InvalidRequest):
        policy.put(settings={"permissions": {"allow": ["shell("]}})
    policy.delete()
    assert policy.get().settings is None


def test_an_agent_does_not_get_rid_of_its_rules_by_deleting_its_context(client: Client) -> None:
    context = f"p-{uuid.uuid4().hex[:12]}"
    policy = client.policy(context)
    policy.put(settings=POLICY)
    token = client.tokens.create(f"agent-{context}", kind="agent", scopes=["operate"])
    try:
        with Client(client.url, token.token) as agent:
            agent.sandbox(context).terminate(delete_files=True)
            box = agent.sandbox(context)
            with pytest.raises(Denied):
                box.commands.run("curl x")
            box.terminate(delete_files=True)
    finally:
        client.tokens.revoke(token.id)
        policy.delete()
