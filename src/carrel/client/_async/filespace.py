"""The filespace of one context: its files beside any sandbox. Knows their routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.client._io_async import Progress, Source
from carrel.client.requests import approved, waiting
from carrel.models import ApprovalInfo, FilespaceFile, FilespacePage


class AsyncFilespace:
    """`client.filespace(context)`. What is written here reaches the workspace with its next pull."""

    def __init__(self, connection: AsyncConnection, context_id: str):
        self.context_id = context_id
        self._connection = connection
        self._path = f"/v1/filespaces/{quote(context_id, safe='')}"
        self._content = f"{self._path}/content"

    def with_approval(self, approval: ApprovalInfo | str) -> AsyncFilespace:
        """The same filespace for an operation that was approved: repeat it exactly, and it is done once."""
        return AsyncFilespace(self._connection.carrying(approved(approval)), self.context_id)

    def waiting(self, seconds: float) -> AsyncFilespace:
        """The same filespace, whose operations wait so long for a person before they raise `ApprovalNeeded`."""
        return AsyncFilespace(self._connection.carrying(waiting(seconds), wait_s=seconds), self.context_id)

    def list(self, prefix: str = "") -> AsyncIterator[FilespaceFile]:
        """The files whose paths begin with `prefix`, in the order of their paths, page by page."""
        return self._connection.pages(FilespacePage, f"{self._path}/files", {"prefix": prefix or None}, limit=1000)

    async def read(self, path: str) -> bytes:
        """The bytes of a file."""
        return b"".join([piece async for piece in self.stream(path)])

    def stream(self, path: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a file in pieces, for files of any size."""
        return self._connection.pieces(self._content, {"path": path})

    async def write(
        self, path: str, data: Source, *, mode: int | None = None, progress: Progress | None = None
    ) -> FilespaceFile:
        """Make or replace a file, whole or not at all. `data` is bytes, text, a binary file, or an iterator."""
        query = {"path": path, "mode": None if mode is None else f"{mode & 0o777:03o}"}
        whole = data.encode() if isinstance(data, str) else data
        return await self._connection.upload(
            FilespaceFile, "PUT", self._content, query=query, source=whole, progress=progress
        )

    async def delete(self, path: str) -> None:
        """Delete a file. Raises `FileMissing` when there is none."""
        await self._connection.call("DELETE", self._content, query={"path": path})

    async def delete_all(self) -> None:
        """Delete every file of the filespace, for good. The workspace keeps its files."""
        await self._connection.call("DELETE", self._path)
