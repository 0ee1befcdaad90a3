"""The checkpoints of one context whose workspace is a folder of the server's host."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.models import CheckpointInfo, CheckpointList, FolderChanges, FolderPatch, UndoResult


class AsyncFolderCheckpoints:
    """`client.checkpoints(context)`. They exist also while no sandbox runs."""

    def __init__(self, connection: AsyncConnection, context_id: str):
        self.context_id = context_id
        self._connection = connection
        self._path = f"/v1/contexts/{quote(context_id, safe='')}/checkpoints"

    async def create(self, reason: str = "") -> CheckpointInfo:
        """Record the folder as it is now. `reason` is a text for people."""
        return await self._connection.post(CheckpointInfo, self._path, {"reason": reason}, deadline=None)

    async def list(self) -> list[CheckpointInfo]:
        """List the checkpoints, newest first."""
        return (await self._connection.get(CheckpointList, self._path)).items

    async def changes(self, from_id: str, to_id: str | None = None) -> FolderChanges:
        """Compare a checkpoint with a later one, or with the folder now."""
        path = f"{self._path}/{quote(from_id, safe='')}/changes"
        return await self._connection.get(FolderChanges, path, {"after": to_id}, deadline=None)

    async def patch(self, from_id: str, to_id: str | None = None, path: str | None = None) -> FolderPatch:
        """Compare text files line by line, all or those at and below a path."""
        route = f"{self._path}/{quote(from_id, safe='')}/patch"
        return await self._connection.get(FolderPatch, route, {"after": to_id, "path": path}, deadline=None)

    async def undo(
        self, checkpoint_id: str, paths: Sequence[str] | None = None, *, dry_run: bool = False
    ) -> UndoResult:
        """Undo the changes of the run that a checkpoint begins, all or those at and below some paths. Entries that
        somebody changed after the run are left and listed. Needs a token that may approve.
        """
        path = f"{self._path}/{quote(checkpoint_id, safe='')}/undo"
        body = {"paths": None if paths is None else list(paths), "dry_run": dry_run}
        return await self._connection.post(UndoResult, path, body, deadline=None)
