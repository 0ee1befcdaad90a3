"""The filespace of one context: files that exist without a sandbox."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.client._io_async import Progress, Source
from carrel.client.requests import approved, waiting
from carrel.models import ApprovalInfo, FilespaceFile, FilespacePage


class AsyncFilespace:
    """`client.filespace(context)`. Files written here reach the workspace at its next pull."""

    def __init__(self, connection: AsyncConnection, context_id: str):
        self.context_id = context_id
        self._connection = connection
        self._path = f"/v1/filespaces/{quote(context_id, safe='')}"
        self._content = f"{self._path}/content"

    def with_approval(self, approval: ApprovalInfo | str) -> AsyncFilespace:
        """Return a view that uses an approval: repeat the approved operation exactly, and it runs once."""
        return AsyncFilespace(self._connection.carrying(approved(approval)), self.context_id)

    def waiting(self, seconds: float) -> AsyncFilespace:
        """Return a view whose operations wait so many seconds for approval before they raise `ApprovalNeeded`."""
        return AsyncFilespace(self._connection.carrying(waiting(seconds), wait_s=seconds), self.context_id)

    def list(self, prefix: str = "") -> AsyncIterator[FilespaceFile]:
        """List the files whose paths begin with `prefix`, sorted by path. Pages are fetched as you iterate."""
        return self._connection.pages(FilespacePage, f"{self._path}/files", {"prefix": prefix or None}, limit=1000)

    async def read(self, path: str) -> bytes:
        """Read a file."""
        return b"".join([piece async for piece in self.stream(path)])

    def stream(self, path: str) -> AsyncGenerator[bytes, None]:
        """Read a file of any size in pieces."""
        return self._connection.pieces(self._content, {"path": path})

    async def write(
        self, path: str, data: Source, *, mode: int | None = None, progress: Progress | None = None
    ) -> FilespaceFile:
        """Create or replace a file, atomically. `data` is bytes, text, a binary file, or an iterator."""
        query = {"path": path, "mode": None if mode is None else f"{mode & 0o777:03o}"}
        whole = data.encode() if isinstance(data, str) else data
        return await self._connection.upload(
            FilespaceFile, "PUT", self._content, query=query, source=whole, progress=progress
        )

    async def delete(self, path: str) -> None:
        """Delete a file. Raises `FileMissing` when there is none."""
        await self._connection.send("DELETE", self._content, query={"path": path})

    async def delete_all(self) -> None:
        """Delete every file of the filespace, for good. The workspace keeps its files."""
        await self._connection.send("DELETE", self._path)
