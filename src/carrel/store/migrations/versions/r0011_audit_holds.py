"""Every server that writes to a chain of the audit log says by itself whether it left it clean."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Replace the table, which had room for one server."""
    op.create_table(
        "audit_holds",
        sa.Column("chain", sa.String(255), primary_key=True),
        sa.Column("node", sa.String(255), primary_key=True),
        sa.Column("open_from", sa.BigInteger, nullable=False),
        sa.Column("clean", sa.Boolean, nullable=False),
    )
    op.create_index("audit_holds_node", "audit_holds", ["node", "clean"])
    op.execute(
        "INSERT INTO audit_holds (chain, node, open_from, clean) SELECT chain, node, open_from, clean FROM audit_chains"
    )
    op.drop_table("audit_chains")
