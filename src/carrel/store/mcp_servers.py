"""The queries on the MCP servers of contexts: how each is declared, and what it offered when it was last asked. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, insert, select, update
from sqlalchemy.engine import Connection

from carrel.store.database import Database
from carrel.store.tables import mcp_servers

_table = mcp_servers.c
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class McpServerRecord:
    """One row. `context_id` is empty for a server that the operator runs for all."""

    context_id: str
    name: str
    declaration: Json
    generation: str
    created_at: float
    updated_at: float
    enabled: bool = True
    environment: str | None = None
    program: str | None = None
    catalogue: Json | None = field(default=None, repr=False)
    catalogue_generation: str | None = None
    discovered_at: float | None = None
    discovery_error: str | None = None


Records = list[McpServerRecord]


class McpServerStore:
    """Reads and writes what is known of MCP servers."""

    def __init__(self, database: Database):
        self._database = database

    async def get(self, context_id: str, name: str) -> McpServerRecord | None:
        """One server."""
        found = await self._all(select(mcp_servers).where(_is(context_id, name)))
        return found[0] if found else None

    async def declared(self, context_id: str, name: str) -> McpServerRecord | None:
        """One server without what it offers, which may be much."""
        columns = [column for column in mcp_servers.c if column.name != "catalogue"]
        found = await self._all(select(*columns).where(_is(context_id, name)))
        return found[0] if found else None

    async def list(self, context_id: str) -> Records:
        """Those of a context, by name."""
        return await self._all(select(mcp_servers).where(_table.context_id == context_id).order_by(_table.name))

    async def put(self, record: McpServerRecord, room: Callable[[int], None]) -> McpServerRecord:
        """Write down a server, in the place of one of the same name. `room` is told how many others its context has,
        and may refuse. What the one before offered stays until the new one was asked.
        """
        values = asdict(record)

        def run(connection: Connection) -> McpServerRecord:
            names = select(_table.name).where(_table.context_id == record.context_id)
            others = [name for name in connection.execute(names).scalars() if name != record.name]
            room(len(others))
            query = select(mcp_servers).where(_is(record.context_id, record.name))
            before = connection.execute(query).mappings().first()
            if before is None:
                connection.execute(insert(mcp_servers).values(**values))
                return record
            kept = ("created_at", "catalogue", "catalogue_generation", "discovered_at", "discovery_error")
            merged = values | {name: before[name] for name in kept}
            connection.execute(update(mcp_servers).where(_is(record.context_id, record.name)).values(**merged))
            return McpServerRecord(**merged)

        return await self._database.write(run)

    async def discovered(
        self, context_id: str, name: str, generation: str, catalogue: Json | None, error: str | None, at: float
    ) -> bool:
        """Keep what a server offers, or why it could not be asked; False when it was changed meanwhile. What was known
        before stays when there is an error.
        """
        values: Json = {"discovery_error": error}
        if catalogue is not None:
            values |= {"catalogue": catalogue, "catalogue_generation": generation, "discovered_at": at}
        mine = and_(_is(context_id, name), _table.generation == generation)
        statement = update(mcp_servers).where(mine).values(**values)
        return await self._database.execute(statement) > 0

    async def place(self, record: McpServerRecord) -> None:
        """Note the environment of a server that was built anew."""
        mine = and_(_is(record.context_id, record.name), _table.generation == record.generation)
        statement = update(mcp_servers).where(mine).values(environment=record.environment)
        await self._database.execute(statement)

    async def enable(self, context_id: str, name: str, *, enabled: bool) -> bool:
        """Let a server be started, or not; False when there is none."""
        statement = update(mcp_servers).where(_is(context_id, name)).values(enabled=enabled)
        return await self._database.execute(statement) > 0

    async def delete(self, context_id: str, name: str) -> bool:
        """Forget a server; False when there is none."""
        statement = delete(mcp_servers).where(_is(context_id, name))
        return await self._database.execute(statement) > 0

    async def forget(self, context_id: str) -> None:
        """Forget every server of a context."""
        statement = delete(mcp_servers).where(_table.context_id == context_id)
        await self._database.execute(statement)

    async def copy(self, origin: str, context_id: str) -> None:
        """Give a fork the servers of its origin."""

        def run(connection: Connection) -> None:
            connection.execute(delete(mcp_servers).where(_table.context_id == context_id))
            rows = connection.execute(select(mcp_servers).where(_table.context_id == origin)).mappings().all()
            for row in rows:
                connection.execute(insert(mcp_servers).values(**{**row, "context_id": context_id}))

        await self._database.write(run)

    async def _all(self, query: Select[Any]) -> Records:
        return await self._database.all(query, lambda row: McpServerRecord(**row))


def _is(context_id: str, name: str) -> ColumnElement[bool]:
    return and_(_table.context_id == context_id, _table.name == name)
