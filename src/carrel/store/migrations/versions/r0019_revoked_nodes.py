"""Servers whose SPIFFE ID is revoked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from carrel.store.tables import Words

revision = "0019"
down_revision: str | None = "0018"


def upgrade() -> None:
    """Add the revoked servers."""
    op.create_table(
        "revoked_nodes",
        sa.Column("name", Words(128), primary_key=True),
        sa.Column("at", sa.Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
    )
