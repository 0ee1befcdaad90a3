"""Ports of sandboxes that everybody may reach."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from carrel.store.tables import Words

revision = "0021"
down_revision: str | None = "0020"


def upgrade() -> None:
    """Add the public ports."""
    op.create_table(
        "public_ports",
        sa.Column("session_id", Words(64), primary_key=True),
        sa.Column("port", sa.Integer, primary_key=True),
        sa.Column(
            "token_id", Words(64), nullable=True, comment="that made it public; null for the administrator's own"
        ),
        sa.Column("wake", sa.Boolean, nullable=False, comment="whether a request starts the sandbox again"),
        sa.Column("at", sa.Double, nullable=False, comment="seconds since 1970"),
    )
