"""Which environment a code context has, so that it has it again where its sandbox starts next; and which one a request
came to.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "environment_requests",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("key", sa.String(64), primary_key=True, comment="of what was asked for, and under which policy"),
        sa.Column("name", sa.String(64), nullable=False),
    )
    op.create_table(
        "code_contexts",
        sa.Column("session_id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("environment", sa.String(64), nullable=False),
    )
