"""Content named by its hash: many small objects to a pack file, a big one in a file of its own.

Objects appear whole or not at all (written aside, synced, renamed) and are verified whenever they are read. One lock
file orders all threads and processes: shared while objects are read or written, exclusive while garbage is removed.
Knows nothing of trees, volumes or snapshots.
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
"""Where an object lies in its pack: offset, stored length, codec, length."""

Place = tuple[str, int, int, int, int]
"""Where a packed object lies: pack, offset, stored length, codec, length."""

_local = threading.local()


class Pack(NamedTuple):
    """One pack: its file, how many objects it holds, and the stored length of those that are not read from another."""

    path: str
    total: int
    objects: dict[bytes, int]


def digest(data: bytes | memoryview) -> bytes:
    """The name of content."""
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
    """The content that was stored; `ValueError` or `ZstdError` when it is none."""
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
    """What a pack of that size holds; `read` gives bytes of it by start and length. None when it cannot be told."""
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


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class ObjectStore:
    """The objects beneath one directory, shared by threads and processes."""

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
        """Make the directories."""
        for path in (self.root, self.temporary, self._packs, self._loose, self._bad):
            os.makedirs(path, 0o700, exist_ok=True)
        if not os.path.exists(self._generation):
            self.new_generation()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Nothing is removed meanwhile. Ask for it once in a thread: a waiting sweep lets no second one pass."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            self.refresh()
            yield
        finally:
            os.close(fd)

    @contextmanager
    def exclusive(self, *, wait: bool = True) -> Iterator[bool]:
        """No other thread or process reads or writes meanwhile; yields False when `wait` is off and others do."""
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
        """Changes whenever objects were removed: what was known to be there must be looked up again."""
        try:
            with open(self._generation) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def refresh(self) -> None:
        """See packs that others added or removed."""
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
        """Every key of a loaded pack points somewhere, also after a newer pack with the same content went away."""
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
        """The file of a big object."""
        name = key.hex()
        return os.path.join(self._loose, name[:2], name + (".z" if codec == _ZSTD else ""))

    def raw_path(self, key: bytes) -> str:
        """The file that holds a big object as it is, if there is one: its blocks can be shared."""
        return self.loose_path(key, _RAW)

    def has(self, key: bytes, length: int) -> bool:
        """Whether the object is there; only meaningful while the lock is held."""
        if key in self._distrusted:
            return False
        if length <= PACKED_MAX:
            return key in self._index
        return any(os.path.exists(self.loose_path(key, codec)) for codec in (_RAW, _ZSTD))

    def place(self, key: bytes) -> Place | None:
        """Where a packed object lies."""
        return self._index.get(key)

    def other_places(self, key: bytes) -> list[Place]:
        """Every place a packed object lies in; slow, for when the first one is damaged."""
        names = [name for name, keys in self._loaded.items() if key in keys]
        found = [(self._read_index(name) or {}).get(key) for name in names]
        return [place for place in found if place is not None]

    def distrust(self, keys: list[bytes]) -> None:
        """Damaged objects count as absent from now on, so that whoever has their content stores it again."""
        for key in keys:
            with open(os.path.join(self._bad, key.hex()), "wb"):
                pass
        self.new_generation()
        self.refresh()

    def trust(self, keys: set[bytes]) -> None:
        """These were stored anew."""
        for key in keys & self._distrusted:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._bad, key.hex()))

    def open_pack(self, name: str) -> int:
        """A descriptor of a pack."""
        return os.open(os.path.join(self._packs, name), os.O_RDONLY | os.O_CLOEXEC)

    def packs(self) -> list[Pack]:
        """What is known of every pack that can be read."""
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
        """The big objects and their files."""
        for folder in os.listdir(self._loose):
            for name in os.listdir(os.path.join(self._loose, folder)):
                yield bytes.fromhex(name.removesuffix(".z")), os.path.join(self._loose, folder, name)

    def new_generation(self) -> None:
        """Say that objects are about to be removed. In place, because it must work on a full disk."""
        fd = os.open(self._generation, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_whole(fd, secrets.token_hex(8).encode())
            os.fsync(fd)
        finally:
            os.close(fd)

    def publish(self, aside: str, name: str) -> None:
        """Give a finished pack its name."""
        os.rename(aside, os.path.join(self._packs, name))

    def sync_packs(self) -> None:
        """Make the names of new packs durable."""
        sync_directory(self._packs)


class Batch:
    """New objects of one operation; may be filled from several threads. What is not finished is dropped."""

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
        """Keep content unless it is there already; its name."""
        key = digest(data)
        if key not in self._seen and not self._store.has(key, len(data)):
            self.add(key, data)
        return key

    def put_packed(self, data: bytes) -> bytes:
        """Keep a description, in a pack whatever its size; its name."""
        key = digest(data)
        if key not in self._seen and not self._store.has(key, 0):
            self.add(key, data, packed=True)
        return key

    def add(self, key: bytes, data: bytes, *, packed: bool = False) -> None:
        """Keep content whose name is known."""
        with self._guard:
            if key in self._seen:
                return
            self._seen.add(key)
        codec, stored = _deflate(data)
        if len(data) > PACKED_MAX and not packed:
            self._add_loose(key, codec, stored)
            return
        with self._guard:
            if self._fd < 0:
                self._begin()
            self._places[key] = (self._offset + len(self._buffer), len(stored), codec, len(data))
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
        aside = os.path.join(self._store.temporary, secrets.token_hex(8))
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            write_whole(fd, stored)
            os.fsync(fd)
            os.rename(aside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside)
            raise
        finally:
            os.close(fd)
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
        write_whole(self._fd, self._buffer)
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
    """Reads objects for one operation, from several threads; verifies each."""

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
        """The content; `SnapshotDamaged` names the object when it is not there or not itself."""
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
            raise damaged(key, "is not what it was")
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
    """The error for one object."""
    return SnapshotDamaged(
        f"object {key.hex()} {how}",
        hint="restore another snapshot, or fetch this one from the archive",
        object=key.hex(),
    )


def sweep(store: ObjectStore, live: set[bytes], keep_ns: int = 0) -> Collected:
    """Remove every object that is neither in `live` nor as old as `keep_ns`. The exclusive lock must be held.

    What frees room without taking any comes first, so that it works on a full disk. A pack that is mostly garbage is
    written anew without it, if there is room; one that cannot be read is left for a person.
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
    """Store what is needed of some packs again: the bytes that took, and the packs of which all was."""
    done = []
    try:
        with Reader(store) as reader, Batch(store) as batch:
            for pack in mixed:
                try:
                    for key in pack.objects:
                        if key in live:
                            batch.add(key, reader.read(key), packed=True)
                except SnapshotDamaged:
                    continue  # what can still be read of it is needed
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
    """When the newest object was written."""
    paths = [pack.path for pack in store.packs()] + [path for _, path in store.loose_files()]
    return max((os.stat(path).st_mtime_ns for path in paths), default=0)
