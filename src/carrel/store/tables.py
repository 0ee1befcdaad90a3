"""The tables. Only types and constraints that SQLite and PostgreSQL both have."""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, Column, Double, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("context_id", String(128), nullable=True),
    Column("ephemeral", Boolean, nullable=False),
    Column("state", String(32), nullable=False),
    Column("provider", String(64), nullable=False),
    Column("isolation_level", Integer, nullable=False),
    Column("unsafe", Boolean, nullable=False),
    Column("trust", String(16), nullable=False),
    Column("network", String(16), nullable=False),
    Column("limits", JSON, nullable=False),
    Column("env", JSON, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("handle", JSON(none_as_null=True), nullable=True),
    Column("idempotency_key", String(255), nullable=True),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("last_activity_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("error", Text, nullable=True),
    Column("end_reason", Text, nullable=True),
)

_live = sessions.c.state != "terminated"
Index("sessions_context", sessions.c.context_id, unique=True, sqlite_where=_live, postgresql_where=_live)
Index("sessions_idempotency_key", sessions.c.idempotency_key, unique=True)
Index("sessions_page", sessions.c.created_at, sessions.c.id)
Index("sessions_state", sessions.c.state)
