from __future__ import annotations

import asyncio

import pytest

from carrel.models import ApprovalScope, ApprovalState
from carrel.store import Database
from carrel.store.approvals import ApprovalRecord, ApprovalStore


def _record(name: str, **values: object) -> ApprovalRecord:
    fields: dict[str, object] = {
        "id": name, "context_id": "c", "sandbox_id": "sbx-1", "kind": "shell", "operation": "run_command",
        "summary": "git push\0", "arguments": {"command": "git push"}, "digest": "d", "reason": "no rule",
        "requested_by": "agent:a", "created_at": 1.0, "expires_at": 100.0,
    }  # fmt: skip
    return ApprovalRecord(**{**fields, **values})  # type: ignore[arg-type]


async def test_only_one_decides_and_only_one_uses(database: Database) -> None:
    store = ApprovalStore(database)
    await store.insert(_record("a"))
    found = await store.pending("c", "d", 50.0)
    assert found is not None and (found.id, found.summary) == ("a", "git push\ufffd")
    assert await store.pending("c", "d", 100.0) is None
    assert await store.pending(None, "d", 50.0) is None
    assert not await store.use("a", 2.0), "nobody approved it"
    tries = [store.decide("a", ApprovalState.APPROVED, by=str(n), at=50.0, scope=ApprovalScope.ONCE) for n in range(8)]
    assert sum(await asyncio.gather(*tries)) == 1
    assert sum(await asyncio.gather(*(store.use("a", 60.0) for _ in range(8)))) == 1
    used = await store.get("a")
    assert used is not None and (used.state, used.scope, used.used_at) == ("approved", "once", 60.0)
    assert await store.get("absent") is None
    assert used.info().used_at is not None


async def test_what_is_too_late(database: Database) -> None:
    store = ApprovalStore(database)
    await store.insert(_record("a"))
    await store.insert(_record("b", expires_at=500.0, digest="e"))
    assert not await store.decide("a", ApprovalState.DENIED, by="p", at=100.0)
    assert await store.expire(100.0) == 1
    assert await store.expire(100.0) == 0
    assert await store.decide("b", ApprovalState.DENIED, by="p", at=100.0, message="no")
    assert [record.id for record in (await store.page(limit=9, states=[ApprovalState.EXPIRED]))[0]] == ["a"]


async def test_a_grant_for_the_context(database: Database) -> None:
    store = ApprovalStore(database)
    await store.insert(_record("a"))
    assert await store.granted("c", "d") is None
    await store.decide("a", ApprovalState.APPROVED, by="p", at=1.0, scope=ApprovalScope.CONTEXT)
    granted = await store.granted("c", "d")
    assert granted is not None and granted.id == "a"
    assert await store.granted("other", "d") is None
    await store.insert(_record("b"))
    assert await store.forget("other") == 0
    for name in ("once", "used"):
        await store.insert(_record(name))
        assert await store.decide(name, ApprovalState.APPROVED, by="ann", at=1.0, scope=ApprovalScope.ONCE)
    assert await store.use("used", 2.0)
    assert await store.forget("c") == 3, "what was given for good, what still waits, and what was not used"
    assert await store.granted("c", "d") is None and await store.pending("c", "d", 1.0) is None
    assert await store.ready("c", "d", 0.0) is None and not await store.use("once", 3.0)
    assert await store.forget("c") == 0


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_pages(database: Database, limit: int) -> None:
    store = ApprovalStore(database)
    for number in range(5):
        await store.insert(_record(f"a{number}", created_at=float(number // 2), context_id="c" if number else None))
    seen, cursor = [], None
    while True:
        records, cursor = await store.page(limit=limit, cursor=cursor)
        seen += [record.id for record in records]
        if cursor is None:
            break
    assert seen == ["a4", "a3", "a2", "a1", "a0"]
    assert len((await store.page(limit=9, context_id="c"))[0]) == 4


async def test_a_run_is_known_until_it_has_ended(database: Database) -> None:
    store = ApprovalStore(database)
    for name in ("a", "b"):
        await store.insert(_record(name))
        await store.decide(name, ApprovalState.APPROVED, by="p", at=50.0, scope=ApprovalScope.ONCE)
    assert await store.use("a", 60.0, run="one", node="n", place="i") and await store.use(
        "b", 61.0, run="two", node="m"
    )
    [record] = await store.runs("n")
    assert (record.id, record.run, record.run_in) == ("a", "one", "i")
    assert "run" not in record.info().model_dump()
    assert not await store.ended("a", "other", used=False)
    assert await store.ended("a", "one", used=False) and await store.runs("n") == []
    assert await store.use("a", 70.0, run="three", node="n"), "it was given back"
    assert await store.ended("a", "three", used=True) and not await store.ended("a", "three", used=False)
    assert not await store.use("a", 80.0, run="four", node="n")
    assert [record.id for record in await store.runs("m")] == ["b"]


async def test_what_was_settled_long_ago_goes(database: Database) -> None:
    store = ApprovalStore(database)
    decided = {"denied": ApprovalState.DENIED, "once": ApprovalState.APPROVED, "lasting": ApprovalState.APPROVED}
    for name in ("waits", "expired", "late", *decided):
        await store.insert(_record(name, digest=name, expires_at=1e6 if name == "waits" else 100.0))
    for name, state in decided.items():
        scope = ApprovalScope.CONTEXT if name == "lasting" else ApprovalScope.ONCE
        await store.decide(name, state, by="p", at=50.0, scope=scope)
    await store.decide("late", ApprovalState.APPROVED, by="p", at=99.0, scope=ApprovalScope.ONCE)
    assert await store.use("once", 60.0) and await store.use("late", 500.0)
    await store.expire(200.0)
    assert await store.prune(100.0) == 0
    assert await store.prune(400.0) == 3
    left, _ = await store.page(limit=9)
    assert {record.id for record in left} == {"waits", "late", "lasting"}
    assert await store.prune(1e9) == 1, "what still waits, and what holds for a context, stays"
    await store.forget("c")
    assert await store.prune(1e9) == 2, "until its context is gone"
