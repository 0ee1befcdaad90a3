"""Secrets, sealed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "secrets",
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("scope", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
        sa.Column("updated_at", sa.Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
    )
    op.create_index("secrets_key", "secrets", ["key_id"])
