"""A session says whose its workspace is, what that held, when it is deleted, and whether the context is forgotten."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the columns. Of sessions from before none is forgotten, and the rest is not known."""
    op.add_column(
        "sessions", sa.Column("agent", sa.String(128), nullable=True, comment="whom the workspace belongs to")
    )
    op.add_column(
        "sessions",
        sa.Column("used_bytes", sa.BigInteger, nullable=True, comment="of the workspace, when last measured"),
    )
    op.add_column(
        "sessions", sa.Column("expires_at", sa.Double, nullable=True, comment="when an unused workspace is deleted")
    )
    op.add_column("sessions", sa.Column("forgotten", sa.Boolean, nullable=False, server_default=sa.text("false")))
