"""Sandboxes that run from an image."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision: str | None = "0015"


def upgrade() -> None:
    """Add the image of a session, and whether its commands start in the image's working directory."""
    comment = "the image that was asked for; null: the host's own root"
    op.add_column("sessions", sa.Column("image", sa.Text, comment=comment))
    op.add_column("sessions", sa.Column("image_digest", sa.String(80), comment="the image that the session runs from"))
    workdir = sa.Column("image_workdir", sa.Boolean, nullable=False, server_default=sa.text("false"))
    op.add_column("sessions", workdir)
