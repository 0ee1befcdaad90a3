"""The event log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision: str | None = "0017"


def _number() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _facts() -> list[sa.Column[object]]:
    return [
        sa.Column("at", sa.Double, nullable=False, comment="seconds since 1970, UTC"),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("context_id", sa.String(128), nullable=True),
        sa.Column("session_id", sa.String(64), nullable=True),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    ]


def upgrade() -> None:
    """Add the events, those that wait for an id, the ends of the log, and what a bus has of it."""
    op.create_table("events", sa.Column("id", _number(), primary_key=True, autoincrement=True), *_facts())
    op.create_index("events_context", "events", ["context_id", "id"])
    op.create_table("staged_events", sa.Column("key", _number(), primary_key=True, autoincrement=True), *_facts())
    comment = "last, removed (by retention, up to it), identity"
    op.create_table(
        "event_state",
        sa.Column("name", sa.String(32), primary_key=True, comment=comment),
        sa.Column("id", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "event_deliveries",
        sa.Column("bus", sa.String(64), primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False, comment="the newest event that the bus has"),
        sa.Column("owner", sa.String(255), nullable=True, comment="the server that delivers"),
        sa.Column("until", sa.Double, nullable=True, comment="seconds since 1970, by the clock of the database"),
    )
