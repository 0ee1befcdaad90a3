"""Sessions, as the first release made them without migrations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None

COLUMNS = (
    ("id", sa.String(64), False),
    ("context_id", sa.String(128), True),
    ("ephemeral", sa.Boolean, False),
    ("state", sa.String(32), False),
    ("provider", sa.String(64), False),
    ("isolation_level", sa.Integer, False),
    ("unsafe", sa.Boolean, False),
    ("trust", sa.String(16), False),
    ("network", sa.String(16), False),
    ("limits", sa.JSON, False),
    ("env", sa.JSON, False),
    ("labels", sa.JSON, False),
    ("handle", sa.JSON, True),
    ("idempotency_key", sa.String(255), True),
    ("created_at", sa.Double, False),
    ("last_activity_at", sa.Double, False),
    ("error", sa.Text, True),
    ("end_reason", sa.Text, True),
)
TIME = "seconds since 1970, UTC"


def upgrade() -> None:
    """Make the table and its indexes."""
    times = ("created_at", "last_activity_at")
    op.create_table(
        "sessions",
        *(
            sa.Column(name, kind, primary_key=name == "id", nullable=nullable, comment=TIME if name in times else None)
            for name, kind, nullable in COLUMNS
        ),
    )
    live = sa.text("state != 'terminated'")
    op.create_index(
        "sessions_context", "sessions", ["context_id"], unique=True, sqlite_where=live, postgresql_where=live
    )
    op.create_index("sessions_idempotency_key", "sessions", ["idempotency_key"], unique=True)
    op.create_index("sessions_page", "sessions", ["created_at", "id"])
    op.create_index("sessions_state", "sessions", ["state"])
