from __future__ import annotations

import time

import pytest

from carrel.audit import Filter
from carrel.control.governance.agent_token import agent_token
from carrel.control.plane import ControlPlane
from carrel.errors import Denied
from carrel.identity import ROOT, Grant, OwnerKind, Scope, Tokens, may_decide
from carrel.store.tokens import TokenStore

ADMINISTRATORS = "carrel_of_the_administrator"


@pytest.fixture
def tokens(plane: ControlPlane) -> Tokens:
    return Tokens(TokenStore(plane._database), ADMINISTRATORS, plane.requests.revoked)


async def test_new_token_is_an_agents_and_decides_nothing(plane: ControlPlane, tokens: Tokens) -> None:
    identity = await tokens.identify(await agent_token(tokens, plane.audit, None, None))
    assert (identity.subject, identity.kind, identity.scopes) == ("agent:local", OwnerKind.AGENT, {Scope.OPERATE})
    assert identity.may("run_command", "any") is None and identity.may("deploy_or_resume", None) is None
    for refused in (may_decide(identity, "agent:other", "any"), identity.may("put_policy", "any")):
        assert isinstance(refused, Denied)
    assert may_decide(ROOT, identity.subject, "any") is None, "the administrator decides what it asks for"
    page = await plane.audit.search(Filter(name="create_token"), limit=10)
    assert [record.actor for record in page.items] == [plane.audit.node]


async def test_good_token_is_kept(plane: ControlPlane, tokens: Tokens) -> None:
    kept = await agent_token(tokens, plane.audit, None, None)
    assert await agent_token(tokens, plane.audit, kept, None) == kept
    assert len((await tokens.page())[0]) == 1


async def test_token_that_is_no_good_is_made_anew(plane: ControlPlane, tokens: Tokens) -> None:
    revoked = await agent_token(tokens, plane.audit, None, None)
    await tokens.revoke((await tokens.identify(revoked)).token_id or "")
    soon = time.time() + 0.05
    expired, _ = await tokens.issue(Grant("late", OwnerKind.AGENT, [Scope.OPERATE], expires_at=soon), ROOT)
    while time.time() <= soon:
        pass
    person, _ = await tokens.issue(Grant("ann", OwnerKind.PERSON, [Scope.OPERATE]), ROOT)
    reader, _ = await tokens.issue(Grant("reader", OwnerKind.AGENT, [Scope.READ]), ROOT)
    for text in (revoked, expired, person, reader, ADMINISTRATORS, "carrel_of_another_database", "nonsense"):
        made = await agent_token(tokens, plane.audit, text, None)
        assert made != text and (await tokens.identify(made)).subject == "agent:local"


async def test_servers_on_one_database_have_agents_of_their_own(plane: ControlPlane, tokens: Tokens) -> None:
    identity = await tokens.identify(await agent_token(tokens, plane.audit, None, "node-1"))
    assert identity.subject == "agent:local@node-1"
