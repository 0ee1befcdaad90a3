"""What carrel remembers: tables and queries on SQLite, written so that PostgreSQL runs the same. Decides
nothing.
"""

from carrel.store.database import Database
from carrel.store.sessions import SessionRecord, SessionStore

__all__ = ["Database", "SessionRecord", "SessionStore"]
