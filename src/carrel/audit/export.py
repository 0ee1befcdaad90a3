"""Writes chains as a file that can be verified without the database: lines of JSON, each of one of these kinds.

    {"carrel-audit":1,"exported_at":…,"node":…,"key":…}                       the first line
    {"chain":"context:…","start":0,"seq":2000,"hash":"…"}                     a chain begins; where it ends
    {"head":{"chain":…,"seq":…,"hash":…,"records":…,"at":…,"key":…,"signature":…}}
    {"hash":"…","record":{"chain":…,"seq":1,…}}                               its records and heads, in their order
    {"end":{"chains":1,"records":2000,"heads":2,"digest":"…","key":…,"signature":…}}

A pruned chain starts with the head it was pruned up to. The last line signs everything before it. If another server
prunes a chain while it is read, the export ends with an error.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import zstandard
from blake3 import blake3

from carrel.audit.keys import Headlike, SignedHead, SigningKey
from carrel.errors import Conflict

VERSION = 1
PAGE = 2000
END_DOMAIN = b"carrel audit export v1\n"


Stored = tuple[int, bytes, str]
"""seq, hash and body of a record in the store"""


class ExportStore(Protocol):
    """The methods of a store that an export needs; `store.audit.AuditStore` has them."""

    async def chains(self, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        """Return names of chains."""

    async def tip(self, chain: str) -> tuple[int, bytes, int]:
        """Return the end of a chain."""

    async def records(self, chain: str, *, after: int = 0, until: int, limit: int) -> Sequence[Stored]:
        """Return records in order."""

    async def heads(self, chain: str, *, after: int = 0, limit: int = 1000) -> Sequence[Headlike]:
        """Return heads in order."""


def line(value: object) -> bytes:
    """Encode a line; `verify` compares it byte by byte."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def head_line(head: Headlike) -> bytes:
    """Encode a head as a line."""
    return line({"head": SignedHead(*head)._asdict()})


def end_message(chains: int, records: int, heads: int, digest: str) -> bytes:
    """Return the message that the last line signs."""
    return END_DOMAIN + line([chains, records, heads, digest])


class _Writer:
    def __init__(self, key: SigningKey, compress: bool):
        self._key = key
        self._digest = blake3()
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj() if compress else None
        self.chains = self.records = self.heads = 0

    def write(self, lines: Iterable[bytes]) -> bytes:
        data = b"".join(lines)
        self._digest.update(data)
        return self._compressed(data)

    def end(self) -> bytes:
        digest = self._digest.hexdigest()
        signature = self._key.sign(end_message(self.chains, self.records, self.heads, digest))
        summary = {"chains": self.chains, "records": self.records, "heads": self.heads, "digest": digest}
        data = self._compressed(line({"end": {**summary, "key": self._key.public, "signature": signature}}))
        return data if self._compressor is None else data + self._compressor.flush()

    def _compressed(self, data: bytes) -> bytes:
        return data if self._compressor is None else self._compressor.compress(data)


async def export(
    store: ExportStore,
    key: SigningKey,
    node: str,
    clock: Callable[[], float],
    seal: Callable[[Sequence[str]], Awaitable[None]],
    reading: Callable[[str], AbstractAsyncContextManager[None]],
    *,
    chains: Sequence[str] | None = None,
    compress: bool = False,
) -> AsyncIterator[bytes]:
    """Yield the file in pieces. `seal` signs the chains first; records written later are not exported. During
    `reading` of a chain this server does not prune it.
    """
    writer = _Writer(key, compress)
    yield writer.write([line({"carrel-audit": VERSION, "exported_at": clock(), "node": node, "key": key.public})])
    names = sorted(set(chains)) if chains is not None else await store.chains()
    while names:
        await seal(names)
        for name in names:
            async with reading(name):
                async for piece in _chain(store, writer, name):
                    yield piece
        names = [] if chains is not None else await store.chains(after=names[-1])
    yield writer.end()


async def _chain(store: ExportStore, writer: _Writer, name: str) -> AsyncIterator[bytes]:
    end, hashed, _ = await store.tip(name)
    if end == 0:
        return
    writer.chains += 1
    records = await store.records(name, until=end, limit=PAGE)
    start = records[0][0] - 1 if records else end
    lines = [line({"chain": name, "start": start, "seq": end, "hash": hashed.hex()})]
    heads = deque(await store.heads(name, after=max(start - 1, 0)))
    if start:  # pruned up to there
        if not heads or heads[0][1] != start:
            raise _pruned(name)
        lines.append(head_line(heads.popleft()))
        writer.heads += 1
    while records:
        for seq, link, body in records:
            lines.append(b'{"hash":"%s","record":%s}\n' % (link.hex().encode(), body.encode()))
            while heads and heads[0][1] == seq:
                lines.append(head_line(heads.popleft()))
                writer.heads += 1
                if not heads:
                    heads.extend(await store.heads(name, after=seq))
        writer.records += len(records)
        yield writer.write(lines)
        lines = []
        records = await store.records(name, after=records[-1][0], until=end, limit=PAGE)
    if start < end:
        left = await store.records(name, until=end, limit=1)
        if not left or left[0][0] != start + 1:
            raise _pruned(name)
    yield writer.write(lines)


def _pruned(name: str) -> Conflict:
    return Conflict(f"the chain {name} was pruned while it was read", field="chain", hint="export again")
