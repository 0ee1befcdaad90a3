from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import Connection

from carrel import identity as module
from carrel.errors import CarrelError, Denied, InvalidRequest, NotFound, Unauthorized
from carrel.identity import (
    LISTED,
    PREFIX,
    ROOT,
    SCOPES,
    Grant,
    Identity,
    OwnerKind,
    Scope,
    Token,
    Tokens,
    may_decide,
    scope_of,
)
from carrel.models.base import namespace_of
from carrel.models.operations import OPERATIONS
from carrel.store import Database
from carrel.store.tokens import TokenStore

AGENT = Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
PERSON = Identity("person:p", OwnerKind.PERSON, frozenset({Scope.APPROVE}))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenStore]:
    database = await Database.open(str(tmp_path / "carrel.db"))
    yield TokenStore(database)
    await database.close()


def _nobody(_token_id: str) -> None:
    return


@pytest.fixture
def tokens(store: TokenStore, clock: Clock) -> Tokens:
    return Tokens(store, "carrel_root", _nobody, clock)


# scopes


def test_every_operation_of_the_api_is_declared() -> None:
    from carrel.api import app
    from carrel.api.guard import OperationRoute

    modules = [getattr(app, name) for name in vars(app) if hasattr(getattr(app, name), "router")]
    assert len(modules) > 5
    routes = [route for each in modules for route in each.router.routes if isinstance(route, OperationRoute)]
    missing = {route.row.id for route in routes} - OPERATIONS.keys()
    assert not missing, f"give these a row in carrel/models/operations.py: {missing}"


def test_each_operation_has_one_scope() -> None:
    names = [name for each in SCOPES for name in each.operations]
    assert len(names) == len(set(names)) and set(names) >= LISTED
    assert [each.scope for each in SCOPES] == list(Scope)


@given(st.text())
def test_what_nobody_declared_is_for_administrators(name: str) -> None:
    if name not in OPERATIONS:
        assert scope_of(name) is Scope.ADMINISTER
        assert ROOT.may(name) is None
        for scope in (Scope.READ, Scope.OPERATE, Scope.APPROVE):
            assert isinstance(Identity("x", OwnerKind.PERSON, frozenset({scope})).may(name), Denied)


def test_what_scopes_include() -> None:
    wanted = {
        Scope.READ: {"read_file"},
        Scope.OPERATE: {"read_file", "run_command"},
        Scope.APPROVE: {"read_file", "decide_approval"},
        Scope.ADMINISTER: {"read_file", "run_command", "decide_approval", "create_token"},
    }
    every = set().union(*wanted.values())
    for scope, allowed in wanted.items():
        identity = Identity("x", OwnerKind.SERVICE, frozenset({scope}))
        assert {name for name in every if identity.may(name, "c") is None} == allowed
    assert Identity("x", OwnerKind.PERSON, frozenset()).may("read_file", "c") is not None


def test_a_refusal_says_what_and_why() -> None:
    refused = AGENT.may("create_token")
    assert refused is not None and refused.hint
    problem = refused.problem()
    assert problem["code"] == "denied_by_policy" and problem["operation"] == "create_token"
    assert (refused.rule, refused.reason, problem["source"]) == (
        "scope(administer)",
        "agents may not do this",
        "agent:a",
    )
    refused = Identity("x", OwnerKind.PERSON, frozenset({Scope.READ}), token_id="tok-1").may("run_command", "c")
    assert refused is not None and "'operate'" in refused.reason and refused.problem()["source"] == "token tok-1"


def test_reach() -> None:
    assert [namespace_of(name) for name in ("a", "team:a", "team:a:b", ":a")] == ["default", "team", "team", ""]
    team = Identity("x", OwnerKind.AGENT, frozenset({Scope.OPERATE}), namespace="team")
    two = Identity("x", OwnerKind.AGENT, frozenset({Scope.OPERATE}), contexts=frozenset({"a", "team:b"}))
    both = Identity("x", OwnerKind.AGENT, frozenset({Scope.OPERATE}), "team", frozenset({"a", "team:b"}))
    for identity, inside in ((team, {"team:a", "team:b"}), (two, {"a", "team:b"}), (both, {"team:b"})):
        for context in ("a", "b", "team:a", "team:b", "teams:a", "team"):
            assert identity.reaches(context) == (context in inside)
            assert (identity.may("run_command", context) is None) == (context in inside)
        refused = identity.may("run_command")
        assert refused is not None, "an ephemeral sandbox belongs to nobody"
        assert (refused.hint or "").startswith("name a context")
        assert identity.may("search_audit") is not None and identity.may("get_metrics") is not None
        assert identity.may("list_sandboxes") is None, "the list shows what is in reach"
    assert AGENT.may("run_command") is None and AGENT.may("search_audit") is None


# approving


def test_no_agent_approves_whatever_its_token_says() -> None:
    for scopes in ({Scope.APPROVE}, {Scope.ADMINISTER}, set(Scope)):
        agent = Identity("agent:x", OwnerKind.AGENT, frozenset(scopes))
        for operation in ("decide_approval", "decide_approvals", "create_token", "put_policy"):
            assert agent.may(operation, "c") is not None
        assert may_decide(agent, "agent:other") is not None


def test_nobody_approves_what_they_asked_for() -> None:
    assert may_decide(PERSON, "agent:a") is None
    own = may_decide(PERSON, "person:p")
    assert own is not None and own.rule == "own request" and own.hint
    assert may_decide(ROOT, "administrator") is not None and may_decide(ROOT, "agent:a") is None
    assert may_decide(Identity("person:q", OwnerKind.PERSON, frozenset({Scope.OPERATE})), "agent:a") is not None
    near = Identity("person:p", OwnerKind.PERSON, frozenset({Scope.APPROVE}), contexts=frozenset({"c"}))
    assert may_decide(near, "agent:a", "c") is None and may_decide(near, "agent:a", "d") is not None


# tokens


async def test_a_token_is_shown_once_and_known_by_its_hash(tokens: Tokens, store: TokenStore, clock: Clock) -> None:
    grant = Grant("deploy", OwnerKind.SERVICE, [Scope.OPERATE, Scope.READ], "team", ["team:a"], 2000.0)
    text, token = await tokens.issue(grant, ROOT)
    assert text.startswith(PREFIX) and len(text) == len(PREFIX) + 43
    kept = await store.get(token.id)
    assert kept is not None and text not in str(kept) and text not in str(token)
    identity = await tokens.identify(text)
    assert identity == await tokens.identify(text.encode())
    assert (identity.subject, identity.kind, identity.namespace, identity.token_id) == (
        "service:deploy", OwnerKind.SERVICE, "team", token.id,
    )  # fmt: skip
    assert identity.scopes == {Scope.OPERATE, Scope.READ} and identity.contexts == {"team:a"}
    assert (await tokens.get(token.id)).used_at == 1000.0 and token.created_by == "administrator"
    clock.now = 2000.0
    with pytest.raises(Unauthorized, match="expired"):
        await tokens.identify(text)


async def test_a_token_by_its_id_is_as_good_as_the_token(
    tokens: Tokens, store: TokenStore, clock: Clock, queries: list[object]
) -> None:
    text, token = await tokens.issue(Grant("a", OwnerKind.AGENT, [Scope.READ], None, ["c"], 5000.0), ROOT)
    assert await tokens.of_id(token.id) == await tokens.identify(text)
    queries.clear()
    assert (await tokens.of_id(token.id)).token_id == token.id and not queries
    for wrong in ("tok-absent", "", token.hash, text):
        with pytest.raises(Unauthorized):
            await tokens.of_id(wrong)
    elsewhere = Tokens(store, None, _nobody, clock)
    await elsewhere.of_id(token.id)
    await tokens.revoke(token.id)
    with pytest.raises(Unauthorized, match="revoked"):
        await tokens.of_id(token.id)
    clock.now += module.CACHE_S
    with pytest.raises(Unauthorized, match="revoked"):
        await elsewhere.of_id(token.id)
    _, short = await tokens.issue(Grant("b", OwnerKind.AGENT, [Scope.READ], expires_at=clock.now + 1), ROOT)
    await tokens.of_id(short.id)
    clock.now += 1
    with pytest.raises(Unauthorized, match="expired"):
        await tokens.of_id(short.id)


async def test_use_is_noted_now_and_then(tokens: Tokens, clock: Clock) -> None:
    text, token = await tokens.issue(Grant("a", OwnerKind.AGENT, [Scope.READ]), ROOT)
    seen = []
    for seconds in (0, 10, 3000, 700):
        clock.now += seconds
        await tokens.identify(text)
        seen.append((await tokens.get(token.id)).used_at)
    assert seen == [1000.0, 1000.0, 1000.0, 4710.0]


async def test_the_root_token_and_none_else(tokens: Tokens, store: TokenStore) -> None:
    assert await tokens.identify("carrel_root") is ROOT
    for wrong in (
        "",
        "carrel_",
        "carrel_roo",
        "carrel_root ",
        "x" * 10_000,
        "carrel_" + "x" * 600,
        "carrel_ü",
        b"\xff",
    ):
        with pytest.raises(Unauthorized):
            await tokens.identify(wrong)
    with pytest.raises(Unauthorized):
        await Tokens(store, None, _nobody).identify("carrel_root")


@given(st.text(st.characters()) | st.binary())
def test_no_token_ends_in_a_traceback(given: str | bytes) -> None:
    class Nothing(TokenStore):
        async def of_new_hash(self, hash: str) -> None:
            return None

    with pytest.raises(CarrelError):
        asyncio.run(Tokens(Nothing(None), None, _nobody).identify(given))  # type: ignore[arg-type]


async def test_revoked_at_once_here_and_soon_elsewhere(tokens: Tokens, store: TokenStore, clock: Clock) -> None:
    text, token = await tokens.issue(Grant("a", OwnerKind.AGENT, [Scope.READ]), ROOT)
    elsewhere = Tokens(store, None, _nobody, clock)
    for each in (tokens, elsewhere):
        await each.identify(text)
    assert (await tokens.revoke(token.id)).revoked_at == 1000.0
    assert (await tokens.revoke(token.id)).revoked_at == 1000.0, "twice is no error"
    with pytest.raises(Unauthorized, match="revoked"):
        await tokens.identify(text)
    await elsewhere.identify(text)
    clock.now += module.CACHE_S
    with pytest.raises(Unauthorized, match="revoked"):
        await elsewhere.identify(text)
    with pytest.raises(NotFound):
        await tokens.revoke("tok-absent")


async def test_a_lookup_that_is_under_way_keeps_no_revoked_token(
    store: TokenStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(store, None, _nobody, clock)
    text, token = await tokens.issue(Grant("a", OwnerKind.AGENT, [Scope.READ]), ROOT)
    looked, go = asyncio.Event(), asyncio.Event()
    used = store.used

    async def slow(token_id: str, at: float) -> None:
        looked.set()
        await go.wait()
        await used(token_id, at)

    monkeypatch.setattr(store, "used", slow)
    asking = asyncio.ensure_future(tokens.identify(text))
    await looked.wait()
    await tokens.revoke(token.id)
    go.set()
    with pytest.raises(Unauthorized, match="revoked"):
        await asking
    with pytest.raises(Unauthorized):
        await tokens.identify(text)


async def test_the_cache_is_bounded_and_spares_the_database(
    store: TokenStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHE_SIZE", 2)
    tokens = Tokens(store, "carrel_root", _nobody, clock)
    texts = [(await tokens.issue(Grant(f"t{number}", OwnerKind.AGENT, [Scope.READ]), ROOT))[0] for number in range(3)]
    looked = 0
    of_hash = store.of_new_hash

    async def counted(hash: str) -> object:
        nonlocal looked
        looked += 1
        return await of_hash(hash)

    monkeypatch.setattr(store, "of_new_hash", counted)
    for text in (texts[0], texts[0], texts[1], texts[0], texts[2], texts[0]):
        await tokens.identify(text)
    assert looked == 3
    await tokens.identify(texts[1])
    assert looked == 4, "the one that was used least recently had to go"


@pytest.fixture
def queries(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the database was asked for."""
    asked: list[object] = []
    read = store._database.read

    async def counted(work: Callable[[Connection], object]) -> object:
        asked.append(work)
        return await read(work)

    monkeypatch.setattr(store._database, "read", counted)
    return asked


async def test_made_up_tokens_neither_load_the_database_nor_lock_out_real_ones(
    tokens: Tokens, clock: Clock, queries: list[object]
) -> None:
    texts = [(await tokens.issue(Grant(name, OwnerKind.AGENT, [Scope.READ]), ROOT))[0] for name in "abc"]
    await tokens.identify(texts[0])
    before = len(queries)
    made_up = [asyncio.ensure_future(failure(tokens, f"carrel_{number}")) for number in range(2000)]
    await asyncio.sleep(0)
    clock.now += module.CACHE_S
    found = await asyncio.gather(*(tokens.identify(text) for text in texts))
    assert [each.subject for each in found] == ["agent:a", "agent:b", "agent:c"]
    assert set(await asyncio.gather(*made_up)) == {"unauthorized"}
    assert len(queries) - before <= 10


async def test_a_made_up_token_is_looked_up_once(tokens: Tokens, clock: Clock, queries: list[object]) -> None:
    for _ in range(1000):
        assert await failure(tokens, "carrel_the-same-again") == "unauthorized"
    assert len(queries) == 1
    clock.now += module.CACHE_S
    assert await failure(tokens, "carrel_the-same-again") == "unauthorized"
    assert len(queries) == 2


async def test_a_token_made_on_another_server_works_at_once(tokens: Tokens, store: TokenStore, clock: Clock) -> None:
    await failure(tokens, "carrel_made-up")
    text, _ = await Tokens(store, None, _nobody, clock).issue(Grant("a", OwnerKind.AGENT, [Scope.READ]), ROOT)
    assert (await tokens.identify(text)).subject == "agent:a"


async def failure(tokens: Tokens, text: str) -> str:
    with pytest.raises(CarrelError) as caught:
        await tokens.identify(text)
    return caught.value.code


async def test_whoever_wants_to_know_is_told_of_a_revoked_token(
    tokens: Tokens, store: TokenStore, clock: Clock
) -> None:
    made = [(await tokens.issue(Grant(name, OwnerKind.AGENT, [Scope.READ]), ROOT))[1].id for name in "abc"]
    told: list[str] = []
    tokens = Tokens(store, None, told.append, clock)
    await tokens.revoke(made[0])
    await Tokens(store, None, _nobody, clock).revoke(made[1])
    assert told == [made[0]]
    assert set(await tokens.revoked([*made, "tok-absent"])) == set(made[:2])
    assert not await tokens.revoked([])


@pytest.mark.parametrize(
    ("grant", "field"),
    [
        (Grant("", OwnerKind.PERSON, [Scope.READ]), "name"),
        (Grant("a b", OwnerKind.PERSON, [Scope.READ]), "name"),
        (Grant("a" * 129, OwnerKind.PERSON, [Scope.READ]), "name"),
        (Grant("a", OwnerKind.PERSON, []), "scopes"),
        (Grant("a", OwnerKind.AGENT, [Scope.READ, Scope.APPROVE]), "scopes"),
        (Grant("a", OwnerKind.AGENT, [Scope.ADMINISTER]), "scopes"),
        (Grant("a", OwnerKind.PERSON, [Scope.READ], "team:x"), "namespace"),
        (Grant("a", OwnerKind.PERSON, [Scope.READ], None, []), "contexts"),
        (Grant("a", OwnerKind.PERSON, [Scope.READ], None, ["a b"]), "contexts"),
        (Grant("a", OwnerKind.PERSON, [Scope.READ], "team", ["other:a"]), "contexts"),
        (Grant("a", OwnerKind.PERSON, [Scope.READ], expires_at=1000.0), "expires_at"),
        (Grant("a", OwnerKind.PERSON, [Scope.READ], expires_at=float("nan")), "expires_at"),
    ],
)
async def test_what_no_token_can_be(tokens: Tokens, store: TokenStore, grant: Grant, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tokens.issue(grant, ROOT)
    assert caught.value.field == field
    assert await tokens.page() == ([], None)


async def test_nobody_gives_more_than_they_have(tokens: Tokens) -> None:
    for identity in (AGENT, PERSON, Identity("agent:r", OwnerKind.AGENT, frozenset({Scope.ADMINISTER}))):
        with pytest.raises(Denied):
            await tokens.issue(Grant("a", OwnerKind.PERSON, [Scope.READ]), identity)
    team = Identity("person:t", OwnerKind.PERSON, frozenset({Scope.ADMINISTER}), namespace="team")
    for wrong in (Grant("a", OwnerKind.PERSON, [Scope.READ]), Grant("a", OwnerKind.PERSON, [Scope.READ], "other")):
        with pytest.raises(InvalidRequest):
            await tokens.issue(wrong, team)
    await tokens.issue(Grant("a", OwnerKind.PERSON, [Scope.READ], "team"), team)
    few = Identity("person:f", OwnerKind.PERSON, frozenset({Scope.ADMINISTER}), contexts=frozenset({"a", "b"}))
    for contexts in (None, ["a", "c"]):
        with pytest.raises(InvalidRequest):
            await tokens.issue(Grant("a", OwnerKind.PERSON, [Scope.READ], contexts=contexts), few)
    _, token = await tokens.issue(Grant("a", OwnerKind.PERSON, [Scope.READ], contexts=["b"]), few)
    assert token.created_by == "person:f"
    short = Identity("person:s", OwnerKind.PERSON, frozenset({Scope.ADMINISTER}), expires_at=2000.0)
    for expires in (None, 2000.1):
        with pytest.raises(InvalidRequest, match="cannot expire later"):
            await tokens.issue(Grant("a", OwnerKind.PERSON, [Scope.READ], expires_at=expires), short)
    await tokens.issue(Grant("a", OwnerKind.PERSON, [Scope.READ], expires_at=2000.0), short)


async def test_what_a_newer_carrel_wrote_gives_no_rights(tokens: Tokens, store: TokenStore) -> None:
    text, token = await tokens.issue(Grant("a", OwnerKind.PERSON, [Scope.READ]), ROOT)
    await store.insert(
        token._replace(id="tok-2", hash=module.hashed("carrel_new"), kind="robot", scopes=("fly", "read"))
    )  # type: ignore[arg-type]
    found = await tokens.identify("carrel_new")
    assert (found.kind, found.scopes) == (OwnerKind.AGENT, {Scope.READ})
    listed, _ = await tokens.page()
    assert {each.id for each in listed} == {token.id, "tok-2"} and all(isinstance(each, Token) for each in listed)
    assert await tokens.identify(text)
