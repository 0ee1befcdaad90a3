from __future__ import annotations

import io
import json
import time
from dataclasses import replace

import pytest
import zstandard
from tests.support.no_events import no_event

from carrel.audit import AuditEntry, AuditLog, Ending, SigningKey, chain_of, verify
from carrel.errors import Conflict
from carrel.store.audit import AuditStore

ENTRY = AuditEntry(chain_of("c"), "agent:a", "shell", "run_command", arguments={"command": "echo ü"})


async def test_lines_in_their_order(store: AuditStore, key: SigningKey) -> None:
    log = AuditLog(store, key, "n", no_event, head_records=3)
    await log.open()
    for name in ("d", "c", "c", "c"):
        log.record(replace(ENTRY, chain=chain_of(name)), Ending())
    await log.flush()
    (await log.begin(ENTRY)).end()
    data = b"".join([piece async for piece in log.export()])
    lines = [json.loads(line) for line in data.splitlines()]
    assert [next(iter(line)) for line in lines] == [
        "carrel-audit", "chain", "hash", "hash", "hash", "head", "hash", "hash", "head", "chain", "hash", "head", "end",
    ]  # fmt: skip
    assert lines[0] == {"carrel-audit": 1, "exported_at": lines[0]["exported_at"], "node": "n", "key": key.public}
    assert lines[1]["chain"] == "context:c" and (lines[1]["start"], lines[1]["seq"]) == (0, 5)
    assert lines[2]["record"]["arguments"] == {"command": "echo ü"}
    assert {key: lines[-1]["end"][key] for key in ("chains", "records", "heads")} == {
        "chains": 2,
        "records": 6,
        "heads": 3,
    }
    one = b"".join([piece async for piece in log.export([chain_of("d"), chain_of("absent"), chain_of("d")])])
    assert verify(io.BytesIO(one)).tips.keys() == {chain_of("d")}
    squeezed = b"".join([piece async for piece in log.export([chain_of("c")], compress=True)])
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(squeezed)
    assert plain.splitlines()[1:-1] == data.splitlines()[1:9] and verify(io.BytesIO(squeezed)).ok
    await log.close()


async def test_pages_and_what_is_written_meanwhile(
    store: AuditStore, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carrel.audit.export.PAGE", 3)
    log = AuditLog(store, key, "n", no_event, head_records=2)
    await log.open()
    for _ in range(10):
        log.record(ENTRY, Ending())
        await log.flush()
    pieces = []
    async for piece in log.export():
        pieces.append(piece)
        log.record(ENTRY, Ending())
        await log.flush()
    verdict = verify(io.BytesIO(b"".join(pieces)))
    assert verdict.ok and verdict.records >= 10 and verdict.unsigned <= 1
    await log.close()


async def pruned_while_read(log: AuditLog, other: AuditLog) -> tuple[list[bytes], int]:
    """An export in which each piece of a chain is followed by a prune of everything that can go."""
    for _ in range(10):
        log.record(ENTRY, Ending())
        await log.flush()
    pieces, gone = [], 0
    async for piece in log.export():
        pieces.append(piece)
        if len(pieces) > 1:  # the first line is of no chain
            gone += await other.prune(time.time() + 1)
    return pieces, gone


async def test_what_is_exported_is_pruned_later(
    store: AuditStore, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carrel.audit.export.PAGE", 3)
    log = AuditLog(store, key, "n", no_event, head_records=2)
    await log.open()
    pieces, gone = await pruned_while_read(log, log)
    verdict = verify(io.BytesIO(b"".join(pieces)))
    assert verdict.ok and verdict.records == 10, verdict
    assert gone + await log.prune(time.time() + 1) >= 10, "afterwards it goes"
    await log.close()


async def test_an_export_that_another_server_prunes_is_none(
    store: AuditStore, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carrel.audit.export.PAGE", 3)
    log, other = (
        AuditLog(store, key, "n", no_event, head_records=2),
        AuditLog(store, key, "m", no_event, head_records=2),
    )
    await log.open()
    await other.open()
    with pytest.raises(Conflict, match="pruned while it was read"):
        await pruned_while_read(log, other)
    data = b"".join([piece async for piece in log.export()])
    assert verify(io.BytesIO(data)).ok
    await other.close()
    await log.close()


async def test_an_empty_log(store: AuditStore, key: SigningKey) -> None:
    log = AuditLog(store, key, "n", no_event)
    await log.open()
    for compress in (False, True):
        data = b"".join([piece async for piece in log.export(compress=compress)])
        verdict = verify(io.BytesIO(data), keys=[key.public])
        assert verdict.ok and (verdict.chains, verdict.records) == (0, 0)
    await log.close()
