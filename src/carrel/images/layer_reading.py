"""Reading a layer: decompression in a thread, and the entries of its tar. Hostile input; writes nothing.

Python's `tarfile` takes several times as long for an entry as the kernel does to create the file. This reader knows
what layers have (POSIX, pax and GNU long names) and refuses the rest.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from carrel.errors import ImageRefused, Unsupported
from carrel.primitives.atomic import write_all

CHUNK = 256 << 10
_QUEUED = 16
_READ = 128 << 10
_FREE_BYTES = 64 << 20
_LARGEST_HEADER = 1 << 20
_LARGEST_WINDOW = 128 << 20
_LATEST_S = 1 << 36
_ZEROS = bytes(512)
_XATTR = b"SCHILY.xattr."
_REPLACED = frozenset((b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"))

FILE, HARD_LINK, SYMLINK, CHARACTER, BLOCK, FOLDER, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"


@dataclass(frozen=True)
class LayerLimits:
    """What one layer may unpack to."""

    max_bytes: int
    max_entries: int
    max_ratio: int
    """Unpacked bytes for each byte of the layer's blob, beyond the first 64 MiB."""

    def words(self) -> list[str]:
        """Return the limits as arguments of a process."""
        return [str(self.max_bytes), str(self.max_entries), str(self.max_ratio)]


class Entry(NamedTuple):
    """One entry of a tar. `size` bytes of content follow it."""

    name: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: bytes
    xattrs: dict[str, bytes]


class LayerReader:
    """Iterates over the entries of a layer. The content of an entry is read by `copy`, or skipped.

    `diff_id` is the digest that the whole tar must have, checked by `finish`; empty if the blob has been checked and is
    not compressed. `close` ends the thread.
    """

    def __init__(self, path: str, limits: LayerLimits, diff_id: str):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._limits = limits
        self._diff_id = diff_id
        self._hash = hashlib.sha256()
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_QUEUED)
        self._closing = False
        self._chunk = b""
        self._at = 0
        self._before = 0  # bytes in front of the chunk
        self._left = 0  # bytes of the current entry's content, with its padding
        self._ended = False
        self._thread = threading.Thread(target=self._produce, name="carrel-layer", daemon=True)
        self._thread.start()

    @property
    def consumed(self) -> int:
        """Bytes of the blob that were read, for progress."""
        return self._file.tell()

    @property
    def offset(self) -> int:
        """Where the content of the current entry begins in the tar."""
        return self._before + self._at

    def close(self) -> None:
        """End the thread and close the file."""
        self._closing = True
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._queue.get(timeout=0.01)
        self._thread.join()
        self._file.close()

    # In the thread

    def _produce(self) -> None:
        total = 0
        try:
            for chunk in self._decompressed():
                if self._closing:
                    return
                total += len(chunk)
                if total > self._limits.max_bytes:
                    raise ImageRefused(
                        f"the layer unpacks to more than {self._limits.max_bytes >> 20} MiB",
                        field="image",
                        hint="raise images.layer_max_mb if you trust this image",
                    )
                if total > _FREE_BYTES + self.consumed * self._limits.max_ratio:
                    raise ImageRefused(
                        f"the layer unpacks to more than {self._limits.max_ratio} times its size: it may be a bomb",
                        field="image",
                        hint="raise images.layer_max_ratio if you trust this image",
                    )
                if self._diff_id:
                    self._hash.update(chunk)
                self._queue.put(chunk)
            self._queue.put(None)
        except BaseException as error:  # it is raised where the chunk is taken
            self._queue.put(error)

    def _decompressed(self) -> Iterator[bytes]:
        magic = os.pread(self._file.fileno(), 4, 0)
        if magic[:2] == b"\x1f\x8b":
            yield from self._gunzip()
        elif magic == b"\x28\xb5\x2f\xfd":
            yield from self._unzstd()
        else:
            while chunk := self._file.read(CHUNK):
                yield chunk

    def _gunzip(self) -> Iterator[bytes]:
        data = self._file.read(_READ)
        members = 0
        while data:  # a layer may be several members one after the other
            members += 1
            if members > 2 * self._limits.max_entries:
                raise ImageRefused("the layer is compressed in too many parts", field="image")
            member = zlib.decompressobj(wbits=31)
            while not member.eof:
                if not data:
                    raise ImageRefused("the layer's gzip data ends too early", field="image")
                chunk = member.decompress(data, CHUNK)
                data = member.unconsumed_tail
                if chunk:
                    yield chunk
                if not data and not member.eof:
                    data = self._file.read(_READ)
            data = (member.unused_data or self._file.read(_READ)).lstrip(b"\0")

    def _unzstd(self) -> Iterator[bytes]:
        try:
            import zstandard
        except ImportError:
            raise Unsupported(
                "the layer is compressed with zstd, which needs the package zstandard",
                field="image",
                hint="install carrel[server]",
            ) from None
        window = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        with window.stream_reader(self._file, read_across_frames=True, closefd=False) as reader:
            try:
                while chunk := reader.read(CHUNK):
                    yield chunk
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None

    # In the caller's thread

    def _next_chunk(self) -> bool:
        """Take the next chunk; False at the end."""
        if self._ended:
            return False
        found = self._queue.get()
        if found is None:
            self._ended = True
            return False
        if isinstance(found, zlib.error):
            raise ImageRefused(f"the layer's compressed data is damaged: {found}", field="image")
        if isinstance(found, BaseException):
            raise found
        self._before += len(self._chunk)
        self._chunk, self._at = found, 0
        return True

    def _take(self, size: int) -> bytes:
        """Return exactly `size` bytes, or nothing at the end."""
        end = self._at + size
        data = self._chunk[self._at : end]
        self._at = end
        while len(data) < size:
            if not self._next_chunk():
                if data:
                    raise ImageRefused("the layer's tar ends in the middle of an entry", field="image")
                return b""
            self._at = size - len(data)
            data += self._chunk[: self._at]
        return data

    def _skip(self, size: int) -> None:
        self._at += size
        while (over := self._at - len(self._chunk)) > 0:
            if not self._next_chunk():
                raise ImageRefused("the layer's tar ends in the middle of an entry", field="image")
            self._at = over

    def copy(self, size: int, descriptor: int) -> None:
        """Write the content of the current entry, all of it, into a file."""
        self._left -= size
        while size > 0:
            if self._at >= len(self._chunk):
                if not self._next_chunk():
                    raise ImageRefused("the layer's tar ends in the middle of an entry", field="image")
                continue
            part = memoryview(self._chunk)[self._at : self._at + size]
            self._at += len(part)
            size -= len(part)
            write_all(descriptor, part)

    def finish(self) -> None:
        """Read what follows the last entry, and check the digest of everything. Raises `ImageRefused`."""
        while self._next_chunk():
            pass
        if self._diff_id and f"sha256:{self._hash.hexdigest()}" != self._diff_id:
            raise ImageRefused(
                f"the layer does not have the digest {self._diff_id[:19]}… that the image's configuration gives",
                field="image",
                hint="the image is damaged or was tampered with",
            )

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries. Each must be used before the next is asked for."""
        pax: dict[bytes, bytes] = {}
        common: dict[bytes, bytes] = {}
        long_name = long_target = b""
        count, most, most_bytes = 0, self._limits.max_entries, self._limits.max_bytes
        while True:
            if self._left:
                self._skip(self._left)
            header = self._take(512)
            if header == _ZEROS or not header:
                return
            # Each byte of the checksum field counts as a space.
            if sum(header) - sum(header[148:156]) + 256 != _number(header[148:156]):
                raise ImageRefused("the layer's tar is damaged: a header has a wrong checksum", field="image")
            kind, size = header[156:157], _number(header[124:136])
            if size < 0 or size > most_bytes:
                raise ImageRefused(
                    f"an entry of the layer claims {size} bytes; one layer may have {most_bytes}",
                    field="image",
                    hint="raise images.layer_max_mb if you trust this image",
                )
            if kind in b"xgLK":
                if size > _LARGEST_HEADER:
                    raise ImageRefused("the layer has a header of more than 1 MiB", field="image")
                data = self._take(size + -size % 512)[:size]
                self._left = 0
                if kind == b"x":
                    pax = _pax(data)
                elif kind == b"g":
                    common = _pax(data)
                elif kind == b"L":
                    long_name = data.partition(b"\0")[0]
                else:
                    long_target = data.partition(b"\0")[0]
                continue
            count += 1
            if count > most:
                raise ImageRefused(
                    f"the layer has more than {most} entries",
                    field="image",
                    hint="raise images.layer_max_entries if you trust this image",
                )
            name, target = long_name or _text(header[:100]), long_target or _text(header[157:257])
            if header[257:263] == b"ustar\0" and not long_name and header[345]:
                name = _text(header[345:500]) + b"/" + name
            mode, uid, gid = _number(header[100:108]), _number(header[108:116]), _number(header[116:124])
            mtime_ns = _bounded(_number(header[136:148])) * 1_000_000_000
            xattrs: dict[str, bytes] = {}
            if pax or common:
                records = {**common, **pax}
                name, target = records.get(b"path", name), records.get(b"linkpath", target)
                if not _REPLACED.isdisjoint(records):
                    size = _integer(records, b"size", size)
                    uid, gid = _integer(records, b"uid", uid), _integer(records, b"gid", gid)
                    if b"mtime" in records:
                        mtime_ns = _nanoseconds(records[b"mtime"])
                for key, value in records.items():
                    if key.startswith(_XATTR):
                        xattrs[os.fsdecode(key[len(_XATTR) :])] = value
                    elif key.startswith(b"GNU.sparse"):
                        kind = b"S"
                if not 0 <= size <= most_bytes:
                    raise ImageRefused(f"an entry of the layer claims {size} bytes", field="image")
            if kind in {b"\0", b"7"}:
                kind = FOLDER if name[-1:] == b"/" else FILE
            elif kind in {HARD_LINK, SYMLINK, FOLDER}:
                size = 0
            self._left = size + -size % 512
            pax, long_name, long_target = {}, b"", b""
            if uid < 0 or gid < 0 or uid >= 0xFFFFFFFF or gid >= 0xFFFFFFFF:
                raise ImageRefused(f"an entry of the layer has the owner {uid}:{gid}", field="image")
            yield Entry(name, kind, mode & 0o7777, uid, gid, size, mtime_ns, target, xattrs)


def _bounded(seconds: int) -> int:
    """Return a time that every system call takes."""
    return max(-_LATEST_S, min(_LATEST_S, seconds))


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    """Read a number of a header: octal digits, or binary where the first bit is set."""
    try:
        return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        pass
    if field[0] & 0x80:
        value = int.from_bytes(field, "big", signed=False) & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 1)) if field[0] == 0xFF else value
    try:
        return int(_text(field).strip() or b"0", 8)
    except ValueError:
        raise ImageRefused("the layer's tar is damaged: a header has no valid number", field="image") from None


def _pax(data: bytes) -> dict[bytes, bytes]:
    """Read the records of a pax header: `LENGTH KEY=VALUE` and a newline."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 12)
        digits = data[at:space]
        if space < 0 or not digits.isdigit() or data[at + int(digits) - 1 : at + int(digits)] != b"\n":
            raise ImageRefused("the layer's tar is damaged: a pax header is not valid", field="image")
        end = at + int(digits)
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end <= space + 1 or not equals:
            raise ImageRefused("the layer's tar is damaged: a pax header is not valid", field="image")
        records[key] = value
        at = end
    return records


def _integer(records: dict[bytes, bytes], key: bytes, default: int) -> int:
    text = records.get(key)
    if text is None or text == b"":
        return default
    if not text.isdigit() or len(text) > 20:
        raise ImageRefused("the layer's tar is damaged: a pax header is not valid", field="image")
    return int(text)


def _nanoseconds(text: bytes) -> int:
    seconds, _, fraction = text.partition(b".")
    try:
        whole = _bounded(int(seconds[:20] or b"0"))
        part = int(fraction[:9].ljust(9, b"0"))
    except ValueError:
        raise ImageRefused("the layer's tar is damaged: a pax header is not valid", field="image") from None
    return whole * 1_000_000_000 + (-part if seconds.startswith(b"-") else part)
