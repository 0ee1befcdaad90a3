"""MCP servers of contexts, with what they offer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_SECONDS = "seconds since 1970, UTC"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "mcp_servers",
        sa.Column("context_id", sa.String(128), primary_key=True, comment="empty for those the operator runs for all"),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("declaration", sa.JSON, nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("environment", sa.String(64)),
        sa.Column("program", sa.Text, comment="where the program of an npm package lies"),
        sa.Column("generation", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False, comment=_SECONDS),
        sa.Column("updated_at", sa.Double, nullable=False, comment=_SECONDS),
        sa.Column("catalogue", sa.JSON),
        sa.Column("catalogue_generation", sa.String(32)),
        sa.Column("discovered_at", sa.Double, comment=_SECONDS),
        sa.Column("discovery_error", sa.Text),
    )
