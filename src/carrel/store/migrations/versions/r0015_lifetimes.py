"""Sandboxes with a lifetime."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision: str | None = "0014"


def upgrade() -> None:
    """Add the time at which a running sandbox ends."""
    comment = "when the lifetime of the running sandbox is over"
    op.add_column("sessions", sa.Column("ends_at", sa.Double, comment=comment))
