"""Audit records, signed heads, who continues which chain; tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

TIME = "seconds since 1970, UTC"


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "audit_records",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("chain", sa.String(255), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False, comment=TIME),
        sa.Column("type", sa.String(8), nullable=False),
        sa.Column("ref", sa.BigInteger, comment="of an end: the seq of its begin"),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("decision", sa.String(8), nullable=False),
        sa.Column("result", sa.String(128)),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("audit_records_seq", "audit_records", ["chain", "seq"], unique=True)
    op.create_index("audit_records_ref", "audit_records", ["chain", "ref"])
    op.create_index("audit_records_at", "audit_records", ["at", "id"])
    for name in ("chain", "actor", "kind", "name", "decision", "result"):
        op.create_index(f"audit_records_{name}", "audit_records", [name, "at", "id"])
    op.create_table(
        "audit_heads",
        sa.Column("chain", sa.String(255), primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("records", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False, comment=TIME),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("signature", sa.String(128), nullable=False),
    )
    op.create_index("audit_heads_at", "audit_heads", ["at"])
    op.create_table(
        "audit_chains",
        sa.Column("chain", sa.String(255), primary_key=True),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("open_from", sa.BigInteger, nullable=False),
        sa.Column("clean", sa.Boolean, nullable=False),
    )
    op.create_index("audit_chains_node", "audit_chains", ["node", "clean"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("namespace", sa.String(128)),
        sa.Column("contexts", sa.JSON),
        sa.Column("created_at", sa.Double, nullable=False, comment=TIME),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("expires_at", sa.Double, comment=TIME),
        sa.Column("revoked_at", sa.Double, comment=TIME),
        sa.Column("used_at", sa.Double, comment="seconds since 1970, UTC, coarse"),
    )
    op.create_index("tokens_hash", "tokens", ["hash"], unique=True)
