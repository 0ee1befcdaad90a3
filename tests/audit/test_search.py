from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.support.no_events import no_event

from carrel.audit import AuditEntry, AuditLog, Ending, Filter, SigningKey, chain_of, server_chain
from carrel.audit.search import search
from carrel.errors import InvalidRequest, PlatformError
from carrel.models import AuditRecord
from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.tables import audit_records

WORDS = ["git push", "50%_off", "Ünïcode 💡", 'quo"te\\slash', "plain"]


async def filled(store: AuditStore, key: SigningKey, count: int = 120) -> tuple[AuditLog, list[AuditRecord]]:
    """A log with operations of every kind, and what they are, newest first."""
    rng = random.Random(1)
    clock = itertools.count(1000)
    log = AuditLog(store, key, "n", no_event, clock=lambda: float(next(clock)), flush_s=3600, head_records=50)
    await log.open()
    for number in range(count):
        entry = AuditEntry(
            chain_of(f"c{number % 3}"),
            rng.choice(["agent:a", "agent:b", "person:p"]),
            rng.choice(["shell", "file", "mcp"]),
            rng.choice(["run_command", "read", "write"]),
            arguments={"text": rng.choice(WORDS), "number": number},
            request=f"r{number}",
        )
        if rng.random() < 0.2:
            log.record(replace(entry, decision="deny", rule="shell(x)"), Ending("denied_by_policy"))
            continue
        ticket = await log.begin(entry)
        if rng.random() < 0.9:
            ticket.end(Ending(rng.choice(["ok", "ok", "timeout"]), 1.0, number, 2))
    await log.flush()
    return log, await everything(log, Filter())


async def everything(log: AuditLog, wanted: Filter, limit: int = 1000) -> list[AuditRecord]:
    found: list[AuditRecord] = []
    cursor = None
    while True:
        page = await log.search(wanted, limit=limit, cursor=cursor)
        found += page.items
        assert len(page.items) <= limit
        if page.next is None:
            return found
        cursor = page.next


async def test_every_filter_and_every_two(store: AuditStore, key: SigningKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrel.store.audit_search.WINDOW", 37)
    log, known = await filled(store, key)
    assert [item.arguments["number"] for item in known] == list(range(119, -1, -1))
    middle = known[60].at.timestamp()
    cases = {
        "chain": [chain_of("c1"), "context:absent"],
        "actor": ["agent:b"],
        "kind": ["mcp"],
        "name": ["read"],
        "decision": ["allow", "deny", "ask"],
        "result": ["ok", "timeout", "denied_by_policy", "unknown"],
        "since": [middle],
        "until": [middle],
        "text": [*WORDS, "GIT PUSH", "absent", "text"],
    }
    single = [(name, value) for name, values in cases.items() for value in values]

    def right(item: AuditRecord, name: str, value: object) -> bool:
        if name == "since":
            return item.at.timestamp() >= middle
        if name == "until":
            return item.at.timestamp() <= middle
        if name == "text":
            return str(value) == "text" or str(value).casefold() in str(item.arguments["text"]).casefold()
        return bool(getattr(item, name) == value)

    pairs = [(one,) for one in single] + [
        (one, other) for one, other in itertools.combinations(single, 2) if one[0] != other[0]
    ]
    rng = random.Random(2)
    for wanted in pairs[: len(single)] + rng.sample(pairs, 60):
        expected = [item for item in known if all(right(item, *one) for one in wanted)]
        # By an end or by a begin, the order is that of what was looked for.
        found = await everything(log, Filter(**dict(wanted)), limit=rng.choice([1, 7, 50]))  # type: ignore[arg-type]
        assert sorted(item.request or "" for item in found) == sorted(item.request or "" for item in expected), wanted
        assert sorted(found, key=str) == sorted(expected, key=str)
    await log.close()


async def test_both_halves_are_shown_as_one(store: AuditStore, key: SigningKey) -> None:
    log = AuditLog(store, key, "n", no_event)
    await log.open()
    ticket = await log.begin(AuditEntry(chain_of("c"), "agent:a", "shell", "run_command", rule="shell(ls)", source="s", agent="a",
                                   arguments={"command": "ls"}, arguments_hash="ab", approval="apr-1", request="r1"))  # fmt: skip
    [running] = (await log.search(Filter())).items
    assert (running.result, running.context_id, running.node, running.seq) == (None, "c", "n", 1)
    ticket.end(Ending("timeout", 3.5, 10, 20, "too slow"))
    log.record(AuditEntry(server_chain("n"), "person:p", "session", "create_token"), Ending())
    await log.flush()
    for wanted in (Filter(name="run_command"), Filter(result="timeout"), Filter(text="LS", result="timeout")):
        [done] = (await log.search(wanted)).items
        assert done.model_dump(exclude={"at", "chain"}) == {
            "seq": 1, "context_id": "c", "namespace": "default", "agent": "a", "node": "n",
            "actor": "agent:a", "kind": "shell", "name": "run_command",
            "decision": "allow", "rule": "shell(ls)", "source": "s", "approval": "apr-1", "request": "r1",
            "arguments": {"command": "ls"}, "truncated": False, "arguments_hash": "ab", "result": "timeout",
            "reason": "too slow", "duration_ms": 3.5, "bytes_in": 10, "bytes_out": 20,
        }  # fmt: skip
    assert [item.name for item in (await log.search(Filter(result="ok"))).items] == ["create_token"]
    await log.close()


async def test_what_cannot_be_asked(store: AuditStore) -> None:
    for wanted, limit, field in ((Filter(), 0, "limit"), (Filter(), 1001, "limit"), (Filter(text=""), 1, "text")):
        with pytest.raises(InvalidRequest) as caught:
            await search(store, wanted, limit=limit, cursor=None)
        assert caught.value.field == field
    with pytest.raises(InvalidRequest) as caught:
        await search(store, Filter(), limit=1, cursor="nonsense")
    assert caught.value.field == "cursor"


async def test_a_damaged_record_is_told_of(database: Database, store: AuditStore, key: SigningKey) -> None:
    log, _ = await filled(store, key, 3)
    await log.close()
    for body in ("no json", "[]", '{"at":1}'):
        change = audit_records.update().values(body=body)
        await database.write(lambda connection, change=change: connection.execute(change).close())  # type: ignore[misc]
        with pytest.raises(PlatformError, match="damaged"):
            await search(store, Filter(), limit=1, cursor=None)
