"""What a session says beside its state; where a snapshot is and why it was taken."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns."""
    false = sa.text("false")
    op.add_column("sessions", sa.Column("filespace", sa.Boolean, nullable=False, server_default=false))
    op.add_column("sessions", sa.Column("snapshot", sa.String(64)))
    op.add_column("sessions", sa.Column("notice", sa.Text))
    op.add_column("snapshots", sa.Column("node", sa.String(255)))
    op.add_column("snapshots", sa.Column("reason", sa.String(16), nullable=False, server_default=sa.text("'request'")))
    op.add_column("snapshots", sa.Column("archived", sa.Boolean, nullable=False, server_default=false))
