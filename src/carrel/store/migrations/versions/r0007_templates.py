"""The template of a session, and values that secrets had while a sandbox saw them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column and the table."""
    op.add_column("sessions", sa.Column("template", sa.String(128)))
    op.create_table(
        "former_secrets",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("scope", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
    )
    op.create_index("former_secrets_scope", "former_secrets", ["kind", "scope"])
