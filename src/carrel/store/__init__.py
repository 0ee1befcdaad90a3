"""The database of the control plane: tables and queries, the same on SQLite and PostgreSQL. Makes no decisions."""

from carrel.store.audit import AuditStore
from carrel.store.database import Database
from carrel.store.filespace import FilespaceChange, FilespaceEntry, FilespaceMark, FilespaceStore
from carrel.store.leases import Lease, LeaseStore
from carrel.store.secrets import SecretInfo, SecretRecord, SecretStore
from carrel.store.sessions import ImageSession, SessionRecord, SessionStore
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus, SnapshotStore
from carrel.store.tokens import TokenRecord, TokenStore

__all__ = [
    "AuditStore",
    "Database",
    "FilespaceChange",
    "FilespaceEntry",
    "FilespaceMark",
    "FilespaceStore",
    "ImageSession",
    "Lease",
    "LeaseStore",
    "SecretInfo",
    "SecretRecord",
    "SecretStore",
    "SessionRecord",
    "SessionStore",
    "SnapshotRecord",
    "SnapshotStatus",
    "SnapshotStore",
    "TokenRecord",
    "TokenStore",
]
