"""A filespace for tests: the real store on SQLite and a real directory for contents, and workspaces beside it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from carrel.models import SyncDirection
from carrel.store import Database, FilespaceChange, FilespaceEntry, FilespaceMark, FilespaceStore
from carrel.workspaces.filespace_contents import Contents
from carrel.workspaces.filespace_sync import FilespaceSync, Mark, StoredBatch, SyncChange, Synced
from carrel.workspaces.remote import Remote, RemoteEntry

T = TypeVar("T")


class Records:
    """One open database for many filespaces, for callers without a loop."""

    def __init__(self, directory: Path):
        self._runner = asyncio.Runner()
        self._database = self.run(Database.open(str(directory / "carrel.db")))
        self.store = FilespaceStore(self._database)

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self._database.close())
        self._runner.close()


class Killed(BaseException):
    """The sync ends here, as if its process had."""


class Budget:
    """How many calls go well before one kills; the call is then made or not."""

    def __init__(self, left: int | None = None) -> None:
        self.left = left
        self.made = False

    def spend(self) -> bool:
        """Whether the call that comes now is the last."""
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


class MortalRemote(Remote):
    """A remote whose calls may kill who makes them."""

    def __init__(self, inner: Remote, budget: Budget):
        self._inner = inner
        self._budget = budget
        self.description = inner.description

    def put(self, name: str, data: bytes) -> None:
        self._ask()
        self._inner.put(name, data)

    def put_file(self, name: str, path: str) -> None:
        self._ask()
        self._inner.put_file(name, path)

    def get(self, name: str) -> bytes:
        self._ask()
        return self._inner.get(name)

    def get_file(self, name: str, path: str) -> None:
        self._ask()
        self._inner.get_file(name, path)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self._ask()
        return self._inner.get_range(name, start, length)

    def size(self, name: str) -> int | None:
        return self._inner.size(name)

    def entries(self, prefix: str) -> Iterator[RemoteEntry]:
        return self._inner.entries(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self._inner.delete(names)

    def _ask(self) -> None:
        if self._budget.spend():
            raise Killed


class Filespace:
    """The entries of one context, for callers without a loop; `put` may kill before or after it is done."""

    def __init__(self, directory: Path, records: Records):
        self.context = f"c{secrets.token_hex(8)}"
        self._runner = records
        self.store = records.store
        self.budget = Budget()
        self.remote = MortalRemote(Remote.open(str(directory / "remote")), self.budget)
        self.spool = directory / "spool"
        self.spool.mkdir()
        self.contents = Contents(self.remote, "ctx-c", str(self.spool))
        self.log: list[list[FilespaceEntry]] = []

    def newest(self) -> tuple[int, float]:
        return self._runner.run(self.store.newest(self.context))

    def changed(self, after: int) -> list[FilespaceEntry]:
        return self._runner.run(self.store.changed(self.context, after=after, limit=100_000))

    def put(self, changes: Sequence[SyncChange], mark: Mark | None = None) -> StoredBatch:
        last = self.budget.spend()
        if last and not self.budget.made:
            raise Killed
        wanted = [FilespaceChange(*change) for change in changes]
        told = None if mark is None else FilespaceMark(*mark)
        done = self._runner.run(self.store.put(self.context, wanted, told))
        self.log.append(done.entries)
        if last:
            raise Killed
        return StoredBatch(done.entries, done.before, done.newest)

    def write(self, path: str, data: bytes, mode: int = 0o644) -> FilespaceEntry:
        """As somebody else who writes to the filespace."""
        drafting = self.contents.drafting()
        drafting.add(data)
        draft = drafting.finish()
        self.contents.keep(draft)
        draft.drop()
        self.put([SyncChange(path, draft.hash, draft.size, mode, None)])
        entry = self._runner.run(self.store.get(self.context, path))
        assert entry is not None
        return entry

    def delete(self, path: str) -> None:
        self.put([SyncChange(path, None, 0, 0, None)])

    def files(self) -> dict[str, bytes]:
        """What it holds, every content read and checked."""
        live = [entry for entry in self.changed(0) if not entry.deleted and entry.hash is not None]
        return {entry.path: b"".join(self.contents.read(entry.hash or "", entry.size)) for entry in live}


class Workspace:
    """A workspace with what it remembers."""

    def __init__(self, directory: Path, filespace: Filespace):
        directory.mkdir()
        self.directory = directory
        self.path = directory / "files"
        self.path.mkdir()
        self.base = directory / "base"
        self.filespace = filespace

    def sync(self, direction: SyncDirection = SyncDirection.BOTH, cap: int | None = None) -> Synced:
        return self.engine().run(direction, cap)

    def engine(self) -> FilespaceSync:
        return FilespaceSync(str(self.path), str(self.base), self.filespace, self.filespace.contents)

    def files(self) -> dict[str, bytes]:
        """Every file, also what a sync leaves aside."""
        found = {}
        for top, _, names in os.walk(self.path):
            for name in names:
                path = Path(top, name)
                if path.is_file() and not path.is_symlink():
                    found[str(path.relative_to(self.path))] = path.read_bytes()
        return found

    def write(self, path: str, data: bytes) -> None:
        target = self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


class Recorded:
    """What a filespace has now, for a forked child that must not use the parent's database: nothing is put."""

    def __init__(self, filespace: Filespace):
        self._newest = filespace.newest()
        self._changed = filespace.changed(0)

    def newest(self) -> tuple[int, float]:
        return self._newest

    def changed(self, after: int) -> list[FilespaceEntry]:
        return [entry for entry in self._changed if entry.version > after]

    def put(self, changes: Sequence[SyncChange], mark: Mark) -> StoredBatch:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
