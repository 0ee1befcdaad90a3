"""The queries on API tokens. Holds hashes only, and decides nothing: who may do what is `identity`'s to say."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from itertools import islice
from typing import NamedTuple

from sqlalchemy import Select, insert, select, update
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import AlreadyExists
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.tables import tokens

_MOST_AT_ONCE = 500
"""Values of one query; databases have limits."""

BATCH_PAUSE_S = 0.02
"""The least time between two batches of `of_new_hash`."""

Names = tuple[str, ...]
TokenRow = tuple[
    str, str, str, str, Names, str | None, Names | None, float, str, float | None, float | None, float | None
]
"""id, name, hash, kind, scopes, namespace, contexts, created_at, created_by, expires_at, revoked_at, used_at"""


class TokenRecord(NamedTuple):
    """One row: what is known of a token. The token itself is known only to whoever has it."""

    id: str
    name: str
    hash: str
    kind: str
    scopes: Names
    namespace: str | None
    contexts: Names | None
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    used_at: float | None = None


class _Found(NamedTuple):
    """What a look-up brought."""

    record: TokenRecord | None
    failure: Exception | None = None


def _record(row: RowMapping) -> TokenRecord:
    contexts = row["contexts"]
    held = {**row, "scopes": tuple(row["scopes"]), "contexts": None if contexts is None else tuple(contexts)}
    return TokenRecord(**held)


def _ids(query: Select[tuple[str]], connection: Connection) -> list[str]:
    return [row["id"] for row in connection.execute(query).mappings()]


class TokenStore:
    """Reads and writes token records. A token is never deleted, only revoked: the audit log may name it."""

    def __init__(self, database: Database):
        self._database = database
        self._wanted: dict[str, asyncio.Future[_Found | None]] = {}
        self._looking = asyncio.Lock()
        self._next_batch = 0.0

    async def insert(self, token: TokenRow) -> None:
        """Add a token; `AlreadyExists` when its id or hash is taken."""
        record = TokenRecord(*token)
        statement = insert(tokens).values(**record._asdict())
        try:
            await self._database.execute(statement)
        except IntegrityError:
            raise AlreadyExists(f"there is a token {record.id} already", field="id") from None

    async def of_hash(self, hash: str) -> TokenRecord | None:
        """The token with that hash, revoked and expired ones too."""
        found = await self._all(select(tokens).where(tokens.c.hash == hash))
        return found[0] if found else None

    async def of_new_hash(self, hash: str) -> TokenRecord | None:
        """The same as `of_hash`, for a hash that may be made up: all that wait are looked up with one query, and there
        are at most 50 queries a second. So nobody can keep the database busy with made-up tokens, and a real one among
        thousands of them waits for a few batches at most.
        """
        found: _Found | None = None
        while found is None:
            wanted = self._wanted.get(hash)
            if wanted is None:
                wanted = self._wanted[hash] = asyncio.get_running_loop().create_future()
            async with self._looking:
                while not wanted.done():
                    await self._look_up_batch()
            found = wanted.result()
        if found.failure is not None:
            raise found.failure
        return found.record

    async def _look_up_batch(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._next_batch - loop.time()))
        batch = dict(islice(self._wanted.items(), _MOST_AT_ONCE))
        for key in batch:
            # Whoever asks from now on waits for the next batch: a token may be revoked after this query has read it.
            del self._wanted[key]
        self._next_batch = loop.time() + BATCH_PAUSE_S
        outcome: dict[str, _Found] | None = None
        try:
            records = await self._all(select(tokens).where(tokens.c.hash.in_(batch)))
            outcome = {record.hash: _Found(record) for record in records}
        except Exception as error:
            outcome = dict.fromkeys(batch, _Found(None, error))
        finally:  # when the caller that runs this batch is cancelled, the others ask again
            for key, waiting in batch.items():
                waiting.set_result(None if outcome is None else outcome.get(key, _Found(None)))

    async def get(self, token_id: str) -> TokenRecord | None:
        """The token with that id."""
        found = await self._all(select(tokens).where(tokens.c.id == token_id))
        return found[0] if found else None

    async def page(self, *, limit: int, cursor: str | None = None) -> tuple[list[TokenRecord], str | None]:
        """Newest first: at most `limit` tokens after `cursor`, and the cursor of the next page."""
        return await read_page(self._database, tokens, select(tokens), _record, limit, cursor)

    async def revoke(self, token_id: str, at: float) -> bool:
        """Revoke a token; False when it was already, or there is none."""
        statement = update(tokens).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None)).values(revoked_at=at)
        return await self._database.execute(statement) == 1

    async def revoked(self, token_ids: Collection[str]) -> set[str]:
        """Those of these tokens that were revoked."""
        wanted, found = sorted(token_ids), set[str]()
        for start in range(0, len(wanted), _MOST_AT_ONCE):
            query = select(tokens.c.id).where(
                tokens.c.id.in_(wanted[start : start + _MOST_AT_ONCE]), tokens.c.revoked_at.is_not(None)
            )
            found.update(await self._database.read(partial(_ids, query)))
        return found

    async def used(self, token_id: str, at: float) -> None:
        """Note when a token was used last."""
        statement = update(tokens).where(tokens.c.id == token_id).values(used_at=at)
        await self._database.execute(statement)

    async def _all(self, query: Select[tuple[object, ...]]) -> list[TokenRecord]:
        return await self._database.all(query, _record)
