"""One sandbox as a caller holds it: its commands, files and terminals. Keeps no state but its identity."""

from __future__ import annotations

import base64
import copy
import os
import shlex
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from carrel.client._async.commands import AsyncCommands
from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client._async.envs import AsyncSandboxEnvironments
from carrel.client._async.files import AsyncFiles, give, save_as
from carrel.client._async.mcp import AsyncMcp
from carrel.client._async.python import AsyncPython
from carrel.client._io_async import Progress
from carrel.client.deadlines import Timeout, attended, waited
from carrel.client.requests import approved, waiting
from carrel.errors import CarrelError, InvalidRequest, NotFound, NotRunning
from carrel.models import (
    ApprovalInfo,
    ExecuteResult,
    FileChange,
    FileChanges,
    SandboxInfo,
    SnapshotInfo,
    SnapshotPage,
    SupervisorHealth,
    SyncDirection,
    SyncSummary,
    ToolResult,
    WorkspaceUsage,
)

if TYPE_CHECKING:
    from carrel.client._async.terminal import AsyncTerminal


class AsyncSandbox:
    """A sandbox. A `with` block terminates it at its end if it is ephemeral, and leaves a kept one alone."""

    def __init__(self, connection: AsyncConnection, info: SandboxInfo):
        self._connection = connection
        self._identify(info)

    def _identify(self, info: SandboxInfo) -> None:
        self.id = info.id
        self.context_id = info.context_id
        self.ephemeral = info.ephemeral
        self.provider = info.provider
        self.unsafe = info.unsafe
        self._path = f"/v1/sandboxes/{quote(info.id, safe='')}"
        self._furnish()

    def _furnish(self) -> None:
        self.commands = AsyncCommands(self._connection, self._path)
        self.files = AsyncFiles(self._connection, self._path)
        self.python = AsyncPython(self._connection, self._path)
        self.envs = AsyncSandboxEnvironments(self._connection, self._path)
        self.mcp = AsyncMcp(self._connection, self._path, self.context_id)

    def __repr__(self) -> str:
        label = f" {self.context_id}" if self.context_id else ""
        return f"<{type(self).__name__} {self.id}{label} on {self.provider}{' UNSAFE' if self.unsafe else ''}>"

    def with_approval(self, approval: ApprovalInfo | str) -> AsyncSandbox:
        """The same sandbox for an operation that was approved: repeat it exactly, and it runs once."""
        return self._seen(self._connection.carrying(approved(approval)))

    def waiting(self, seconds: float) -> AsyncSandbox:
        """The same sandbox, whose operations wait so long for a person before they raise `ApprovalNeeded`.

        At most 600 seconds.
        """
        return self._seen(self._connection.carrying(waiting(seconds), wait_s=seconds))

    def _seen(self, connection: AsyncConnection) -> AsyncSandbox:
        view = copy.copy(self)
        view._connection = connection
        view._furnish()
        return view

    async def info(self) -> SandboxInfo:
        """The sandbox as it is now."""
        return await self._connection.get(SandboxInfo, self._path)

    async def health(self) -> SupervisorHealth:
        """What the sandbox's supervisor says of itself."""
        return await self._connection.get(SupervisorHealth, f"{self._path}/health")

    async def execute(
        self,
        code: str,
        *,
        language: str = "shell",
        timeout: Timeout = "default",
        files: Mapping[str, bytes] | None = None,
    ) -> ExecuteResult:
        """Run code with files put in place before it; names the files it made."""
        given = None if files is None else {path: base64.b64encode(data).decode() for path, data in files.items()}
        body = encoded({"code": code, "language": language, "timeout": attended(timeout), "files": given})
        connection = self._connection
        patience = connection.patience(waited(timeout))
        return await connection.post(ExecuteResult, f"{self._path}/execute", body, timeout=patience)

    async def tool(self, tool_name: str, params: Mapping[str, object] | None = None) -> ToolResult:
        """Call a named tool with its parameters."""
        body = encoded({"tool_name": tool_name, "params": {**(params or {})}})
        connection = self._connection
        return await connection.post(ToolResult, f"{self._path}/tools", body, timeout=connection.patience(None))

    async def terminal(
        self, rows: int = 24, cols: int = 80, command: str | Sequence[str] | None = None
    ) -> AsyncTerminal:
        """Open a terminal: a shell, or `command`."""
        from carrel.client._async.terminal import AsyncTerminal

        words = command if command is None or isinstance(command, str) else shlex.join(command)
        return await AsyncTerminal.open(self._connection, self._path, rows, cols, words)

    async def snapshot(self) -> SnapshotInfo:
        """Take a snapshot of the workspace; what runs goes on meanwhile."""
        patience = self._connection.patience(None)
        return await self._connection.post(SnapshotInfo, f"{self._path}/snapshots", b"", timeout=patience)

    async def snapshots(self) -> list[SnapshotInfo]:
        """The snapshots of this context, newest first."""
        found: list[SnapshotInfo] = []
        cursor: str | None = None
        while True:
            page = await self._connection.get(SnapshotPage, f"{self._path}/snapshots", {"cursor": cursor})
            found += page.items
            cursor = page.next
            if cursor is None:
                return found

    async def restore(self, snapshot: SnapshotInfo | str) -> SandboxInfo:
        """Give the workspace the files of a snapshot. What runs is ended."""
        body = encoded({"snapshot_id": _id(snapshot)})
        patience = self._connection.patience(None)
        return await self._connection.post(SandboxInfo, f"{self._path}/restore", body, timeout=patience)

    async def fork(
        self, context_id: str, snapshot: SnapshotInfo | str | None = None, *, secrets: bool = True
    ) -> AsyncSandbox:
        """A new context with the same files (now, or those of a snapshot) and settings, started at once.

        It has the secrets of this one too, unless `secrets` is False; a secret that it was given before stays.
        """
        chosen = None if snapshot is None else _id(snapshot)
        body = encoded({"context_id": context_id, "snapshot_id": chosen, "secrets": secrets})
        patience = self._connection.patience(None)
        info = await self._connection.post(SandboxInfo, f"{self._path}/fork", body, timeout=patience)
        return AsyncSandbox(self._connection, info)

    async def diff(self, before: SnapshotInfo | str, after: SnapshotInfo | str) -> list[FileChange]:
        """What leads from one snapshot to another."""
        query = {"before": _id(before), "after": _id(after)}
        return (await self._connection.get(FileChanges, f"{self._path}/diff", query)).items

    async def download_snapshot(
        self,
        snapshot: SnapshotInfo | str,
        target: str | os.PathLike[str] | IO[bytes],
        *,
        progress: Progress | None = None,
    ) -> None:
        """Write the files of a snapshot as a tar archive to a local path or an open binary file."""
        path = f"{self._path}/snapshots/{quote(_id(snapshot), safe='')}/tar"
        arriving = self._connection.pieces(path, timeout=self._connection.patience(None))
        if isinstance(target, str | os.PathLike):
            await save_as(arriving, Path(target), 0o666, progress)
        else:
            await give(arriving, target, progress)

    async def usage(self) -> WorkspaceUsage:
        """What the workspace holds, and what it may."""
        return await self._connection.get(WorkspaceUsage, f"{self._path}/usage")

    async def sync(self, direction: SyncDirection | str = "both") -> SyncSummary:
        """Bring the workspace and its filespace together: `push`, `pull`, or `both`: a pull, then a push."""
        body = encoded({"direction": direction})
        patience = self._connection.patience(None)
        return await self._connection.post(SyncSummary, f"{self._path}/sync", body, timeout=patience)

    async def stop(self) -> SandboxInfo:
        """End what runs and keep the files; `resume` starts it again."""
        patience = self._connection.patience(None)
        return await self._connection.post(SandboxInfo, f"{self._path}/stop", b"", timeout=patience)

    async def resume(self) -> SandboxInfo:
        """Start a sandbox on the same files again; one that runs is left as it is."""
        if self.context_id is None:
            raise InvalidRequest(
                "an ephemeral sandbox keeps nothing to start again on",
                field="context_id",
                hint="make the sandbox with a context_id",
            )
        headers = {"idempotency-key": uuid.uuid4().hex}
        body, patience = encoded({"context_id": self.context_id}), self._connection.patience(None)
        info = await self._connection.post(SandboxInfo, "/v1/sandboxes", body, headers=headers, timeout=patience)
        self._identify(info)
        return info

    async def terminate(
        self, *, reason: str = "", delete_files: bool = False, snapshot: bool | None = None
    ) -> SandboxInfo:
        """End the sandbox and everything that runs in it. A kept workspace stays unless `delete_files`.

        `snapshot` takes a last one before the end, or leaves it; by default it is taken unless the files are deleted.
        """
        body = encoded({"reason": reason, "delete_files": delete_files, "snapshot": snapshot})
        patience = self._connection.patience(None)
        return await self._connection.post(SandboxInfo, f"{self._path}/terminate", body, timeout=patience)

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.ephemeral:
            return
        try:
            await self.terminate(reason="end of the with block")
        except (NotFound, NotRunning):
            pass
        except CarrelError:
            # The error that is already on its way tells more than the failure to tidy up after it.
            if error is None:
                raise


def _id(snapshot: SnapshotInfo | str) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.id
