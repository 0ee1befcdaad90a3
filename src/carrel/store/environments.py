"""The queries on the environments of one server: the built ones, their labels, and which contexts hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field

from sqlalchemy import ColumnElement, Table, and_, delete, insert, or_, select, update
from sqlalchemy.engine import Connection

from carrel.models import State
from carrel.store.database import Database
from carrel.store.tables import environment_labels, environment_requests, environment_uses, environments, sessions


@dataclass(frozen=True, slots=True)
class EnvironmentRecord:
    """A row of the table of environments: one that is ready on this server."""

    name: str
    hash: str
    python: str
    interpreter: str
    requirements: list[str]
    packages: list[dict[str, str]]
    imports: list[str]
    size: int
    created_at: float
    last_used_at: float
    built_by: str | None = None
    labels: list[str] = field(default_factory=list)


class EnvironmentStore:
    """Reads and writes the environments of a server."""

    def __init__(self, database: Database, node: str):
        self._database = database
        self._node = node

    async def put(self, record: EnvironmentRecord) -> None:
        """Add an environment, or replace one of the same name."""
        values = {**asdict(record), "node": self._node}
        del values["labels"]
        await self._replace(environments, self._is(record.name), values)

    async def all(self) -> list[EnvironmentRecord]:
        """Return every environment, the last used first."""

        def run(connection: Connection) -> list[EnvironmentRecord]:
            labels: dict[str, list[str]] = {}
            rows = connection.execute(select(environment_labels).where(environment_labels.c.node == self._node))
            for row in rows.mappings():
                labels.setdefault(row["name"], []).append(row["label"])
            query = select(environments).where(environments.c.node == self._node)
            query = query.order_by(environments.c.last_used_at.desc(), environments.c.name)
            return [
                EnvironmentRecord(
                    **{key: value for key, value in row.items() if key != "node"},
                    labels=sorted(labels.get(row["name"], [])),
                )
                for row in connection.execute(query).mappings()
            ]

        return await self._database.read(run)

    async def used(self, name: str, at: float, holder: str | None = None) -> bool:
        """Record that an environment was used, and that `holder` holds it from now on; False if there is no such
        environment.
        """

        def run(connection: Connection) -> bool:
            known = connection.execute(update(environments).where(self._is(name)).values(last_used_at=at)).rowcount > 0
            if known and holder is not None:
                mine = self._held(holder, name)
                if connection.execute(select(environment_uses.c.name).where(mine)).first() is None:
                    connection.execute(insert(environment_uses).values(node=self._node, holder=holder, name=name))
            return known

        return await self._database.write(run)

    async def copy_uses(self, origin: str, holder: str) -> None:
        """Let a forked context hold the environments of its origin."""

        def run(connection: Connection) -> None:
            here = environment_uses.c.node == self._node
            wanted = select(environment_uses.c.name).where(here, environment_uses.c.holder == origin)
            had = select(environment_uses.c.name).where(here, environment_uses.c.holder == holder)
            known = set(connection.execute(had).scalars())
            for name in set(connection.execute(wanted).scalars()) - known:
                connection.execute(insert(environment_uses).values(node=self._node, holder=holder, name=name))

        await self._database.write(run)

    async def held(self, coming: Collection[str] = ()) -> dict[str, set[str]]:
        """Return the holders of each environment. Deletes uses of holders without a session that is not terminated,
        except those in `coming`, which are about to have one.
        """
        holder = environment_uses.c.holder
        there = select(sessions.c.id).where(
            and_(
                or_(sessions.c.context_id == holder, sessions.c.id == holder),
                sessions.c.state != State.TERMINATED.value,
            )
        )
        here = environment_uses.c.node == self._node
        gone = delete(environment_uses).where(here, holder.not_in(list(coming)), ~there.exists())

        def run(connection: Connection) -> dict[str, set[str]]:
            connection.execute(gone)
            found: dict[str, set[str]] = {}
            for row in connection.execute(select(environment_uses).where(here)).mappings():
                found.setdefault(row["name"], set()).add(row["holder"])
            return found

        return await self._database.write(run)

    async def holds(self, holder: str) -> list[str]:
        """Return the environments that one context or ephemeral session holds."""
        uses = environment_uses.c
        query = select(uses.name).where(uses.node == self._node, uses.holder == holder)
        return sorted(await self._database.scalars(query))

    async def had_elsewhere(self, holder: str, name: str) -> tuple[list[str], str] | None:
        """Return requirements and Python of the environment a context holds on another server by this name or label."""
        labels, uses = environment_labels.c, environment_uses.c
        called = select(labels.name).where(labels.node == environments.c.node, labels.label == name)
        held = select(uses.name).where(uses.node == environments.c.node, uses.holder == holder)
        query = select(environments.c.requirements, environments.c.python).where(
            environments.c.node != self._node,
            environments.c.name.in_(held),
            or_(environments.c.name == name, environments.c.name.in_(called)),
        )
        query = query.order_by(environments.c.last_used_at.desc())
        return await self._database.first(query, lambda row: (list(row["requirements"]), str(row["python"])))

    async def release(self, holder: str, name: str) -> bool:
        """Let a holder release an environment; False when it did not hold it."""
        return await self._database.execute(delete(environment_uses).where(self._held(holder, name))) > 0

    async def answered(self, key: str, name: str) -> None:
        """Store which environment a request resolved to."""
        mine = and_(environment_requests.c.node == self._node, environment_requests.c.key == key)
        await self._replace(environment_requests, mine, {"node": self._node, "key": key, "name": name})

    async def answers(self) -> dict[str, str]:
        """Return which environment each request resolved to."""
        requests = environment_requests.c
        rows = await self._database.rows(select(requests.key, requests.name).where(requests.node == self._node))
        return {row.key: row.name for row in rows}

    async def label(self, label: str, name: str) -> None:
        """Move a label to an environment."""
        mine = and_(environment_labels.c.node == self._node, environment_labels.c.label == label)
        await self._replace(environment_labels, mine, {"node": self._node, "label": label, "name": name})

    async def forget(self, names: Iterable[str]) -> None:
        """Delete environments, with their labels, uses and requests."""
        gone = list(names)

        def run(connection: Connection) -> None:
            for table in (environments, environment_labels, environment_uses, environment_requests):
                for name in gone:
                    connection.execute(delete(table).where(table.c.node == self._node, table.c.name == name))

        await self._database.write(run)

    async def _replace(self, table: Table, condition: ColumnElement[bool], values: dict[str, object]) -> None:
        def run(connection: Connection) -> None:
            connection.execute(delete(table).where(condition))
            connection.execute(insert(table).values(**values))

        await self._database.write(run)

    def _is(self, name: str) -> ColumnElement[bool]:
        return and_(environments.c.node == self._node, environments.c.name == name)

    def _held(self, holder: str, name: str) -> ColumnElement[bool]:
        uses = environment_uses.c
        return and_(uses.node == self._node, uses.holder == holder, uses.name == name)
