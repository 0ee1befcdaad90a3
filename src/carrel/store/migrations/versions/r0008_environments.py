"""Environments: what was built, what it is called, who has it; and sandboxes that act for a context."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_SECONDS = "seconds since 1970, UTC"
_WHOSE = "whose policy holds for a sandbox of carrel's own"


def upgrade() -> None:
    """Add the column and the tables."""
    op.add_column("sessions", sa.Column("acts_for", sa.String(128), comment=_WHOSE))
    op.create_table(
        "environments",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, comment="of the lock and what else decides the content"),
        sa.Column("python", sa.String(32), nullable=False),
        sa.Column("interpreter", sa.String(255), nullable=False),
        sa.Column("requirements", sa.JSON, nullable=False),
        sa.Column("packages", sa.JSON, nullable=False),
        sa.Column("imports", sa.JSON, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False, comment=_SECONDS),
        sa.Column("last_used_at", sa.Double, nullable=False, comment=_SECONDS),
        sa.Column("built_by", sa.String(128)),
    )
    op.create_table(
        "environment_labels",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("label", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
    )
    op.create_table(
        "environment_uses",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("holder", sa.String(128), primary_key=True, comment="a context, or an ephemeral session"),
        sa.Column("name", sa.String(64), primary_key=True),
    )
