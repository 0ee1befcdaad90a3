"""The queries on API tokens, of which only hashes are stored. `carrel.identity` decides who may do what."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

from sqlalchemy import insert, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import AlreadyExists
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.tables import tokens

_MOST_AT_ONCE = 500
"""Values in one query; databases have limits."""

BATCH_PAUSE_S = 0.02
"""The least time between two batches of `of_new_hash`."""

Names = tuple[str, ...]
TokenRow = tuple[
    str, str, str, str, Names, str | None, Names | None, float, str, float | None, float | None, float | None
]
"""id, name, hash, kind, scopes, namespace, contexts, created_at, created_by, expires_at, revoked_at, used_at"""


class TokenRecord(NamedTuple):
    """A row of the table of tokens."""

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


class _FoundToken(NamedTuple):
    """The result of a lookup."""

    record: TokenRecord | None
    failure: Exception | None = None


def _record(row: RowMapping) -> TokenRecord:
    contexts = row["contexts"]
    values = {**row, "scopes": tuple(row["scopes"]), "contexts": None if contexts is None else tuple(contexts)}
    return TokenRecord(**values)


class TokenStore:
    """Reads and writes token records. A token is never deleted, only revoked: the audit log may name it."""

    def __init__(self, database: Database):
        self._database = database
        self._wanted: dict[str, asyncio.Future[_FoundToken | None]] = {}
        self._looking = asyncio.Lock()
        self._next_batch = 0.0

    async def insert(self, token: TokenRow) -> None:
        """Add a token; `AlreadyExists` when its id or hash is taken."""
        record = TokenRecord(*token)
        try:
            await self._database.execute(insert(tokens).values(**record._asdict()))
        except IntegrityError:
            raise AlreadyExists(f"token {record.id} already exists", field="id") from None

    async def of_hash(self, hash: str) -> TokenRecord | None:
        """Return the token with this hash, even if it is revoked or expired."""
        return await self._database.first(select(tokens).where(tokens.c.hash == hash), _record)

    async def of_new_hash(self, hash: str) -> TokenRecord | None:
        """Look up a hash that may be made up: all waiting lookups share one query, and there are at most 50 queries per
        second. So made-up tokens cannot overload the database, and a real token among thousands of them waits for a few
        batches at most.
        """
        found: _FoundToken | None = None
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
            # A later caller waits for the next batch: a token may be revoked after this query has read it.
            del self._wanted[key]
        self._next_batch = loop.time() + BATCH_PAUSE_S
        outcome: dict[str, _FoundToken] | None = None
        try:
            records = await self._database.all(select(tokens).where(tokens.c.hash.in_(batch)), _record)
            outcome = {record.hash: _FoundToken(record) for record in records}
        except Exception as error:
            outcome = dict.fromkeys(batch, _FoundToken(None, error))
        finally:  # when the caller that runs this batch is cancelled, the others ask again
            for key, waiting in batch.items():
                waiting.set_result(None if outcome is None else outcome.get(key, _FoundToken(None)))

    async def get(self, token_id: str) -> TokenRecord | None:
        """Return the token with this id."""
        return await self._database.first(select(tokens).where(tokens.c.id == token_id), _record)

    async def page(self, *, limit: int, cursor: str | None = None) -> tuple[list[TokenRecord], str | None]:
        """Return at most `limit` tokens after `cursor`, newest first, and the cursor of the next page."""
        return await read_page(self._database, tokens, select(tokens), _record, limit, cursor)

    async def revoke(self, token_id: str, at: float) -> bool:
        """Revoke a token; False when it was already revoked or does not exist."""
        statement = update(tokens).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None)).values(revoked_at=at)
        return await self._database.execute(statement) == 1

    async def revoked(self, token_ids: Collection[str]) -> set[str]:
        """Return which of these tokens are revoked."""
        wanted, found = sorted(token_ids), set[str]()
        for start in range(0, len(wanted), _MOST_AT_ONCE):
            query = select(tokens.c.id).where(
                tokens.c.id.in_(wanted[start : start + _MOST_AT_ONCE]), tokens.c.revoked_at.is_not(None)
            )
            found.update(await self._database.scalars(query))
        return found

    async def used(self, token_id: str, at: float) -> None:
        """Record when a token was last used."""
        await self._database.execute(update(tokens).where(tokens.c.id == token_id).values(used_at=at))
