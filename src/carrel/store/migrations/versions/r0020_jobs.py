"""Jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision: str | None = "0019"

_BY_DATABASE = "seconds since 1970, by the clock of the database"


def upgrade() -> None:
    """Add the jobs with their output and artifacts, and the job that an event tells of."""
    for table in ("events", "staged_events"):
        op.add_column(table, sa.Column("job_id", sa.String(32), nullable=True))
    _index("events_job", "events", ["job_id", "id"], "job_id")
    fence = "grows with each owner; a write with an old one changes nothing"
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("namespace", sa.String(128), nullable=False),
        sa.Column("context_id", sa.String(128), nullable=False),
        sa.Column("own_workspace", sa.Boolean, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, comment="the number of the newest attempt"),
        sa.Column("fence", sa.BigInteger, nullable=False, comment=fence),
        sa.Column("created_at", sa.Double, nullable=False, comment=_BY_DATABASE),
        sa.Column("queued_at", sa.Double, nullable=False, comment=_BY_DATABASE),
        sa.Column("not_before", sa.Double, nullable=False, comment="when it may start; seconds since 1970"),
        sa.Column("claimed_at", sa.Double, nullable=True, comment="of the newest attempt; seconds since 1970"),
        sa.Column("due_at", sa.Double, nullable=True, comment="when a timeout ends it while no server has it"),
        sa.Column("expires_at", sa.Double, nullable=True, comment="when an ended job is removed"),
        sa.Column("owner", sa.String(128), nullable=True, comment="the server that runs it"),
        sa.Column("lease_until", sa.Double, nullable=True, comment=_BY_DATABASE),
        sa.Column("cancel", sa.Boolean, nullable=False, comment="whether somebody cancelled it"),
        sa.Column("approval", sa.String(64), nullable=True, comment="that it waits for"),
        sa.Column(
            "token_id", sa.String(64), nullable=True, comment="of its submitter; null for the administrator's own"
        ),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("idempotency_key", sa.String(64), nullable=True),
        sa.Column("webhook", sa.Double, nullable=True, comment="when the webhook is told next; null: never"),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("facts", sa.JSON, nullable=False, comment="what became of it; see control/jobs/lifecycle.py"),
    )
    op.create_index("jobs_queue", "jobs", ["state", "namespace", sa.text("priority DESC"), "queued_at", "id"])
    op.create_index("jobs_page", "jobs", ["created_at", "id"])
    op.create_index("jobs_context", "jobs", ["context_id", "created_at", "id"])
    op.create_index("jobs_claimed", "jobs", ["namespace", "claimed_at"])
    _index("jobs_key", "jobs", ["idempotency_key"], "idempotency_key", unique=True)
    _index("jobs_expiry", "jobs", ["expires_at"], "expires_at")
    _index("jobs_webhook", "jobs", ["webhook"], "webhook")
    raw = "offset after it in the output of the sandbox, with secrets"
    op.create_table(
        "job_output",
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("start", sa.BigInteger, primary_key=True, comment="offset of the first byte"),
        sa.Column("stream", sa.String(8), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False, comment="without secrets"),
        sa.Column("raw", sa.BigInteger, nullable=False, comment=raw),
    )
    op.create_table(
        "job_artifacts",
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("files", sa.JSON, nullable=False),
        sa.Column("truncated", sa.Boolean, nullable=False),
    )


def _index(name: str, table: str, columns: list[str], present: str, *, unique: bool = False) -> None:
    """Make an index of the rows that have a value in `present`."""
    where = sa.text(f"{present} IS NOT NULL")
    op.create_index(name, table, columns, unique=unique, sqlite_where=where, postgresql_where=where)
