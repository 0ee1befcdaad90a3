"""The tables, with types and constraints that both SQLite and PostgreSQL have."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    text,
)

metadata = MetaData()


class Words(TypeDecorator[str]):
    """Text and names. Characters that one of the databases cannot store (NUL, lone surrogates) become U+FFFD, so that
    no text from a caller or a program can make a write fail.
    """

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Replace the characters that a database cannot store."""
        if value is None or (value.isascii() and "\0" not in value):
            return value
        held = value.replace("\0", "\ufffd")
        return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in held)


class Prose(Words):
    """Text of any length."""

    impl = Text
    cache_ok = True


class PathBytes(TypeDecorator[str]):
    """A path exactly as the file system has it: bytes in the database, surrogate escapes in Python."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        """Return the bytes of the path."""
        return None if value is None else value.encode("utf-8", "surrogateescape")

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        """Return the path of the bytes."""
        return None if value is None else bytes(value).decode("utf-8", "surrogateescape")


sessions = Table(
    "sessions",
    metadata,
    Column("id", Words(64), primary_key=True),
    Column("context_id", Words(128), nullable=True),
    Column("ephemeral", Boolean, nullable=False),
    Column("state", String(32), nullable=False),
    Column("provider", Words(64), nullable=False),
    Column("isolation_level", Integer, nullable=False),
    Column("unsafe", Boolean, nullable=False),
    Column("trust", String(16), nullable=False),
    Column("network", String(16), nullable=False),
    Column("limits", JSON, nullable=False),
    Column("env", JSON, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("handle", JSON(none_as_null=True), nullable=True),
    Column("idempotency_key", Words(255), nullable=True),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("last_activity_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("error", Prose, nullable=True),
    Column("end_reason", Prose, nullable=True),
    Column("node", Words(255), nullable=True),
    Column("lease_owner", Words(255), nullable=True),
    Column("lease_until", Double, nullable=True, comment="seconds since 1970, by the clock of the database"),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    Column("filespace", Boolean, nullable=False, server_default=text("false")),
    Column("snapshot", Words(64), nullable=True),
    Column("notice", Prose, nullable=True),
    Column("template", Words(128), nullable=True),
    Column("acts_for", Words(128), nullable=True, comment="whose policy holds for a sandbox of carrel's own"),
    Column("agent", Words(128), nullable=True, comment="whom the workspace belongs to"),
    Column("used_bytes", BigInteger, nullable=True, comment="of the workspace, when last measured"),
    Column("expires_at", Double, nullable=True, comment="when an unused workspace is deleted"),
    Column("forgotten", Boolean, nullable=False, server_default=text("false")),
    Column("workspace_path", Prose, nullable=True, comment="a folder of the host"),
    Column("host_paths", JSON(none_as_null=True), nullable=True),
    Column("ends_at", Double, nullable=True, comment="when the lifetime of the running sandbox is over"),
    Column("image", Prose, nullable=True, comment="the image that was asked for; null: the host's own root"),
    Column("image_digest", String(80), nullable=True, comment="the image that the session runs from"),
    Column("image_workdir", Boolean, nullable=False, server_default=text("false")),
)

_live = sessions.c.state != "terminated"
_live_contexts = Index("sessions_context", sessions.c.context_id, unique=True, sqlite_where=_live)


def declare_for_postgresql() -> None:
    """Complete the tables with options of PostgreSQL. Only for its users: SQLAlchemy imports its dialect for them."""
    partial = {
        _live_contexts: _live,
        _job_events: _of_job,
        _job_keys: _keyed,
        _job_expiry: _expires,
        _job_webhooks: _told,
    }
    for index, where in partial.items():
        index.dialect_options["postgresql"]["where"] = where


Index("sessions_idempotency_key", sessions.c.idempotency_key, unique=True)
Index("sessions_page", sessions.c.created_at, sessions.c.id)
Index("sessions_state", sessions.c.state)
Index("sessions_lease", sessions.c.lease_until)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", Words(64), primary_key=True),
    Column("context_id", Words(128), nullable=False),
    Column("session_id", Words(64), nullable=True),
    Column("parent", Words(64), nullable=True),
    Column("status", String(16), nullable=False),
    Column("driver", Words(64), nullable=False),
    Column("bytes", BigInteger, nullable=True),
    Column("new_bytes", BigInteger, nullable=True),
    Column("files", BigInteger, nullable=True),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("error", Prose, nullable=True),
    Column("labels", JSON, nullable=False),
    Column("node", Words(255), nullable=True),
    Column("reason", String(16), nullable=False, server_default=text("'request'")),
    Column("archived", Boolean, nullable=False, server_default=text("false")),
)
Index("snapshots_context", snapshots.c.context_id, snapshots.c.created_at, snapshots.c.id)
Index("snapshots_status", snapshots.c.status)

filespace_entries = Table(
    "filespace_entries",
    metadata,
    Column("context_id", Words(128), primary_key=True),
    # A path may be longer than an index of PostgreSQL can take, so its digest is the key.
    Column("path_key", String(64), primary_key=True),
    Column("path", PathBytes, nullable=False),
    Column("hash", Words(128), nullable=True),
    Column("size", BigInteger, nullable=False),
    Column("mode", Integer, nullable=False),
    Column("updated_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("deleted", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False),
)
Index("filespace_entries_version", filespace_entries.c.context_id, filespace_entries.c.version, unique=True)

audit_records = Table(
    "audit_records",
    metadata,
    # Orders records of the same moment; SQLite numbers rows itself only in a plain INTEGER column.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("chain", Words(255), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("type", String(8), nullable=False),
    Column("ref", BigInteger, nullable=True, comment="of an end: the seq of its begin"),
    Column("actor", Words(128), nullable=False),
    Column("kind", Words(128), nullable=False),
    Column("name", Words(128), nullable=False),
    Column("decision", String(8), nullable=False),
    Column("result", Words(128), nullable=True),
    Column("hash", LargeBinary, nullable=False),
    # The hashed text, which is also what is shown; the other columns only serve the search.
    Column("body", Text, nullable=False),
)
Index("audit_records_seq", audit_records.c.chain, audit_records.c.seq, unique=True)
Index("audit_records_ref", audit_records.c.chain, audit_records.c.ref)
Index("audit_records_at", audit_records.c.at, audit_records.c.id)
for _name in ("chain", "actor", "kind", "name", "decision", "result"):
    Index(f"audit_records_{_name}", audit_records.c[_name], audit_records.c.at, audit_records.c.id)

events = Table(
    "events",
    metadata,
    # The newest event is never removed, so SQLite never uses an id again.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("kind", String(32), nullable=False),
    Column("context_id", Words(128), nullable=True),
    Column("session_id", Words(64), nullable=True),
    Column("node", Words(255), nullable=False),
    Column("body", Text, nullable=False),
    Column("job_id", Words(32), nullable=True),
)
Index("events_context", events.c.context_id, events.c.id)
_of_job = events.c.job_id.is_not(None)
_job_events = Index("events_job", events.c.job_id, events.c.id, sqlite_where=_of_job)

# PostgreSQL: written in the transactions of what happened, and moved to `events` by one transaction at a time.
staged_events = Table(
    "staged_events",
    metadata,
    Column("key", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("kind", String(32), nullable=False),
    Column("context_id", Words(128), nullable=True),
    Column("session_id", Words(64), nullable=True),
    Column("node", Words(255), nullable=False),
    Column("body", Text, nullable=False),
    Column("job_id", Words(32), nullable=True),
)

event_state = Table(
    "event_state",
    metadata,
    Column(
        "name",
        String(32),
        primary_key=True,
        comment="last, removed (by retention, up to it), identity",
    ),
    Column("id", BigInteger, nullable=False),
)

event_deliveries = Table(
    "event_deliveries",
    metadata,
    Column("bus", String(64), primary_key=True),
    Column("position", BigInteger, nullable=False, comment="the newest event that the bus has"),
    Column("owner", Words(255), nullable=True, comment="the server that delivers"),
    Column("until", Double, nullable=True, comment="seconds since 1970, by the clock of the database"),
)

audit_heads = Table(
    "audit_heads",
    metadata,
    Column("chain", Words(255), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", String(64), nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("key", String(64), nullable=False),
    Column("signature", String(128), nullable=False),
)
Index("audit_heads_at", audit_heads.c.at)

audit_holds = Table(
    "audit_holds",
    metadata,
    Column("chain", Words(255), primary_key=True),
    Column("node", Words(255), primary_key=True),
    Column("open_from", BigInteger, nullable=False),
    Column("clean", Boolean, nullable=False),
)
Index("audit_holds_node", audit_holds.c.node, audit_holds.c.clean)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Words(64), primary_key=True),
    Column("name", Words(128), nullable=False),
    Column("hash", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("namespace", Words(128), nullable=True),
    Column("contexts", JSON(none_as_null=True), nullable=True),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("created_by", Words(255), nullable=False),
    Column("expires_at", Double, nullable=True, comment="seconds since 1970, UTC"),
    Column("revoked_at", Double, nullable=True, comment="seconds since 1970, UTC"),
    Column("used_at", Double, nullable=True, comment="seconds since 1970, UTC, coarse"),
)
Index("tokens_hash", tokens.c.hash, unique=True)

secrets = Table(
    "secrets",
    metadata,
    Column("kind", String(16), primary_key=True),
    Column("scope", Words(128), primary_key=True),
    Column("name", Words(128), primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
    Column("updated_at", Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
)
Index("secrets_key", secrets.c.key_id)

former_secrets = Table(
    "former_secrets",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("scope", Words(128), nullable=False),
    Column("name", Words(128), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("key_id", String(32), nullable=False),
)
Index("former_secrets_scope", former_secrets.c.kind, former_secrets.c.scope)

approvals = Table(
    "approvals",
    metadata,
    Column("id", Words(64), primary_key=True),
    Column("context_id", Words(128), nullable=True),
    Column("sandbox_id", Words(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("operation", Words(64), nullable=False),
    Column("summary", Prose, nullable=False),
    Column("arguments", JSON, nullable=False),
    Column("digest", String(64), nullable=False, comment="of the operation as it was asked for, unredacted"),
    Column("reason", Prose, nullable=False),
    Column("requested_by", Words(255), nullable=False),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("expires_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("state", String(16), nullable=False),
    Column("scope", String(16), nullable=True),
    Column("rule", Prose, nullable=True),
    Column("decided_by", Words(255), nullable=True),
    Column("decided_at", Double, nullable=True, comment="seconds since 1970, UTC"),
    Column("message", Prose, nullable=True),
    Column("used_at", Double, nullable=True, comment="seconds since 1970, UTC"),
    Column("run", String(64), nullable=True, comment="the name under which its operation is dispatched, until it ends"),
    Column("run_on", Words(128), nullable=True, comment="the server that does it"),
    Column("run_in", String(64), nullable=True, comment="the very sandbox that it is dispatched to"),
)
Index("approvals_runs", approvals.c.run_on, approvals.c.run)
Index("approvals_page", approvals.c.created_at, approvals.c.id)
Index("approvals_digest", approvals.c.context_id, approvals.c.digest, approvals.c.state)
Index("approvals_state", approvals.c.state, approvals.c.expires_at)

policies = Table(
    "policies",
    metadata,
    Column("context_id", Words(128), primary_key=True),
    Column("settings", JSON(none_as_null=True), nullable=True),
    Column("sources", JSON(none_as_null=True), nullable=True),
    Column("version", BigInteger, nullable=False),
    Column("updated_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("updated_by", Words(255), nullable=False),
)

environments = Table(
    "environments",
    metadata,
    Column("node", Words(128), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("hash", String(64), nullable=False, comment="of the lock and what else decides the content"),
    Column("python", String(32), nullable=False),
    Column("interpreter", String(255), nullable=False),
    Column("requirements", JSON, nullable=False),
    Column("packages", JSON, nullable=False),
    Column("imports", JSON, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("last_used_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("built_by", Words(128), nullable=True),
)

environment_labels = Table(
    "environment_labels",
    metadata,
    Column("node", Words(128), primary_key=True),
    Column("label", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
)

environment_uses = Table(
    "environment_uses",
    metadata,
    Column("node", Words(128), primary_key=True),
    Column("holder", Words(128), primary_key=True, comment="a context, or an ephemeral session"),
    Column("name", String(64), primary_key=True),
)

mcp_servers = Table(
    "mcp_servers",
    metadata,
    Column("context_id", Words(128), primary_key=True, comment="empty for those the operator runs for all"),
    Column("name", String(64), primary_key=True),
    Column("declaration", JSON, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("environment", String(64), nullable=True),
    Column("program", Prose, nullable=True, comment="where the program of an npm package lies"),
    Column("generation", String(32), nullable=False),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("updated_at", Double, nullable=False, comment="seconds since 1970, UTC"),
    Column("catalogue", JSON(none_as_null=True), nullable=True),
    Column("catalogue_generation", String(32), nullable=True),
    Column("discovered_at", Double, nullable=True, comment="seconds since 1970, UTC"),
    Column("discovery_error", Prose, nullable=True),
)

environment_requests = Table(
    "environment_requests",
    metadata,
    Column("node", Words(128), primary_key=True),
    Column("key", String(64), primary_key=True, comment="of what was asked for, and under which policy"),
    Column("name", String(64), nullable=False),
)

code_contexts = Table(
    "code_contexts",
    metadata,
    Column("session_id", Words(64), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("environment", String(64), nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", Words(128), primary_key=True),
    Column("boot", String(32), nullable=False, comment="of one process of the server; another after each start"),
    Column("url", Words(255), nullable=True, comment="where other servers reach it"),
    Column("machine", String(64), nullable=False, comment="the machine and network that a loopback address belongs to"),
    Column("key_id", String(32), nullable=False, comment="of the secret that signs forwarded requests"),
    Column("version", Words(64), nullable=False),
    Column("providers", JSON, nullable=False),
    Column("sandboxes", Integer, nullable=False),
    Column("capacity", Integer, nullable=False),
    Column("started_at", Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
    Column("seen_at", Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
    Column("lease_s", Double, nullable=False, comment="seconds without a sign of life until it counts as gone"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Words(32), primary_key=True),
    Column("namespace", Words(128), nullable=False),
    Column("context_id", Words(128), nullable=False),
    Column("own_workspace", Boolean, nullable=False),
    Column("state", String(20), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("attempt", Integer, nullable=False, comment="the number of the newest attempt"),
    Column(
        "fence", BigInteger, nullable=False, comment="grows with each owner; a write with an old one changes nothing"
    ),
    Column("created_at", Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
    Column("queued_at", Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
    Column("not_before", Double, nullable=False, comment="when it may start; seconds since 1970"),
    Column("claimed_at", Double, nullable=True, comment="of the newest attempt; seconds since 1970"),
    Column("due_at", Double, nullable=True, comment="when a timeout ends it while no server has it"),
    Column("expires_at", Double, nullable=True, comment="when an ended job is removed"),
    Column("owner", Words(128), nullable=True, comment="the server that runs it"),
    Column("lease_until", Double, nullable=True, comment="seconds since 1970, by the clock of the database"),
    Column("cancel", Boolean, nullable=False, comment="whether somebody cancelled it"),
    Column("approval", Words(64), nullable=True, comment="that it waits for"),
    Column("token_id", Words(64), nullable=True, comment="of its submitter; null for the administrator's own"),
    Column("subject", Words(255), nullable=False),
    Column("idempotency_key", String(64), nullable=True),
    Column("webhook", Double, nullable=True, comment="when the webhook is told next; null: never"),
    Column("request", JSON, nullable=False),
    Column("facts", JSON, nullable=False, comment="what became of it; see control/jobs/lifecycle.py"),
)
Index("jobs_queue", jobs.c.state, jobs.c.namespace, jobs.c.priority.desc(), jobs.c.queued_at, jobs.c.id)
Index("jobs_page", jobs.c.created_at, jobs.c.id)
Index("jobs_context", jobs.c.context_id, jobs.c.created_at, jobs.c.id)
Index("jobs_claimed", jobs.c.namespace, jobs.c.claimed_at)
_keyed, _expires, _told = (each.is_not(None) for each in (jobs.c.idempotency_key, jobs.c.expires_at, jobs.c.webhook))
_job_keys = Index("jobs_key", jobs.c.idempotency_key, unique=True, sqlite_where=_keyed)
_job_expiry = Index("jobs_expiry", jobs.c.expires_at, sqlite_where=_expires)
_job_webhooks = Index("jobs_webhook", jobs.c.webhook, sqlite_where=_told)

job_output = Table(
    "job_output",
    metadata,
    Column("job_id", Words(32), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("start", BigInteger, primary_key=True, comment="offset of the first byte"),
    Column("stream", String(8), nullable=False),
    Column("data", LargeBinary, nullable=False, comment="without secrets"),
    Column("raw", BigInteger, nullable=False, comment="offset after it in the output of the sandbox, with secrets"),
)

job_artifacts = Table(
    "job_artifacts",
    metadata,
    Column("job_id", Words(32), primary_key=True),
    Column("files", JSON, nullable=False),
    Column("truncated", Boolean, nullable=False),
)

revoked_nodes = Table(
    "revoked_nodes",
    metadata,
    Column("name", Words(128), primary_key=True),
    Column("at", Double, nullable=False, comment="seconds since 1970, by the clock of the database"),
)

public_ports = Table(
    "public_ports",
    metadata,
    Column("session_id", Words(64), primary_key=True),
    Column("port", Integer, primary_key=True),
    Column("token_id", Words(64), nullable=True, comment="that made it public; null for the administrator's own"),
    Column("wake", Boolean, nullable=False, comment="whether a request starts the sandbox again"),
    Column("at", Double, nullable=False, comment="seconds since 1970"),
)
