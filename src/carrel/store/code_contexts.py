"""The queries on code contexts: the environment of each, for as long as its session lasts."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, delete, insert, select
from sqlalchemy.engine import Connection

from carrel.models import State
from carrel.store.database import Database
from carrel.store.tables import code_contexts, sessions


class CodeContextStore:
    """Reads and writes the environments of code contexts."""

    def __init__(self, database: Database):
        self._database = database

    async def environment(self, session_id: str, name: str) -> str | None:
        """Return the name of the environment of a code context."""
        query = select(code_contexts.c.environment).where(_is(session_id, name))
        return await self._database.read(lambda connection: connection.execute(query).scalar())

    async def put(self, session_id: str, name: str, environment: str | None) -> None:
        """Store the environment of a code context (None deletes it), and delete those of terminated sessions."""
        ended = select(sessions.c.id).where(sessions.c.state == State.TERMINATED.value)

        def run(connection: Connection) -> None:
            connection.execute(delete(code_contexts).where(code_contexts.c.session_id.in_(ended)))
            connection.execute(delete(code_contexts).where(_is(session_id, name)))
            if environment is not None:
                values = {"session_id": session_id, "name": name, "environment": environment}
                connection.execute(insert(code_contexts).values(**values))

        await self._database.write(run)


def _is(session_id: str, name: str) -> ColumnElement[bool]:
    return and_(code_contexts.c.session_id == session_id, code_contexts.c.name == name)
