"""An approval that is taken to run its operation says by whom, under which name and where, until it has ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the columns. What was taken before is as it was: used."""
    for name, size, comment in (
        ("run", 64, "the name under which its operation is dispatched, until it ends"),
        ("run_on", 128, "the server that does it"),
        ("run_in", 64, "the very sandbox that it is dispatched to"),
    ):
        op.add_column("approvals", sa.Column(name, sa.String(size), nullable=True, comment=comment))
    op.create_index("approvals_runs", "approvals", ["run_on", "run"])
