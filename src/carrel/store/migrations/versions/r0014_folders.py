"""Sessions that work on a folder of the host."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision: str | None = "0013"


def upgrade() -> None:
    """Add the folder of a session, and what else of the host its sandbox sees."""
    op.add_column("sessions", sa.Column("workspace_path", sa.Text, comment="a folder of the host"))
    op.add_column("sessions", sa.Column("host_paths", sa.JSON))
