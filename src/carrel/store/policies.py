"""The queries on the policies of contexts. Does not parse the documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.engine import Connection

from carrel.errors import Conflict
from carrel.store.database import Database
from carrel.store.tables import policies

_LOCK = 0x706F6C69  # "poli": the first key of the advisory lock on the policy of a context


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A row of the table of policies: the two documents of a context as given, and their version."""

    context_id: str
    settings: Mapping[str, object] | None
    sources: Mapping[str, object] | None
    version: int
    updated_at: float
    updated_by: str


class PolicyStore:
    """Reads and writes policies."""

    def __init__(self, database: Database):
        self._database = database

    async def get(self, context_id: str) -> PolicyRecord | None:
        """Return the policy of a context."""
        query = select(policies).where(policies.c.context_id == context_id)
        return await self._database.first(query, lambda row: PolicyRecord(**row))

    async def put(
        self,
        context_id: str,
        settings: Mapping[str, object] | None,
        sources: Mapping[str, object] | None,
        *,
        by: str,
        at: float,
        expected: int | None = None,
    ) -> int:
        """Replace the policy of a context and return its version.

        With `expected`, only if the current version is that one (0: no policy); else `Conflict`.
        """

        def run(connection: Connection) -> int:
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_LOCK, func.hashtext(context_id))))
            query = select(policies.c.version).where(policies.c.context_id == context_id)
            version = connection.execute(query).scalar_one_or_none()
            if expected is not None and (version or 0) != expected:
                raise Conflict(
                    f"the policy of '{context_id}' was changed meanwhile",
                    field="version",
                    hint="read it again and change that version",
                )
            values = {"settings": settings, "sources": sources, "updated_at": at, "updated_by": by}
            if version is None:
                connection.execute(insert(policies).values(context_id=context_id, version=1, **values))
                return 1
            changed = update(policies).where(policies.c.context_id == context_id)
            connection.execute(changed.values(version=version + 1, **values))
            return int(version) + 1

        return await self._database.write(run)

    async def delete(self, context_id: str, *, version: int | None = None) -> bool:
        """Delete the policy of a context; False when it had none, or not of that version."""
        statement = delete(policies).where(policies.c.context_id == context_id)
        if version is not None:
            statement = statement.where(policies.c.version == version)
        return await self._database.execute(statement) == 1
