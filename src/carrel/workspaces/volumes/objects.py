"""Objects: content named by its hash. Many small objects share a pack file; a big one has its own file.

Objects appear whole or not at all (written aside, synced, renamed), and every read verifies them. One lock file
synchronizes threads and processes: shared while objects are read or written, exclusive while garbage is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgpack
import zstandard
from blake3 import blake3

from carrel.errors import SnapshotDamaged
from carrel.primitives import libc
from carrel.primitives.atomic import draft, sync_directory, write_all
from carrel.workspaces.volumes.base import Collected

CHUNK = 64 << 20
PACKED_MAX = 1 << 20
_PACK_FULL = 64 << 20
_BUFFER = 4 << 20
_MAGIC = b"CARRELP1"
_TAIL = struct.Struct("<Q32s8s")
_RAW, _ZSTD = 0, 1
_WORTH = 0.95
_BIGGEST_INDEX = 256 << 20

Spot = tuple[int, int, int, int]
"""The position of an object in its pack: offset, stored length, codec, length."""

Place = tuple[str, int, int, int, int]
"""The position of a packed object: pack, offset, stored length, codec, length."""

_local = threading.local()


class Pack(NamedTuple):
    """One pack: its file, the number of its objects, and the stored lengths of those that are read from this pack."""

    path: str
    total: int
    objects: dict[bytes, int]


def digest(data: bytes | memoryview) -> bytes:
    """Return the hash that names content."""
    return blake3(data).digest()


def _deflate(data: bytes) -> tuple[int, bytes]:
    if len(data) < 64:
        return _RAW, data
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=1, write_checksum=False)
    packed: bytes = compressor.compress(data)
    return (_ZSTD, packed) if len(packed) < len(data) * _WORTH else (_RAW, data)


def inflate(codec: int, stored: bytes, length: int) -> bytes:
    """Decode stored content; `ValueError` or `ZstdError` when it is damaged."""
    if codec == _RAW:
        return stored
    if codec != _ZSTD:
        raise ValueError(f"unknown codec {codec}")
    inflater = getattr(_local, "inflater", None)
    if inflater is None:
        inflater = _local.inflater = zstandard.ZstdDecompressor()
    found: bytes = inflater.decompress(stored, max_output_size=length)
    return found


def read_index(read: Callable[[int, int], bytes], size: int) -> dict[bytes, Spot] | None:
    """Read the index of a pack of that size with `read(start, length)`; None when it is damaged."""
    if size < _TAIL.size + len(_MAGIC):
        return None
    tail = read(size - _TAIL.size, _TAIL.size)
    if len(tail) != _TAIL.size:
        return None
    length, check, magic = _TAIL.unpack(tail)
    if magic != _MAGIC or length > min(size - _TAIL.size, _BIGGEST_INDEX):
        return None
    raw = read(size - _TAIL.size - length, length)
    if digest(raw) != check:
        return None
    return dict(msgpack.unpackb(raw, use_list=False))


class ObjectStore:
    """The objects below one directory, shared by threads and processes."""

    def __init__(self, root: str):
        self.root = root
        self.temporary = os.path.join(root, "tmp")
        self._packs = os.path.join(root, "packs")
        self._loose = os.path.join(root, "objects")
        self._lock = os.path.join(root, "lock")
        self._generation = os.path.join(root, "generation")
        self._guard = threading.Lock()
        self._loaded: dict[str, list[bytes]] = {}
        self._unreadable: set[str] = set()
        self._index: dict[bytes, Place] = {}
        self._bad = os.path.join(root, "bad")
        self._distrusted: set[bytes] = set()

    def prepare(self) -> None:
        """Create the directories."""
        for path in (self.root, self.temporary, self._packs, self._loose, self._bad):
            os.makedirs(path, 0o700, exist_ok=True)
        if not os.path.exists(self._generation):
            self.new_generation()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the shared lock, so that nothing is removed. Not reentrant: a waiting sweep blocks a second one."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            self.refresh()
            yield
        finally:
            os.close(fd)

    @contextmanager
    def exclusive(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the exclusive lock; without `wait`, yield False when others hold it."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                held = False
            if held:
                self.refresh()
            yield held
        finally:
            os.close(fd)

    def generation(self) -> str:
        """Return a text that changes whenever objects are removed; then known objects must be looked up again."""
        try:
            with open(self._generation) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def refresh(self) -> None:
        """Load packs that other processes added, and forget those that they removed."""
        names = {name for name in os.listdir(self._packs) if name.endswith(".pack")}
        lost = False
        distrusted = {bytes.fromhex(name) for name in os.listdir(self._bad)}
        with self._guard:
            self._distrusted = distrusted
            for gone in self._loaded.keys() - names:
                for key in self._loaded.pop(gone):
                    if key in self._index and self._index[key][0] == gone:
                        del self._index[key]
                        lost = True
            self._unreadable &= names
            fresh = names - self._loaded.keys() - self._unreadable
        for name in fresh:
            places = self._read_index(name)
            with self._guard:
                if places is None:
                    self._unreadable.add(name)
                elif name not in self._loaded:
                    self._index.update(places)
                    self._loaded[name] = list(places)
        if lost:
            self._mend_index()

    def _mend_index(self) -> None:
        """Index objects again that were indexed in a removed pack and are in another pack too."""
        with self._guard:
            lost = [name for name, keys in self._loaded.items() if any(key not in self._index for key in keys)]
        for name in lost:
            places = self._read_index(name) or {}
            with self._guard:
                for key, place in places.items():
                    self._index.setdefault(key, place)

    def _read_index(self, name: str) -> dict[bytes, Place] | None:
        try:
            fd = os.open(os.path.join(self._packs, name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            places = read_index(lambda start, length: os.pread(fd, length, start), os.fstat(fd).st_size)
        finally:
            os.close(fd)
        return None if places is None else {key: (name, *place) for key, place in places.items()}

    def loose_path(self, key: bytes, codec: int) -> str:
        """Return the path of a big object."""
        name = key.hex()
        return os.path.join(self._loose, name[:2], name + (".z" if codec == _ZSTD else ""))

    def raw_path(self, key: bytes) -> str:
        """Return the path of a big object that is stored uncompressed: its blocks can be shared."""
        return self.loose_path(key, _RAW)

    def has(self, key: bytes, length: int) -> bool:
        """Return whether the object is stored; only valid while the lock is held."""
        if key in self._distrusted:
            return False
        if length <= PACKED_MAX:
            return key in self._index
        return any(os.path.exists(self.loose_path(key, codec)) for codec in (_RAW, _ZSTD))

    def place(self, key: bytes) -> Place | None:
        """Return the position of a packed object."""
        return self._index.get(key)

    def other_places(self, key: bytes) -> list[Place]:
        """Return every position of a packed object; slow, for when the first one is damaged."""
        names = [name for name, keys in self._loaded.items() if key in keys]
        found = [(self._read_index(name) or {}).get(key) for name in names]
        return [place for place in found if place is not None]

    def mark_damaged(self, keys: list[bytes]) -> None:
        """Treat damaged objects as missing from now on, so that their content is stored again."""
        for key in keys:
            with open(os.path.join(self._bad, key.hex()), "wb"):
                pass
        self.new_generation()
        self.refresh()

    def trust(self, keys: set[bytes]) -> None:
        """Trust objects again that were stored anew."""
        for key in keys & self._distrusted:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._bad, key.hex()))

    def open_pack(self, name: str) -> int:
        """Open a pack and return its descriptor."""
        return os.open(os.path.join(self._packs, name), os.O_RDONLY | os.O_CLOEXEC)

    def packs(self) -> list[Pack]:
        """Return every readable pack."""
        with self._guard:
            return [
                Pack(
                    os.path.join(self._packs, name),
                    len(keys),
                    {key: self._index[key][2] for key in keys if self._index[key][0] == name},
                )
                for name, keys in self._loaded.items()
            ]

    def loose_files(self) -> Iterator[tuple[bytes, str]]:
        """Yield the big objects and their paths."""
        for folder in os.listdir(self._loose):
            for name in os.listdir(os.path.join(self._loose, folder)):
                yield bytes.fromhex(name.removesuffix(".z")), os.path.join(self._loose, folder, name)

    def new_generation(self) -> None:
        """Record that objects are about to be removed. Written in place, because it must work on a full disk."""
        fd = os.open(self._generation, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, secrets.token_hex(8).encode())
            os.fsync(fd)
        finally:
            os.close(fd)

    def publish(self, aside: str, name: str) -> None:
        """Rename a finished pack to its name."""
        os.rename(aside, os.path.join(self._packs, name))

    def sync_packs(self) -> None:
        """Make the names of new packs durable."""
        sync_directory(self._packs)


class Batch:
    """New objects of one operation; several threads may add some. Without `finish` they are dropped."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._guard = threading.Lock()
        self._fd = -1
        self._aside = ""
        self._places: dict[bytes, Spot] = {}
        self._seen: set[bytes] = set()
        self._buffer = bytearray()
        self._offset = 0
        self._folders: set[str] = set()
        self._published = False
        self._clones = True
        self.stored = 0

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                with suppress(OSError):
                    os.unlink(self._aside)

    def put(self, data: bytes) -> bytes:
        """Store content unless it is stored already, and return its name."""
        key = digest(data)
        if key not in self._seen and not self._store.has(key, len(data)):
            self.add(key, data)
        return key

    def put_all(self, contents: list[bytes]) -> list[bytes]:
        """Store small contents and return their names. Quicker than `put` for each: the lock is taken once."""
        keys = [digest(data) for data in contents]
        has, seen = self._store.has, self._seen
        new = {
            key: data for key, data in zip(keys, contents, strict=True) if data and key not in seen and not has(key, 0)
        }
        packed = {key: (*_deflate(data), len(data)) for key, data in new.items()}
        with self._guard:
            for key, (codec, stored, length) in packed.items():
                if key not in seen:
                    seen.add(key)
                    self._append(key, codec, stored, length)
        return keys

    def put_clone(self, source: int, offset: int, length: int) -> bytes | None:
        """Store a big part of a file by sharing its blocks, and return its name; None where that is not possible.

        The name is that of the copy: the file may change while it is read.
        """
        if not self._clones:
            return None
        aside = os.path.join(self._store.temporary, secrets.token_hex(8))
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            if not libc.clone_range(source, offset, length, fd):
                self._clones = False
                return None
            data = os.pread(fd, length, 0)
            key = digest(data)
            if len(data) != length:
                return None
            if key not in self._seen and not self._store.has(key, length):
                path = self._store.raw_path(key)
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
                os.fsync(fd)
                os.rename(aside, path)
                with self._guard:
                    self._seen.add(key)
                    self._folders.add(os.path.dirname(path))
            return key
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(aside)

    def put_packed(self, data: bytes) -> bytes:
        """Store content in a pack whatever its size, unless it is stored already, and return its name."""
        key = digest(data)
        if key not in self._seen and not self._store.has(key, 0):
            self.add(key, data, packed=True)
        return key

    def add(self, key: bytes, data: bytes, *, packed: bool = False) -> None:
        """Store content whose name is known."""
        with self._guard:
            if key in self._seen:
                return
            self._seen.add(key)
        codec, stored = _deflate(data)
        if len(data) > PACKED_MAX and not packed:
            self._add_loose(key, codec, stored)
            return
        with self._guard:
            self._append(key, codec, stored, len(data))

    def _append(self, key: bytes, codec: int, stored: bytes, length: int) -> None:
        if self._fd < 0:
            self._begin()
        self._places[key] = (self._offset + len(self._buffer), len(stored), codec, length)
        self._buffer += stored
        self.stored += len(stored)
        if len(self._buffer) >= _BUFFER:
            self._flush()
        if self._offset >= _PACK_FULL:
            self._seal()

    def _add_loose(self, key: bytes, codec: int, stored: bytes) -> None:
        path = self._store.loose_path(key, codec)
        folder = os.path.dirname(path)
        os.makedirs(folder, 0o700, exist_ok=True)
        with draft(path, mode=0o400, temporary=self._store.temporary) as fd:
            write_all(fd, stored)
            os.fsync(fd)  # `finish` syncs the folder once for all objects in it
        with self._guard:
            self._folders.add(folder)
            self.stored += len(stored)

    def _begin(self) -> None:
        self._aside = os.path.join(self._store.temporary, secrets.token_hex(8))
        self._fd = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        self._places = {}
        self._buffer = bytearray(_MAGIC)
        self._offset = 0

    def _flush(self) -> None:
        write_all(self._fd, self._buffer)
        self._offset += len(self._buffer)
        self._buffer = bytearray()

    def _seal(self) -> None:
        index: bytes = msgpack.packb(list(self._places.items()))
        self._buffer += index + _TAIL.pack(len(index), digest(index), _MAGIC)
        self._flush()
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._store.publish(self._aside, secrets.token_hex(16) + ".pack")
        self._published = True

    def finish(self) -> None:
        """Make everything added durable and visible."""
        with self._guard:
            if self._fd >= 0:
                self._seal()
            if self._published:
                self._store.sync_packs()
            for folder in self._folders:
                sync_directory(folder)
            if self._folders:
                sync_directory(os.path.dirname(next(iter(self._folders))))
        self._store.trust(self._seen)
        self._store.refresh()


class Reader:
    """Reads and verifies objects for one operation; several threads may use it."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._guard = threading.Lock()
        self._fds: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def read(self, key: bytes) -> bytes:
        """Return the content; `SnapshotDamaged` names the object when it is missing or damaged."""
        try:
            return self._verified(key, self._store.place(key))
        except SnapshotDamaged:
            for place in self._store.other_places(key):
                with suppress(SnapshotDamaged):
                    return self._verified(key, place)
            raise

    def _verified(self, key: bytes, place: Place | None) -> bytes:
        try:
            data = self._loose(key) if place is None else self._packed(place)
        except FileNotFoundError:
            raise damaged(key, "is missing") from None
        except (ValueError, zstandard.ZstdError):
            raise damaged(key, "cannot be decoded") from None
        if digest(data) != key:
            raise damaged(key, "was changed")
        return data

    def _packed(self, place: Place) -> bytes:
        pack, offset, stored, codec, length = place
        with self._guard:
            fd = self._fds.get(pack)
            if fd is None:
                fd = self._fds[pack] = self._store.open_pack(pack)
        return inflate(codec, os.pread(fd, stored, offset), length)

    def _loose(self, key: bytes) -> bytes:
        for codec in (_RAW, _ZSTD):
            with suppress(FileNotFoundError), open(self._store.loose_path(key, codec), "rb") as file:
                return inflate(codec, file.read(), CHUNK)
        raise FileNotFoundError


def damaged(key: bytes, how: str) -> SnapshotDamaged:
    """Return the error for one object."""
    return SnapshotDamaged(
        f"object {key.hex()} {how}",
        hint="restore another snapshot, or fetch this one from the archive",
        object=key.hex(),
    )


def sweep(store: ObjectStore, live: set[bytes], keep_ns: int = 0) -> Collected:
    """Remove every object that is neither in `live` nor as old as `keep_ns`. The exclusive lock must be held.

    Files that hold only garbage go first, so that it works on a full disk. A pack of mostly garbage is rewritten, if
    there is room; an unreadable pack is left for a person.
    """
    dead: list[Pack] = []
    mixed: list[Pack] = []
    for pack in store.packs():
        kept = sum(key in live for key in pack.objects)
        garbage = sum(length for key, length in pack.objects.items() if key not in live)
        if kept == pack.total or (kept and garbage * 2 < sum(pack.objects.values())):
            continue
        if os.stat(pack.path).st_mtime_ns > keep_ns:
            (mixed if kept else dead).append(pack)
    loose = [path for key, path in store.loose_files() if key not in live and os.stat(path).st_mtime_ns > keep_ns]
    if dead or mixed or loose:
        store.new_generation()
    freed = _remove([pack.path for pack in dead] + loose)
    stored, rewritten = _rewrite(store, mixed, live)
    freed += _remove([pack.path for pack in rewritten]) - stored
    objects = sum(pack.total for pack in dead) + len(loose)
    objects += sum(pack.total - sum(key in live for key in pack.objects) for pack in rewritten)
    store.refresh()
    return Collected(objects, max(freed, 0))


def _rewrite(store: ObjectStore, mixed: list[Pack], live: set[bytes]) -> tuple[int, list[Pack]]:
    """Store the live objects of some packs again; return the bytes stored, and the completely copied packs."""
    done = []
    try:
        with Reader(store) as reader, Batch(store) as batch:
            for pack in mixed:
                try:
                    for key in pack.objects:
                        if key in live:
                            batch.add(key, reader.read(key), packed=True)
                except SnapshotDamaged:
                    continue  # keep it: its readable objects are needed
                done.append(pack)
            batch.finish()
            return batch.stored, done
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        return 0, []  # next time, when there is room


def _remove(paths: list[str]) -> int:
    freed = 0
    for path in paths:
        freed += os.stat(path).st_size
        os.unlink(path)
    return freed


def newest_ns(store: ObjectStore) -> int:
    """Return when the newest object was written."""
    paths = [pack.path for pack in store.packs()] + [path for _, path in store.loose_files()]
    return max((os.stat(path).st_mtime_ns for path in paths), default=0)
