"""Leases on sessions; snapshots and filespace entries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

TIME = "seconds since 1970, UTC"


def upgrade() -> None:
    """Add the columns of a lease and the two tables."""
    op.add_column("sessions", sa.Column("node", sa.String(255)))
    op.add_column("sessions", sa.Column("lease_owner", sa.String(255)))
    clock = "seconds since 1970, by the clock of the database"
    op.add_column("sessions", sa.Column("lease_until", sa.Double, comment=clock))
    op.add_column("sessions", sa.Column("fence", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.create_index("sessions_lease", "sessions", ["lease_until"])
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("context_id", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(64)),
        sa.Column("parent", sa.String(64)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("driver", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger),
        sa.Column("new_bytes", sa.BigInteger),
        sa.Column("files", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False, comment=TIME),
        sa.Column("error", sa.Text),
        sa.Column("labels", sa.JSON, nullable=False),
    )
    op.create_index("snapshots_context", "snapshots", ["context_id", "created_at", "id"])
    op.create_index("snapshots_status", "snapshots", ["status"])
    op.create_table(
        "filespace_entries",
        sa.Column("context_id", sa.String(128), primary_key=True),
        sa.Column("path_key", sa.String(64), primary_key=True),
        sa.Column("path", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.String(128)),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("mode", sa.Integer, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False, comment=TIME),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
    op.create_index("filespace_entries_version", "filespace_entries", ["context_id", "version"], unique=True)
