from __future__ import annotations

import asyncio

import pytest

from carrel.errors import LimitExceeded
from carrel.models import Limits, Network, State, Trust
from carrel.secrets import Sealed, Vault, rewrap
from carrel.store import Database, SecretStore, SessionRecord, SessionStore
from carrel.store.secrets import MOST, MOST_FORMER, ScopeKind, SecretInfo, places_of


@pytest.fixture
def store(database: Database) -> SecretStore:
    return SecretStore(database)


async def put(store: SecretStore, kind: ScopeKind, scope: str, name: str, *, sealed: bytes, key_id: str) -> SecretInfo:
    """Store a secret that no running sandbox gets."""
    return await store.put(kind, scope, name, sealed=sealed, key_id=key_id, sandboxes=(), check=lambda _sizes: None)


async def test_a_secret_is_put_again_and_again(store: SecretStore) -> None:
    first = await put(store, "context", "c", "TOKEN", sealed=b"\x00one", key_id="k1")
    assert (first.kind, first.scope, first.name, first.version) == ("context", "c", "TOKEN", 1)
    assert first.created_at == first.updated_at > 0
    second = await put(store, "context", "c", "TOKEN", sealed=b"two", key_id="k2")
    assert (second.version, second.created_at) == (2, first.created_at)
    assert second.updated_at >= first.updated_at
    record = await store.get("context", "c", "TOKEN")
    assert record is not None
    assert (record.sealed, record.key_id, record.version) == (b"two", "k2", 2)
    assert await store.get("context", "c", "OTHER") is None
    assert await store.get("template", "c", "TOKEN") is None
    assert await store.delete("context", "c", "TOKEN")
    assert not await store.delete("context", "c", "TOKEN")


async def test_lists_show_no_value(store: SecretStore) -> None:
    for name in ("B", "A"):
        await put(store, "context", "c", name, sealed=b"sealed-value", key_id="k")
    await put(store, "context", "d", "C", sealed=b"x", key_id="k")
    await put(store, "template", "c", "D", sealed=b"x", key_id="k")
    listed = await store.list("context", "c")
    assert [info.name for info in listed] == ["A", "B"]
    assert not hasattr(listed[0], "sealed")
    assert "sealed-value" not in repr(listed) + repr(await store.get("context", "c", "A"))


async def test_the_context_beats_the_templates_and_the_first_template_the_next(store: SecretStore) -> None:
    for kind, scope, names in (
        ("context", "c", "A"),
        ("template", "t1", "AB"),
        ("template", "t2", "ABC"),
        ("template", "c", "E"),
        ("context", "t1", "F"),
    ):
        for name in names:
            await put(store, kind, scope, name, sealed=f"{kind}-{scope}".encode(), key_id="k")  # type: ignore[arg-type]

    async def effective(context: str | None, *templates: str) -> dict[str, str]:
        return {record.name: record.sealed.decode() for record in await store.of_scope(context, templates)}

    assert await effective("c", "t1", "t2") == {"A": "context-c", "B": "template-t1", "C": "template-t2"}
    assert await effective(None, "t2", "t1") == {"A": "template-t2", "B": "template-t2", "C": "template-t2"}
    assert await effective("c") == {"A": "context-c"}
    assert await effective("other") == await effective(None) == {}


async def test_many_puts_at_once_are_all_counted(store: SecretStore) -> None:
    await asyncio.gather(
        *(put(store, "context", "c", "TOKEN", sealed=b"%d" % number, key_id="k") for number in range(12))
    )
    record = await store.get("context", "c", "TOKEN")
    assert record is not None and record.version == 12


async def test_a_scope_has_its_limit(store: SecretStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST == 256
    monkeypatch.setattr("carrel.store.secrets.MOST", few := 20)
    for number in range(few):
        await put(store, "context", "c", f"N{number}", sealed=b"x", key_id="k")
    with pytest.raises(LimitExceeded):
        await put(store, "context", "c", "ONE_MORE", sealed=b"x", key_id="k")
    await put(store, "context", "c", "N1", sealed=b"y", key_id="k")
    await put(store, "context", "d", "N1", sealed=b"y", key_id="k")
    assert await store.forget("context", "c") == few
    assert await store.list("context", "c") == [] and await store.former("c") == []
    assert len(await store.list("context", "d")) == 1


async def test_the_key_is_changed_under_the_secrets(store: SecretStore, database: Database) -> None:
    old, new = Vault(bytes(32)), Vault(bytes(range(32)))
    for number in range(5):
        for time in ("former", "value"):
            sealed = old.seal("context", "c", f"N{number}", f"{time} {number}")
            await put(store, "context", "c", f"N{number}", sealed=sealed.data, key_id=sealed.key_id)
    mine = new.seal("template", "t", "NEW", "already new")
    await put(store, "template", "t", "NEW", sealed=mine.data, key_id=mine.key_id)
    remembered = await store.former("c", ["t"])
    mark = await store.mark()
    assert await store.not_sealed_with(new.key_id) == 10
    assert await rewrap(store, old, new, batch=2) == (5, 5)
    assert await rewrap(store, old, new) == await rewrap(store, old, old) == (0, 0)
    assert await store.sealed_with(old.key_id, limit=10) == []
    assert await store.former_sealed_with(old.key_id, limit=10) == []
    assert await store.not_sealed_with(new.key_id) == 0
    for record in await store.of_scope("c", ["t"]):
        value = new.unseal(record.kind, record.scope, record.name, Sealed(record.key_id, record.sealed))
        assert value.get_secret_value() in {b"already new", f"value {record.name[1:]}".encode()}
        assert record.version == (1 if record.name == "NEW" else 2)
    again = await store.former("c", ["t"])
    assert [(each.id, each.name, each.version) for each in again] == [
        (each.id, each.name, each.version) for each in remembered
    ]
    for each in again:
        value = new.unseal(each.kind, each.scope, each.name, Sealed(each.key_id, each.sealed))
        assert value.get_secret_value() == f"former {each.name[1:]}".encode()
    assert await store.mark() == mark
    await database.sync()


async def test_what_was_damaged_does_not_keep_the_rest_from_a_new_key(store: SecretStore) -> None:
    old, new = Vault(bytes(32)), Vault(bytes(range(32)))
    for name in "ABCDE":
        for _ in range(2):
            sealed = old.seal("context", "c", name, "value")
            data = b"damaged" if name in "AC" else sealed.data
            await put(store, "context", "c", name, sealed=data, key_id=sealed.key_id)
    assert await rewrap(store, old, new, batch=1) == (3, 3)
    assert [record.name for record in await store.sealed_with(old.key_id, limit=10)] == ["A", "C"]
    assert {each.name for each in await store.former_sealed_with(old.key_id, limit=10)} == {"A", "C"}
    assert await store.not_sealed_with(new.key_id) == 4
    assert not await store.reseal_former(0, sealed=b"x", key_id="new")


async def test_what_was_put_meanwhile_is_not_sealed_over(store: SecretStore) -> None:
    await put(store, "context", "c", "A", sealed=b"one", key_id="old")
    await put(store, "context", "c", "A", sealed=b"two", key_id="old")
    assert not await store.reseal("context", "c", "A", version=1, sealed=b"one again", key_id="new")
    record = await store.get("context", "c", "A")
    assert record is not None and (record.sealed, record.key_id) == (b"two", "old")


async def test_former_values_are_remembered_as_long_as_somebody_may_have_seen_them(
    store: SecretStore, database: Database
) -> None:
    for number in range(MOST_FORMER + 3):
        await put(store, "context", "c", "TOKEN", sealed=b"%d" % number, key_id="k")
    await put(store, "template", "t", "TOKEN", sealed=b"t", key_id="k")
    await store.delete("template", "t", "TOKEN")
    await put(store, "template", "t", "TOKEN", sealed=b"t2", key_id="k")
    await put(store, "context", "other", "TOKEN", sealed=b"o", key_id="k")
    await store.delete("context", "other", "TOKEN")
    found = await store.former("c", ["t"])
    assert [each.sealed for each in found if each.kind == "template"] == [b"t"]
    assert [each.sealed for each in found if each.kind == "context"] == [
        b"%d" % number for number in range(MOST_FORMER + 1, 1, -1)
    ]
    assert "sealed" not in repr(found) and await store.former(None) == []
    sessions = SessionStore(database)
    await sessions.insert(session("sbx-1", "c", State.RUNNING, template="t"))
    await sessions.insert(session("sbx-2", "other", State.STOPPED))
    assert await store.forget_former([State.RUNNING]) == 1
    assert await store.former("other") == [] and await store.former("c", ["t"]) == found
    await sessions.update("sbx-1", state=State.STOPPED)
    assert await store.forget_former([State.RUNNING]) == MOST_FORMER + 1


def session(name: str, context: str, state: State, template: str | None = None) -> SessionRecord:
    return SessionRecord(
        id=name, context_id=context, ephemeral=False, state=state, provider="process", isolation_level=0, unsafe=True,
        trust=Trust.HIGH, network=Network.HOST, limits=Limits(), created_at=1.0, last_activity_at=1.0, template=template,
    )  # fmt: skip


async def test_what_is_checked_is_what_each_sandbox_would_have(store: SecretStore) -> None:
    await put(store, "context", "c", "A", sealed=b"x" * 10, key_id="k")
    await put(store, "template", "t", "A", sealed=b"x" * 100, key_id="k")
    await put(store, "template", "t", "B", sealed=b"x" * 5, key_id="k")
    seen: list[dict[str, int]] = []
    places = places_of("c", ["t"])
    await store.put(
        "template", "t", "C", sealed=b"x", key_id="k", sandboxes=[places], check=lambda sizes: seen.append({**sizes})
    )
    assert seen == [{"A": 100, "B": 5, "C": 1}, {"A": 10, "B": 5, "C": 1}]

    def refuse(_sizes: object) -> None:
        raise LimitExceeded("no")

    with pytest.raises(LimitExceeded):
        await store.put("context", "c", "A", sealed=b"y", key_id="k", sandboxes=(), check=refuse)
    record = await store.get("context", "c", "A")
    assert record is not None and record.sealed == b"x" * 10 and await store.former("c") == []
