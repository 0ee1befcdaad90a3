"""The files of the workspace: read, write, edit, list, move and delete, and the routes under `/files`.

Every path goes through `paths`, so nothing here can reach outside the workspace. It knows nothing of commands
or policy.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from itertools import islice

from carrel.errors import (
    AlreadyExists,
    Conflict,
    EditMismatch,
    InvalidPath,
    InvalidRequest,
    PlatformError,
    TooLarge,
)
from carrel.primitives.cache import Cache
from carrel.primitives.leftovers import remove_leftover
from carrel.primitives.libc import rename_new
from carrel.primitives.trees import remove_live_tree
from carrel.supervisor.drafts import CHUNK, FileDraft
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, Json, json_response, require_known
from carrel.supervisor.paths import DirectoryEntry, Root, refusal, refusing, text
from carrel.supervisor.trees import TreeEntry, Walk, entry_at

EDIT_LIMIT = 32 * 1024 * 1024
EDITS_REMEMBERED = 128
LIST_LIMIT = 10_000
SCAN_LIMIT = 10_000
DEFAULT_MODE = 0o644
_BREATH = 256
_LINES_SHOWN = 10
_TICK_NS = 10_000_000
# Opening must not hang on a FIFO or acquire a controlling terminal: the type of the file is checked after opening.
_SAFE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Stamp = tuple[int, int]


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_ctime_ns


def describe(entry: TreeEntry) -> Json:
    status = entry.status
    if stat.S_ISREG(status.st_mode):
        kind = "file"
    elif stat.S_ISDIR(status.st_mode):
        kind = "directory"
    else:
        kind = "symlink" if stat.S_ISLNK(status.st_mode) else "other"
    info: Json = {
        "path": text(entry.path),
        "kind": kind,
        "size": status.st_size,
        "mode": f"{stat.S_IMODE(status.st_mode):03o}",
        "modified_at": _moment(status.st_mtime_ns),
    }
    if entry.target is not None:
        info["target"] = text(entry.target)
    return info


def _moment(time_ns: int) -> str:
    try:
        moment = datetime.fromtimestamp(time_ns // 1000 / 1_000_000, UTC)
    except (
        ValueError,
        OverflowError,
        OSError,
    ):  # anyone may set a file's time to a year that no calendar has
        moment = datetime.max.replace(tzinfo=UTC) if time_ns > 0 else datetime.min.replace(tzinfo=UTC)
    return moment.isoformat()


class _Content:
    """A stream of the bytes of an open file. It owns the descriptor, even if it is never read."""

    def __init__(self, handle: int, offset: int, length: int):
        self._handle = handle
        self._offset = offset
        self._left = length

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._left == 0:
            self.close()
            raise StopAsyncIteration
        await asyncio.sleep(0)  # with a fast reader the transport never pauses: let other tasks run
        try:
            chunk = os.pread(self._handle, min(CHUNK, self._left), self._offset)
        except OSError as error:
            self.close()
            raise PlatformError(f"reading the file failed: {error.strerror}") from None
        if not chunk:
            self.close()
            raise Conflict("the file became shorter while it was read")
        self._offset += len(chunk)
        self._left -= len(chunk)
        return chunk

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.close()


class Files:
    """The files of the workspace, and their routes."""

    root: Root

    def __init__(self) -> None:
        self._editing = asyncio.Lock()
        self._edited: Cache[str, Json] = Cache(EDITS_REMEMBERED)  # by the caller's own id

    def configure(self, workspace: str, own_path: str = "") -> None:
        """Open the workspace. Called once, before anything else. A folder of the host has a second path, its own."""
        self.root = Root(workspace, own_path)
        self._own = Root(own_path) if own_path else None
        remove_leftover(self.root.fd)

    def close(self) -> None:
        self.root.close()
        if self._own is not None:
            self._own.close()

    def routes(self, router: HttpRouter) -> None:
        router.add("GET", "/files/content", self._read)
        router.add("PUT", "/files/content", self._write)
        router.add("GET", "/files/stat", self._stat)
        router.add("GET", "/files/list", self._list)
        router.add("POST", "/files/edit", self._edit)
        router.add("POST", "/files/move", self._move)
        router.add("POST", "/files/mkdir", self._mkdir)
        router.add("DELETE", "/files", self._delete)

    # for the other modules of the supervisor

    def open_directory(self, path: str, field: str = "path") -> int:
        """Return a descriptor of the directory at `path`, for `fchdir`. The caller closes it."""
        root = self._own if self._own is not None and self._own.holds(path) else self.root
        return root.open(root.relative(path, field), os.O_PATH | os.O_DIRECTORY, field)

    def write_bytes(self, path: str, data: bytes) -> Stamp:
        """Write a small file atomically, creating the directories above it. Returns its stamp for `produced_since`."""
        with (
            self.root.target(self._file_path(path), parents=True) as place,
            self._draft(place, None, exclusive=False) as draft,
        ):
            draft.write(data)
            return _stamp(draft.publish(exclusive=False).status)

    def mark(self) -> int:
        """Return the current time of the workspace's file system, which has a coarser clock of its own."""
        try:
            handle = os.open(b".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=self.root.fd)
        except OSError:  # a full file system, or one without nameless files: rather report a file too many
            return time.time_ns() - _TICK_NS
        try:
            return os.fstat(handle).st_ctime_ns
        finally:
            os.close(handle)

    def produced_since(self, time_ns: int, limit: int = 1000, given: Collection[Stamp] = ()) -> list[str]:
        """Return the regular files of the workspace that changed since `time_ns` (a `mark()`).

        The scan is bounded. The change time counts too, because unpacking an archive sets old modification times.
        Files written just before the mark may have the same time: those in `given` are left out unless they changed.
        """
        handle = self.root.open(b".", os.O_RDONLY | os.O_DIRECTORY)
        found: list[str] = []
        steps = Walk(handle, b".", recursive=True, limit=SCAN_LIMIT).steps()
        with refusing(b"."), closing(steps):
            for entry in steps:
                if entry is None or not stat.S_ISREG(entry.status.st_mode):
                    continue
                latest = max(entry.status.st_mtime_ns, entry.status.st_ctime_ns)
                if latest >= time_ns and _stamp(entry.status) not in given:
                    found.append(text(entry.path))
                    if len(found) >= limit:
                        break
        return found

    # routes

    async def _read(self, request: HttpRequest) -> HttpResponse:
        require_known(request.query, {"path", "offset", "length"}, "parameter")
        relative = self._path(request)
        offset = request.number("offset", 0)
        handle = self.root.open(relative, os.O_RDONLY | _SAFE)
        content: _Content | None = None
        try:
            status = os.fstat(handle)
            _regular(status, relative)
            left = max(0, status.st_size - offset)
            length = min(left, request.number("length", left))
            if length <= CHUNK:
                with refusing(relative):
                    body = os.pread(handle, length, offset)
                return HttpResponse(body=body, content_type=b"application/octet-stream")
            content = _Content(handle, offset, length)
            return HttpResponse(stream=content, length=length, content_type=b"application/octet-stream")
        finally:
            if content is None:
                os.close(handle)

    async def _write(self, request: HttpRequest) -> HttpResponse:
        require_known(request.query, {"path", "mode", "parents", "exclusive"}, "parameter")
        relative = self._file_path(request.query.get("path", ""))
        mode = _mode(request.query.get("mode"))
        exclusive = request.flag("exclusive")
        find = self.root.place if exclusive else self.root.target
        with (
            find(relative, parents=request.flag("parents")) as place,
            self._draft(place, mode, exclusive=exclusive) as draft,
        ):
            async for chunk in request.chunks():
                draft.write(chunk)
            entry = draft.publish(exclusive=exclusive)
        return json_response(describe(TreeEntry(relative, entry.status, None)))

    async def _stat(self, request: HttpRequest) -> HttpResponse:
        require_known(request.query, {"path"}, "parameter")
        return json_response(self._info(self._path(request)))

    async def _list(self, request: HttpRequest) -> HttpResponse:
        require_known(request.query, {"path", "recursive", "limit"}, "parameter")
        relative = self.root.relative(request.query.get("path", "."))
        limit = request.number("limit", 1000)
        if not 1 <= limit <= LIST_LIMIT:
            raise InvalidRequest(f"'limit' must be between 1 and {LIST_LIMIT}, not {limit}", field="limit")
        handle = self.root.open(relative, os.O_RDONLY | os.O_DIRECTORY)
        walk = Walk(handle, relative, recursive=request.flag("recursive"), limit=limit)
        items: list[Json] = []
        steps = walk.steps()
        with refusing(relative), closing(steps):
            for entry in steps:
                if entry is not None:
                    items.append(describe(entry))
                if entry is None or len(items) % _BREATH == 0:
                    await asyncio.sleep(0)
        return json_response({"items": items, "truncated": walk.truncated})

    async def _edit(self, request: HttpRequest) -> HttpResponse:
        body = await _body(request, texts={"path", "old", "new"}, flags={"replace_all"}, maybe={"id"})
        old, new = _utf8(body, "old"), _utf8(body, "new")
        if not old:
            hint = "give the text to replace; write the file to fill an empty one"
            raise InvalidRequest("'old' is empty", field="old", hint=hint)
        relative = self._file_path(body["path"])
        # One edit at a time, so that two edits of the same file both take effect.
        async with self._editing:
            if "id" in body and (earlier := self._edited.get(body["id"])) is not None:
                return json_response(earlier)
            with self.root.target(relative) as place:
                before, content = await _load(place)
                replaced = _occurrences(content, old, replace_all=body.get("replace_all", False))
                size = len(content) + replaced * (len(new) - len(old))
                if size > EDIT_LIMIT:
                    raise TooLarge(f"the file would become larger than {EDIT_LIMIT} bytes", field="new")
                content = content.replace(old, new)
                with self._draft(place, stat.S_IMODE(before.st_mode) & 0o777, exclusive=False) as draft:
                    for start in range(0, len(content), CHUNK):
                        draft.write(memoryview(content)[start : start + CHUNK])
                        await asyncio.sleep(0)
                    _unchanged(place, before)
                    entry = draft.publish(exclusive=False)
            answer = {"replaced": replaced, "file": describe(TreeEntry(relative, entry.status, None))}
            if "id" in body:
                self._edited.put(body["id"], answer)
        return json_response(answer)

    async def _move(self, request: HttpRequest) -> HttpResponse:
        body = await _body(request, texts={"source", "destination"}, flags={"overwrite"})
        source = self.root.relative(body["source"], "source")
        destination = self.root.relative(body["destination"], "destination")
        with (
            self.root.place(source, "source") as old,
            self.root.place(destination, "destination") as new,
        ):
            try:
                if body.get("overwrite", False):
                    os.rename(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory)
                else:
                    rename_new(old.directory, old.name, new.directory, new.name)
            except OSError as error:
                raise _move_refusal(error, source, destination) from None
            with refusing(destination, "destination"):
                return json_response(describe(entry_at(new.directory, new.name, destination)))

    async def _mkdir(self, request: HttpRequest) -> HttpResponse:
        body = await _body(request, texts={"path"}, flags=set())
        relative = self.root.relative(body["path"])
        handle = self.root.make_directory(relative)
        try:
            return json_response(describe(TreeEntry(relative, os.fstat(handle), None)))
        finally:
            os.close(handle)

    async def _delete(self, request: HttpRequest) -> HttpResponse:
        require_known(request.query, {"path", "recursive"}, "parameter")
        relative = self._path(request)
        with self.root.place(relative) as place, refusing(relative):
            status = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(place.name, dir_fd=place.directory)
            elif request.flag("recursive"):
                await remove_live_tree(place.directory, place.name)
            else:
                try:
                    os.rmdir(place.name, dir_fd=place.directory)
                except OSError as error:
                    if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                        raise
                    raise Conflict(
                        f"the directory {text(relative)!r} is not empty",
                        field="path",
                        hint="ask for recursive=1 to delete it with everything in it",
                    ) from None
        return HttpResponse(204)

    # parts

    def _path(self, request: HttpRequest) -> bytes:
        return self.root.relative(request.query.get("path", ""))

    def _file_path(self, path: str, field: str = "path") -> bytes:
        if path.endswith("/"):
            raise InvalidPath(f"{path[:200]!r} names a directory, not a file", field=field)
        return self.root.relative(path, field)

    def _info(self, relative: bytes) -> Json:
        handle = self.root.open(relative, os.O_PATH | os.O_NOFOLLOW)
        try:
            with refusing(relative):
                status = os.fstat(handle)
                target = os.readlink(b"", dir_fd=handle) if stat.S_ISLNK(status.st_mode) else None
        finally:
            os.close(handle)
        return describe(TreeEntry(relative, status, target))

    @contextmanager
    def _draft(self, place: DirectoryEntry, mode: int | None, *, exclusive: bool) -> Iterator[FileDraft]:
        """Open a draft for that place. However the block ends, nothing but a published file stays."""
        with refusing(place.path, place.field):
            try:
                existing = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
            except FileNotFoundError:
                existing = None
            if existing is not None:
                if exclusive:
                    raise AlreadyExists(f"{text(place.path)!r} exists already", field=place.field)
                _regular(existing, place.path, place.field)
                if mode is None:
                    mode = stat.S_IMODE(existing.st_mode) & 0o777
            draft = FileDraft(self.root, place, DEFAULT_MODE if mode is None else mode)
            try:
                yield draft
            finally:
                draft.discard()


def _regular(status: os.stat_result, relative: bytes, field: str = "path") -> None:
    if stat.S_ISDIR(status.st_mode):
        raise InvalidPath(f"{text(relative)!r} is a directory", field=field, hint="list it instead")
    if not stat.S_ISREG(status.st_mode):
        raise InvalidPath(f"{text(relative)!r} is not a regular file", field=field)


async def _body(request: HttpRequest, *, texts: set[str], flags: set[str], maybe: Collection[str] = ()) -> Json:
    body = await request.json()
    words = texts.union(maybe)
    require_known(body, words | flags, "field")
    for name, value in body.items():
        if not isinstance(value, str if name in words else bool):
            kind = "a string" if name in words else "true or false"
            raise InvalidRequest(f"'{name}' must be {kind}", field=name)
    for name in sorted(texts - body.keys()):
        raise InvalidRequest(f"'{name}' is missing", field=name)
    return body


def _utf8(body: Json, name: str) -> bytes:
    try:
        return str(body[name]).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(f"'{name}' contains half a surrogate pair", field=name) from None


def _mode(value: str | None) -> int | None:
    if value is None:
        return None
    if len(value) > 4 or not value or value.strip("01234567") or int(value, 8) > 0o777:
        hint = "write it in octal, such as 644 or 755"
        raise InvalidRequest(f"'mode' cannot be {value[:40]!r}", field="mode", hint=hint)
    return int(value, 8)


async def _load(place: DirectoryEntry) -> tuple[os.stat_result, bytes]:
    with refusing(place.path, place.field):
        handle = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | _SAFE, dir_fd=place.directory)
        try:
            status = os.fstat(handle)
            _regular(status, place.path)
            parts, size = [], 0
            while chunk := os.read(handle, CHUNK):
                parts.append(chunk)
                size += len(chunk)
                if size > EDIT_LIMIT:
                    hint = "use a command such as sed for a file of this size"
                    raise TooLarge(f"files over {EDIT_LIMIT} bytes cannot be edited", field="path", hint=hint)
                await asyncio.sleep(0)
            return status, b"".join(parts)
        finally:
            os.close(handle)


def _unchanged(place: DirectoryEntry, before: os.stat_result) -> None:
    now = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
    if any(getattr(now, key) != getattr(before, key) for key in ("st_ino", "st_size", "st_mtime_ns")):
        hint = "read it again, then repeat the edit"
        raise Conflict(f"{text(place.path)!r} changed while it was edited", field="path", hint=hint)


def _starts(content: bytes, old: bytes) -> Iterator[int]:
    """Yield where `old` starts, including overlaps: in `aaa` it is not clear which `aa` is meant."""
    start = content.find(old)
    while start >= 0:
        yield start
        start = content.find(old, start + 1)


def _occurrences(content: bytes, old: bytes, *, replace_all: bool) -> int:
    """Return how many occurrences will be replaced, or raise `EditMismatch`."""
    count = content.count(old)
    if count and replace_all:
        return count
    starts = list(islice(_starts(content, old), _LINES_SHOWN))
    if len(starts) == 1:
        return 1
    if not starts:
        hint = "read the file and copy the text exactly, white space included"
        raise EditMismatch("the text to replace does not occur in the file", field="old", hint=hint, occurrences=0)
    lines = [content.count(b"\n", 0, start) + 1 for start in starts]
    count = max(count, len(starts))
    where = ", ".join(map(str, lines)) + (", …" if count > len(lines) else "")
    raise EditMismatch(
        f"the text to replace occurs {count} times, at lines {where}",
        field="old",
        hint="include more of the surrounding text, or set replace_all",
        occurrences=count,
        lines=lines,
    )


def _move_refusal(error: OSError, source: bytes, destination: bytes) -> Exception:
    if error.errno == errno.EINVAL:
        detail = f"{text(source)!r} cannot be moved into itself"
        return InvalidPath(detail, field="destination")
    if error.errno == errno.EXDEV:
        return Conflict(f"{text(source)!r} and {text(destination)!r} are on different file systems")
    if error.errno == errno.ENOENT:
        return refusal(error, source, "source")
    if error.errno in {errno.EISDIR, errno.ENOTDIR}:
        detail = "a directory and a file cannot replace one another"
        return Conflict(detail, field="destination", hint=f"delete {text(destination)!r} first")
    return refusal(error, destination, "destination")
