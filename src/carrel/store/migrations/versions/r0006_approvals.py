"""Approvals, and the policies of contexts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

TIME = "seconds since 1970, UTC"


def upgrade() -> None:
    """Make the two tables."""
    op.create_table(
        "approvals",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("context_id", sa.String(128)),
        sa.Column("sandbox_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("operation", sa.String(64), nullable=False),
        sa.Column("summary", sa.Text, nullable=False),
        sa.Column("arguments", sa.JSON, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, comment="of the operation as it was asked for, unredacted"),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("requested_by", sa.String(255), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False, comment=TIME),
        sa.Column("expires_at", sa.Double, nullable=False, comment=TIME),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("scope", sa.String(16)),
        sa.Column("rule", sa.Text),
        sa.Column("decided_by", sa.String(255)),
        sa.Column("decided_at", sa.Double, comment=TIME),
        sa.Column("message", sa.Text),
        sa.Column("used_at", sa.Double, comment=TIME),
    )
    op.create_index("approvals_page", "approvals", ["created_at", "id"])
    op.create_index("approvals_digest", "approvals", ["context_id", "digest", "state"])
    op.create_index("approvals_state", "approvals", ["state", "expires_at"])
    op.create_table(
        "policies",
        sa.Column("context_id", sa.String(128), primary_key=True),
        sa.Column("settings", sa.JSON),
        sa.Column("sources", sa.JSON),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False, comment=TIME),
        sa.Column("updated_by", sa.String(255), nullable=False),
    )
