"""The data directory of a server, and the initial content of a workspace. Follows no link in a workspace. Blocking."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from carrel.errors import InvalidRequest, PlatformError
from carrel.primitives.atomic import draft, write_all, write_file
from carrel.primitives.trees import open_directory

CANONICAL_UID = 1000
"""The owner of the files on disk when carrel runs as root; an idmapped mount gives each sandbox its own view."""

SUBDIRECTORIES = ("scripts", "data", "repos", "output")
CONTEXT_FILE = ".context.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def encode(name: str, *, ephemeral: bool) -> str:
    """Return the volume name of a context or of an ephemeral sandbox; no two have the same."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:140]!r} cannot name a workspace",
            field="context_id",
            hint="use letters, digits, '.', '_', ':' and '-', at most 128, starting with a letter or digit",
        )
    return ("eph-" if ephemeral else "ctx-") + name.replace(":", "+")


def decode(volume: str) -> str:
    """Return the context or ephemeral sandbox that a volume belongs to."""
    return volume[4:].replace("+", ":")


@dataclass(frozen=True, slots=True)
class WorkspaceFacts:
    """The content of a workspace's description. `context_id` is None for an ephemeral one; `last_accessed` is seconds
    since 1970, None for now; `ttl_days` is None if it is kept forever.
    """

    context_id: str | None
    namespace: str | None = None
    agent: str | None = None
    last_accessed: float | None = None
    ttl_days: float | None = None
    used_bytes: int = 0


class Layout:
    """The data directory of one server."""

    def __init__(self, data_dir: str):
        self.data_dir = data_dir
        self.storage = os.path.join(data_dir, "storage")
        self.run = os.path.join(data_dir, "run")
        self.cache = os.path.join(data_dir, "cache")
        self._root = os.geteuid() == 0

    def prepare(self) -> None:
        """Create the directories of the server, accessible to the owner only."""
        try:
            for path in (self.data_dir, self.storage, self.run, self.cache):
                Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
                os.chmod(path, 0o700)
        except OSError as error:
            raise PlatformError(
                f"cannot use the data directory {self.data_dir}: {error.strerror}",
                field="data_dir",
                hint="choose another one with --data-dir or CARREL_DATA_DIR",
            ) from None

    def node(self) -> str:
        """Return the name of this server among those on one database; it is made once and stored."""
        path = os.path.join(self.data_dir, "node")
        try:
            with suppress(FileNotFoundError), open(path, encoding="ascii") as file:
                if _NAME.fullmatch(name := file.read(200).strip()):
                    return name
            name = f"node-{secrets.token_hex(6)}"
            write_file(path, f"{name}\n".encode())
        except (OSError, UnicodeDecodeError) as error:
            raise PlatformError(f"the name of this server cannot be stored: {error}", field="data_dir") from None
        return name

    def prepare_workspace(self, path: str, facts: WorkspaceFacts, *, new: bool) -> None:
        """Create the directories of a new workspace, and write its description."""
        try:
            fd = open_directory(path)
        except OSError as error:
            raise PlatformError(f"the workspace {path} cannot be opened: {error.strerror}") from None
        try:
            if new:
                for sub in SUBDIRECTORIES:
                    os.mkdir(sub, 0o700, dir_fd=fd)
                    self._own(sub, fd)
            self._describe(fd, facts, new=new)
        except OSError as error:
            if new or error.errno not in {errno.ENOSPC, errno.EDQUOT}:  # a full workspace can still be used
                raise PlatformError(f"cannot make the workspace {path}: {error.strerror}") from None
        finally:
            os.close(fd)

    def describe(self, path: str, facts: WorkspaceFacts) -> None:
        """Update the description of a workspace; a sandbox may use the workspace meanwhile."""
        fd = open_directory(path)
        try:
            self._describe(fd, facts, new=False)
        finally:
            os.close(fd)

    def _own(self, name: str, fd: int) -> None:
        if self._root:
            os.chown(name, CANONICAL_UID, CANONICAL_UID, dir_fd=fd, follow_symlinks=False)

    def _describe(self, fd: int, facts: WorkspaceFacts, *, new: bool) -> None:
        """Write `.context.json`. The sandbox can write it too, so carrel does not trust it."""
        now = datetime.now(UTC).isoformat()
        created = now if new else datetime.fromtimestamp(os.fstat(fd).st_ctime, UTC).isoformat()
        if not new:
            created = self._created(fd) or created
        used_at = facts.last_accessed
        value = {
            "context_id": facts.context_id,
            "agent": facts.agent,
            "namespace": facts.namespace,
            "created_at": created,
            "last_accessed_at": now if used_at is None else datetime.fromtimestamp(used_at, UTC).isoformat(),
            "ttl_days": facts.ttl_days,
            "disk_usage_bytes": facts.used_bytes,
        }
        try:
            self._replace(fd, json.dumps(value, indent=1).encode() + b"\n")
        except OSError as error:
            # The sandbox replaced the file or the draft by a directory, or changed them meanwhile.
            if error.errno not in {errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                raise

    def _replace(self, fd: int, content: bytes) -> None:
        aside = f"{CONTEXT_FILE}.new"  # always the same name: the next start removes the draft of a killed server
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=fd)
        with draft(CONTEXT_FILE, aside=aside, dir_fd=fd) as out:
            write_all(out, content)
            if self._root:
                os.fchown(out, CANONICAL_UID, CANONICAL_UID)

    @staticmethod
    def _created(fd: int) -> str | None:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(CONTEXT_FILE, flags, dir_fd=fd)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return None
                value = json.loads(os.read(handle, 4096))
            finally:
                os.close(handle)
            return datetime.fromisoformat(value["created_at"]).isoformat()
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
