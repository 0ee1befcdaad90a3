"""Files of one sandbox: whole, in part, or as streams of any size; and local files."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from carrel.client._async.bundles import AsyncUnbundled, GivenFiles, bundled, open_local
from carrel.client._async.connection import AsyncConnection, Query
from carrel.client._io_async import Progress, Source, blocking
from carrel.client.listing import Listing, local_target
from carrel.errors import FileMissing, InvalidPath, InvalidRequest, from_problem
from carrel.models import EditResult, FileInfo, FileKind, FileList, FilesWritten
from carrel.models.bundles import MOST_FILES
from carrel.primitives.atomic import draft

DIRECTORY_LIMIT = 10_000


class AsyncFiles:
    """`box.files`. Paths are relative to the workspace and cannot leave it."""

    def __init__(self, connection: AsyncConnection, sandbox_path: str):
        self._connection = connection
        self._path = f"{sandbox_path}/files"
        self._content = f"{self._path}/content"

    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or `length` bytes from `offset`."""
        return b"".join([piece async for piece in self.stream(path, offset=offset, length=length)])

    async def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Read a text file."""
        data = await self.read(path)
        try:
            return data.decode(encoding, errors)
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"'{path}' is not {encoding} text: {error.reason} at byte {error.start}",
                field="path",
                hint="read bytes with files.read, or pass errors='replace'",
            ) from None

    def stream(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Read a file of any size in pieces."""
        return self._connection.pieces(self._content, {"path": path, "offset": offset or None, "length": length})

    async def write(
        self,
        path: str,
        data: Source,
        *,
        mode: int | None = None,
        parents: bool = True,
        exclusive: bool = False,
        progress: Progress | None = None,
    ) -> FileInfo:
        """Create or replace a file, atomically. `data` is bytes, text, a binary file, or an iterator of bytes.

        With `exclusive` an existing file is not replaced; the call raises `AlreadyExists`.
        """
        query = {
            "path": path,
            "mode": None if mode is None else f"{mode:o}",
            "parents": int(parents),
            "exclusive": int(exclusive),
        }
        whole = data.encode() if isinstance(data, str) else data
        return await self._connection.upload(
            FileInfo, "PUT", self._content, query=query, source=whole, progress=progress
        )

    async def edit(
        self, path: str, old: str, new: str, *, replace_all: bool = False, id: str | None = None
    ) -> EditResult:
        """Replace the text `old` by `new`. Raises `EditMismatch` unless `old` occurs once (or `replace_all`).

        To retry an edit safely, give an `id` as for commands: two edits with the same id are made once.
        """
        body = {"path": path, "old": old, "new": new, "replace_all": replace_all, "id": id}
        return await self._connection.post(EditResult, f"{self._path}/edit", body)

    async def list(self, path: str = ".", *, recursive: bool = False, limit: int = 1000) -> Listing:
        """List a directory. `.truncated` is true when it has more than `limit` entries."""
        query: Query = {"path": path, "recursive": int(recursive), "limit": limit}
        found = await self._connection.get(FileList, self._path, query)
        return Listing(found.items, truncated=found.truncated)

    async def stat(self, path: str) -> FileInfo:
        """Describe a file or directory. A symlink is described, not followed."""
        return await self._connection.get(FileInfo, f"{self._path}/stat", {"path": path})

    async def exists(self, path: str) -> bool:
        """Return whether a path exists."""
        try:
            await self.stat(path)
        except FileMissing:
            return False
        return True

    async def move(self, source: str, destination: str, *, overwrite: bool = False) -> FileInfo:
        """Move or rename a file or directory inside the workspace."""
        body = {"source": source, "destination": destination, "overwrite": overwrite}
        return await self._connection.post(FileInfo, f"{self._path}/move", body)

    async def mkdir(self, path: str) -> FileInfo:
        """Create a directory and its parents; it may exist already."""
        return await self._connection.post(FileInfo, f"{self._path}/mkdir", {"path": path})

    async def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or an empty directory, or with `recursive` a directory and its content."""
        await self._connection.send("DELETE", self._path, query={"path": path, "recursive": int(recursive)})

    async def upload(
        self, local: str | os.PathLike[str] | IO[bytes], path: str, *, progress: Progress | None = None
    ) -> FileInfo:
        """Copy a local file, a local directory, or an open binary file to `path` in the workspace."""
        if not isinstance(local, str | os.PathLike):
            return await self.write(path, local, progress=progress)
        source = Path(local)
        if not await blocking(source.is_dir):
            return await self._upload_file(source, path, progress)
        made = await self.mkdir(path)
        for entry in await blocking(_entries, source):
            inside = str(PurePosixPath(path) / entry.relative_to(source).as_posix())
            if await blocking(entry.is_dir):
                await self.mkdir(inside)
            else:
                await self._upload_file(entry, inside, progress)
        return made

    async def _upload_file(self, source: Path, path: str, progress: Progress | None) -> FileInfo:
        with await blocking(open_local, source, "local") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
            return await self.write(path, file, mode=mode, progress=progress)

    async def download(
        self, path: str, local: str | os.PathLike[str] | IO[bytes], *, progress: Progress | None = None
    ) -> None:
        """Copy a file or directory of the workspace to a local path or an open binary file. Skips symlinks."""
        if not isinstance(local, str | os.PathLike):
            await give(self.stream(path), local, progress)
            return
        target = Path(local)
        info = await self.stat(path)
        if info.kind is not FileKind.DIRECTORY:
            await save_as(self.stream(path), target, _local_mode(info), progress)
            return
        found = await self.list(path, recursive=True, limit=DIRECTORY_LIMIT)
        if found.truncated:
            raise InvalidPath(
                f"'{path}' holds more than {DIRECTORY_LIMIT} entries",
                field="path",
                hint="copy an archive of it instead",
            )
        await blocking(_make_directory, target)
        # The names come from inside the sandbox, so each is checked before it is used as a local path.
        for entry in found:
            place = local_target(target, info.path, entry.path)
            if entry.kind is FileKind.DIRECTORY:
                await blocking(_make_directory, place)
            elif entry.kind is FileKind.FILE:
                await blocking(_make_directory, place.parent)
                await save(self.stream(entry.path), place, _local_mode(entry), progress)

    async def write_many(self, files: GivenFiles) -> FilesWritten:
        """Create or replace many files in one request. `files` maps paths in the workspace to bytes or local paths.

            await box.files.write_many({"main.py": b"print(1)", "data.csv": Path("local.csv")})

        Each file is written atomically. When one cannot be written, the files before it have been written.
        """
        return await self._connection.upload(FilesWritten, "POST", f"{self._path}/bundle", source=bundled(files))

    async def download_many(self, paths: Iterable[str], local: str | os.PathLike[str]) -> Sequence[Path]:
        """Copy many files into a local directory in one request. Returns their local paths.

        When one cannot be read, the others are copied before the error is raised.
        """
        wanted = [*paths]
        saved: list[Path] = []
        for start in range(0, len(wanted), MOST_FILES):
            body = {"paths": wanted[start : start + MOST_FILES]}
            response = await self._connection.send("POST", f"{self._path}/read", body=body, stream=True)
            async with AsyncUnbundled(self._connection, response) as incoming:
                saved += await save_all(incoming, Path(local))
        return saved


async def save_as(pieces: AsyncGenerator[bytes, None], target: Path, mode: int, progress: Progress | None) -> None:
    """Write an answer to a local path that the user named.

    A device, a pipe or a link is written into, as a shell does, and not replaced by a file.
    """
    if not await blocking(_is_special, target):
        await save(pieces, target, mode, progress)
        return
    try:
        special = await blocking(_open_special, target)
    except OSError as error:
        raise _unwritable(target, error) from None
    with special as file:
        await give(pieces, file, progress)


async def save(pieces: AsyncGenerator[bytes, None], target: Path, mode: int, progress: Progress | None) -> None:
    """Write an answer to a local file, atomically. Follows no link, because the name may come from a sandbox."""
    try:
        with draft(str(target), mode=mode) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
            await give(pieces, file, progress)
    except OSError as error:
        raise _unwritable(target, error) from None


async def save_all(incoming: AsyncUnbundled, directory: Path) -> Sequence[Path]:
    """Save the files of a bundle into a local directory. Raises an error of the bundle after all files are saved."""
    saved: list[Path] = []
    problem: bytes | None = None
    while (part := incoming.part()) is not None:
        if part.kind != "file":
            problem = await incoming.whole()
            continue
        target = local_target(directory, ".", part.path)  # the name comes from inside the sandbox
        await blocking(_make_directory, target.parent)
        await save(incoming.pieces(), target, 0o666, None)
        saved.append(target)
    if problem is not None:
        raise from_problem(json.loads(problem))
    return saved


async def give(pieces: AsyncGenerator[bytes, None], file: IO[bytes], progress: Progress | None) -> None:
    """Write an answer to an open binary file."""
    try:
        async for piece in pieces:
            await blocking(file.write, piece)
            if progress is not None:
                progress(len(piece))
    finally:
        await pieces.aclose()


def _unwritable(target: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"cannot write {target}: {error.strerror}", field="local")


def _is_special(target: Path) -> bool:
    try:
        return not stat.S_ISREG(target.lstat().st_mode)
    except OSError:
        return False


def _open_special(target: Path) -> IO[bytes]:
    return target.open("wb")


def _local_mode(info: FileInfo) -> int:
    return 0o777 if info.kind is FileKind.FILE and int(info.mode, 8) & 0o100 else 0o666


def _entries(directory: Path) -> Sequence[Path]:
    return sorted(entry for entry in directory.rglob("*") if entry.is_dir() or entry.is_file())


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot create {path}: {error.strerror}", field="local") from None
