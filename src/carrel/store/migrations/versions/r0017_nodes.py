"""Servers that share the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision: str | None = "0016"


def upgrade() -> None:
    """Add the table of servers."""
    by_database = "seconds since 1970, by the clock of the database"
    boot = "of one process of the server; another after each start"
    machine = "the machine and network that a loopback address belongs to"
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("boot", sa.String(32), nullable=False, comment=boot),
        sa.Column("url", sa.String(255), nullable=True, comment="where other servers reach it"),
        sa.Column("machine", sa.String(64), nullable=False, comment=machine),
        sa.Column("key_id", sa.String(32), nullable=False, comment="of the secret that signs forwarded requests"),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("providers", sa.JSON, nullable=False),
        sa.Column("sandboxes", sa.Integer, nullable=False),
        sa.Column("capacity", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False, comment=by_database),
        sa.Column("seen_at", sa.Double, nullable=False, comment=by_database),
        sa.Column(
            "lease_s", sa.Double, nullable=False, comment="seconds without a sign of life until it counts as gone"
        ),
    )
