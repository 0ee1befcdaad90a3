"""The queries on the MCP servers of contexts: their declarations, and the catalogues they last reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from sqlalchemy import ColumnElement, and_, delete, insert, select, update
from sqlalchemy.engine import Connection, RowMapping

from carrel.store.database import Database
from carrel.store.tables import mcp_servers

_table = mcp_servers.c
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class McpServerRecord:
    """A row of the table of MCP servers. `context_id` is empty for a server that the operator runs for all contexts."""

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
    """Reads and writes MCP servers."""

    def __init__(self, database: Database):
        self._database = database

    async def get(self, context_id: str, name: str) -> McpServerRecord | None:
        """Return one server."""
        return await self._database.first(select(mcp_servers).where(_is(context_id, name)), _record)

    async def declared(self, context_id: str, name: str) -> McpServerRecord | None:
        """Return one server without its catalogue, which may be large."""
        columns = [column for column in mcp_servers.c if column.name != "catalogue"]
        return await self._database.first(select(*columns).where(_is(context_id, name)), _record)

    async def list(self, context_id: str) -> Records:
        """Return the servers of a context, ordered by name."""
        query = select(mcp_servers).where(_table.context_id == context_id).order_by(_table.name)
        return await self._database.all(query, _record)

    async def put(self, record: McpServerRecord, room: Callable[[int], None]) -> McpServerRecord:
        """Add a server, or replace one of the same name. `room` is called with the number of other servers of the
        context and may refuse. The catalogue of a replaced server stays until the next discovery.
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
        """Store the catalogue of a server, or the error of its discovery, which keeps the former catalogue. False when
        the server was changed meanwhile.
        """
        values: Json = {"discovery_error": error}
        if catalogue is not None:
            values |= {"catalogue": catalogue, "catalogue_generation": generation, "discovered_at": at}
        statement = update(mcp_servers).where(_is(context_id, name), _table.generation == generation)
        return await self._database.execute(statement.values(**values)) > 0

    async def place(self, record: McpServerRecord) -> None:
        """Store the environment of a server after it was rebuilt."""
        mine = and_(_is(record.context_id, record.name), _table.generation == record.generation)
        await self._database.execute(update(mcp_servers).where(mine).values(environment=record.environment))

    async def enable(self, context_id: str, name: str, *, enabled: bool) -> bool:
        """Allow or forbid starting a server; False when there is none."""
        statement = update(mcp_servers).where(_is(context_id, name)).values(enabled=enabled)
        return await self._database.execute(statement) > 0

    async def delete(self, context_id: str, name: str) -> bool:
        """Delete a server; False when there is none."""
        return await self._database.execute(delete(mcp_servers).where(_is(context_id, name))) > 0

    async def forget(self, context_id: str) -> None:
        """Delete every server of a context."""
        await self._database.execute(delete(mcp_servers).where(_table.context_id == context_id))

    async def copy(self, origin: str, context_id: str) -> None:
        """Replace the servers of a forked context by those of its origin."""

        def run(connection: Connection) -> None:
            connection.execute(delete(mcp_servers).where(_table.context_id == context_id))
            rows = connection.execute(select(mcp_servers).where(_table.context_id == origin)).mappings().all()
            for row in rows:
                connection.execute(insert(mcp_servers).values(**{**row, "context_id": context_id}))

        await self._database.write(run)


def _record(row: RowMapping) -> McpServerRecord:
    return McpServerRecord(**row)


def _is(context_id: str, name: str) -> ColumnElement[bool]:
    return and_(_table.context_id == context_id, _table.name == name)
