"""The queries on the servers that share the database. Knows nothing of where a session belongs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import and_, case, delete, insert, or_, select, update
from sqlalchemy.engine import Connection

from carrel.models import State
from carrel.store.clock import database_clock
from carrel.store.database import Database
from carrel.store.tables import nodes, revoked_nodes, sessions


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts that a server writes about itself."""

    name: str
    boot: str
    url: str | None
    machine: str
    key_id: str
    version: str
    providers: tuple[str, ...]
    sandboxes: int
    capacity: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class NodeRecord(NodeFacts):
    """A server as the database has it. `age_s` is the time since its last sign of life."""

    started_at: float
    seen_at: float
    age_s: float


@dataclass(frozen=True, slots=True)
class Holding:
    """Where a session is. `owner` has its lease for `lease_left_s` more seconds; `node` has its files.

    `released`: its last owner gave the lease back; else that owner fell silent, and may have newer files than the
    archive.
    """

    owner: str | None
    lease_left_s: float
    node: str | None
    state: State
    released: bool
    folder: bool = False
    """Whether the files are a folder of the host."""


class NodeStore:
    """Reads and writes the records of servers. All times are those of the database."""

    def __init__(self, database: Database):
        self._database = database

    async def beat(self, facts: NodeFacts, *, forget_s: float) -> tuple[float, list[NodeRecord]]:
        """Write a sign of life; return the time of the database and every server, those included that are silent for
        less than `forget_s`. Older records are removed.
        """
        values = asdict(facts) | {"providers": list(facts.providers)}

        def run(connection: Connection) -> tuple[float, list[NodeRecord]]:
            now = float(connection.execute(select(database_clock())).scalar_one())
            mine = and_(nodes.c.name == facts.name, nodes.c.boot == facts.boot)
            found = connection.execute(update(nodes).where(mine).values(**values, seen_at=now)).rowcount
            if not found:
                connection.execute(delete(nodes).where(nodes.c.name == facts.name))
                connection.execute(insert(nodes).values(**values, started_at=now, seen_at=now))
            connection.execute(delete(nodes).where(nodes.c.seen_at < now - forget_s))
            rows = connection.execute(select(nodes).order_by(nodes.c.name)).mappings()
            return now, [_record(dict(row), now) for row in rows]

        return await self._database.write(run)

    async def revoked(self) -> frozenset[str]:
        """Return the servers whose SPIFFE ID is revoked."""
        return frozenset(await self._database.scalars(select(revoked_nodes.c.name)))

    async def revoke(self, name: str) -> None:
        """Revoke a server, and end the leases of its workers: the others take its sessions over."""

        def run(connection: Connection) -> None:
            now = float(connection.execute(select(database_clock())).scalar_one())
            connection.execute(delete(revoked_nodes).where(revoked_nodes.c.name == name))
            connection.execute(insert(revoked_nodes).values(name=name, at=now))
            of_server = or_(
                sessions.c.lease_owner == name, sessions.c.lease_owner.startswith(f"{name}:", autoescape=True)
            )
            held = and_(of_server, sessions.c.lease_until > now)
            connection.execute(update(sessions).where(held).values(lease_until=now))

        await self._database.write(run)

    async def readmit(self, name: str) -> bool:
        """Undo the revocation of a server; False if it is not revoked."""
        statement = delete(revoked_nodes).where(revoked_nodes.c.name == name).returning(revoked_nodes.c.name)
        found = await self._database.write(lambda connection: connection.execute(statement).scalar_one_or_none())
        return found is not None

    async def remove(self, name: str, boot: str) -> None:
        """Remove a server that ends."""
        await self._database.execute(delete(nodes).where(nodes.c.name == name, nodes.c.boot == boot))

    async def holding(self, name: str, *, ended: bool = False) -> Holding | None:
        """Return where the session with that id or of that context is; with `ended`, also a terminated session of the
        context, whose files may be left.
        """
        columns = sessions.c
        of_context = columns.context_id == name
        if not ended:
            of_context = and_(of_context, columns.state != State.TERMINATED.value)
        left = (columns.lease_until - database_clock()).label("left")
        # A context may have the same name as the id of a session; ids come first, as everywhere.
        first = case((columns.id == name, 0), else_=1)
        query = select(columns.lease_owner, left, columns.node, columns.state, columns.workspace_path).where(
            or_(columns.id == name, of_context)
        )
        query = query.order_by(first, columns.created_at.desc(), columns.id.desc()).limit(1)
        for row in await self._database.rows(query):
            seconds = 0.0 if row.lease_owner is None or row.left is None else max(0.0, float(row.left))
            owner, folder = row.lease_owner if seconds else None, row.workspace_path is not None
            return Holding(owner, seconds, row.node, State(row.state), row.lease_owner is None, folder)
        return None


def _record(row: dict[str, object], now: float) -> NodeRecord:
    seen = float(row["seen_at"])  # type: ignore[arg-type]
    row["providers"] = tuple(row["providers"])  # type: ignore[arg-type]
    return NodeRecord(**row, age_s=max(0.0, now - seen))  # type: ignore[arg-type]
