"""All tables as they were when the revisions before the first release became this one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision: str | None = None

_UTC = "seconds since 1970, UTC"
_DATABASE_CLOCK = "seconds since 1970, by the clock of the database"


def upgrade() -> None:
    """Make the tables and their indexes."""
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("context_id", sa.String(128)),
        sa.Column("ephemeral", sa.Boolean, nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("provider", sa.String(64), nullable=False),
        sa.Column("isolation_level", sa.Integer, nullable=False),
        sa.Column("unsafe", sa.Boolean, nullable=False),
        sa.Column("trust", sa.String(16), nullable=False),
        sa.Column("network", sa.String(16), nullable=False),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("env", sa.JSON, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("handle", sa.JSON),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("created_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("last_activity_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("error", sa.Text),
        sa.Column("end_reason", sa.Text),
        sa.Column("node", sa.String(255)),
        sa.Column("lease_owner", sa.String(255)),
        sa.Column("lease_until", sa.Double, comment=_DATABASE_CLOCK),
        sa.Column("fence", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("filespace", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("snapshot", sa.String(64)),
        sa.Column("notice", sa.Text),
        sa.Column("template", sa.String(128)),
        sa.Column("acts_for", sa.String(128), comment="whose policy holds for a sandbox of carrel's own"),
        sa.Column("agent", sa.String(128), comment="whom the workspace belongs to"),
        sa.Column("used_bytes", sa.BigInteger, comment="of the workspace, when last measured"),
        sa.Column("expires_at", sa.Double, comment="when an unused workspace is deleted"),
        sa.Column("forgotten", sa.Boolean, nullable=False, server_default=sa.text("false")),
    )
    live = sa.text("state != 'terminated'")
    op.create_index(
        "sessions_context", "sessions", ["context_id"], unique=True, sqlite_where=live, postgresql_where=live
    )
    op.create_index("sessions_idempotency_key", "sessions", ["idempotency_key"], unique=True)
    op.create_index("sessions_lease", "sessions", ["lease_until"])
    op.create_index("sessions_page", "sessions", ["created_at", "id"])
    op.create_index("sessions_state", "sessions", ["state"])
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("context_id", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(64)),
        sa.Column("parent", sa.String(64)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("driver", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger),
        sa.Column("new_bytes", sa.BigInteger),
        sa.Column("files", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("error", sa.Text),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("node", sa.String(255)),
        sa.Column("reason", sa.String(16), nullable=False, server_default=sa.text("'request'")),
        sa.Column("archived", sa.Boolean, nullable=False, server_default=sa.text("false")),
    )
    op.create_index("snapshots_context", "snapshots", ["context_id", "created_at", "id"])
    op.create_index("snapshots_status", "snapshots", ["status"])
    op.create_table(
        "filespace_entries",
        sa.Column("context_id", sa.String(128), primary_key=True),
        sa.Column("path_key", sa.String(64), primary_key=True),
        sa.Column("path", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.String(128)),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("mode", sa.Integer, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
    op.create_index("filespace_entries_version", "filespace_entries", ["context_id", "version"], unique=True)
    op.create_table(
        "audit_records",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("chain", sa.String(255), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False, comment=_UTC),
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
    op.create_index("audit_records_actor", "audit_records", ["actor", "at", "id"])
    op.create_index("audit_records_at", "audit_records", ["at", "id"])
    op.create_index("audit_records_chain", "audit_records", ["chain", "at", "id"])
    op.create_index("audit_records_decision", "audit_records", ["decision", "at", "id"])
    op.create_index("audit_records_kind", "audit_records", ["kind", "at", "id"])
    op.create_index("audit_records_name", "audit_records", ["name", "at", "id"])
    op.create_index("audit_records_ref", "audit_records", ["chain", "ref"])
    op.create_index("audit_records_result", "audit_records", ["result", "at", "id"])
    op.create_index("audit_records_seq", "audit_records", ["chain", "seq"], unique=True)
    op.create_table(
        "audit_heads",
        sa.Column("chain", sa.String(255), primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("records", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("signature", sa.String(128), nullable=False),
    )
    op.create_index("audit_heads_at", "audit_heads", ["at"])
    op.create_table(
        "audit_holds",
        sa.Column("chain", sa.String(255), primary_key=True),
        sa.Column("node", sa.String(255), primary_key=True),
        sa.Column("open_from", sa.BigInteger, nullable=False),
        sa.Column("clean", sa.Boolean, nullable=False),
    )
    op.create_index("audit_holds_node", "audit_holds", ["node", "clean"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("namespace", sa.String(128)),
        sa.Column("contexts", sa.JSON),
        sa.Column("created_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("expires_at", sa.Double, comment=_UTC),
        sa.Column("revoked_at", sa.Double, comment=_UTC),
        sa.Column("used_at", sa.Double, comment="seconds since 1970, UTC, coarse"),
    )
    op.create_index("tokens_hash", "tokens", ["hash"], unique=True)
    op.create_table(
        "secrets",
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("scope", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False, comment=_DATABASE_CLOCK),
        sa.Column("updated_at", sa.Double, nullable=False, comment=_DATABASE_CLOCK),
    )
    op.create_index("secrets_key", "secrets", ["key_id"])
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
        sa.Column("created_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("expires_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("scope", sa.String(16)),
        sa.Column("rule", sa.Text),
        sa.Column("decided_by", sa.String(255)),
        sa.Column("decided_at", sa.Double, comment=_UTC),
        sa.Column("message", sa.Text),
        sa.Column("used_at", sa.Double, comment=_UTC),
        sa.Column("run", sa.String(64), comment="the name under which its operation is dispatched, until it ends"),
        sa.Column("run_on", sa.String(128), comment="the server that does it"),
        sa.Column("run_in", sa.String(64), comment="the very sandbox that it is dispatched to"),
    )
    op.create_index("approvals_digest", "approvals", ["context_id", "digest", "state"])
    op.create_index("approvals_page", "approvals", ["created_at", "id"])
    op.create_index("approvals_runs", "approvals", ["run_on", "run"])
    op.create_index("approvals_state", "approvals", ["state", "expires_at"])
    op.create_table(
        "policies",
        sa.Column("context_id", sa.String(128), primary_key=True),
        sa.Column("settings", sa.JSON),
        sa.Column("sources", sa.JSON),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("updated_by", sa.String(255), nullable=False),
    )
    op.create_table(
        "environments",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, comment="of the lock and what else decides the content"),
        sa.Column("python", sa.String(32), nullable=False),
        sa.Column("interpreter", sa.String(255), nullable=False),
        sa.Column("requirements", sa.JSON, nullable=False),
        sa.Column("packages", sa.JSON, nullable=False),
        sa.Column("imports", sa.JSON, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("last_used_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("built_by", sa.String(128)),
    )
    op.create_table(
        "environment_labels",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("label", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
    )
    op.create_table(
        "environment_uses",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("holder", sa.String(128), primary_key=True, comment="a context, or an ephemeral session"),
        sa.Column("name", sa.String(64), primary_key=True),
    )
    op.create_table(
        "mcp_servers",
        sa.Column("context_id", sa.String(128), primary_key=True, comment="empty for those the operator runs for all"),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("declaration", sa.JSON, nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("environment", sa.String(64)),
        sa.Column("program", sa.Text, comment="where the program of an npm package lies"),
        sa.Column("generation", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("updated_at", sa.Double, nullable=False, comment=_UTC),
        sa.Column("catalogue", sa.JSON),
        sa.Column("catalogue_generation", sa.String(32)),
        sa.Column("discovered_at", sa.Double, comment=_UTC),
        sa.Column("discovery_error", sa.Text),
    )
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
