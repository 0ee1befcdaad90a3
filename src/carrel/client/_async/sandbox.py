"""One sandbox: its commands, files, Python, terminals and snapshots. Holds no state but its identity."""

from __future__ import annotations

import base64
import copy
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from carrel.client._async.commands import AsyncCommands
from carrel.client._async.connection import AsyncConnection
from carrel.client._async.envs import AsyncSandboxEnvironments
from carrel.client._async.files import AsyncFiles, give, save_as
from carrel.client._async.mcp import AsyncMcp
from carrel.client._async.ports import AsyncPorts
from carrel.client._async.python import AsyncPython
from carrel.client._io_async import Progress
from carrel.client.deadlines import Timeout, answer_limit, run_timeout
from carrel.client.requests import approved, waiting
from carrel.errors import CarrelError, InvalidRequest, NotFound, NotRunning
from carrel.models import (
    ApprovalInfo,
    ExecuteResult,
    FileChange,
    FileChanges,
    ImageDetails,
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
    """A sandbox. The end of a `with` block terminates an ephemeral sandbox; one with a context keeps running."""

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
        self._add_operations()

    def _add_operations(self) -> None:
        self.commands = AsyncCommands(self._connection, self._path)
        self.files = AsyncFiles(self._connection, self._path)
        self.python = AsyncPython(self._connection, self._path)
        self.envs = AsyncSandboxEnvironments(self._connection, self._path)
        self.ports = AsyncPorts(self._connection, self._path)
        self.mcp = AsyncMcp(self._connection, self._path, self.context_id)

    def __repr__(self) -> str:
        label = f" {self.context_id}" if self.context_id else ""
        return f"<{type(self).__name__} {self.id}{label} on {self.provider}{' UNSAFE' if self.unsafe else ''}>"

    def with_approval(self, approval: ApprovalInfo | str) -> AsyncSandbox:
        """Return a view that uses an approval: repeat the approved operation exactly, and it runs once.

        try:
            await box.commands.run("git push")
        except ApprovalNeeded as needed:
            ...  # later, after `carrel approve ID`
            await box.with_approval(needed.approval).commands.run("git push")
        """
        return self._seen(self._connection.carrying(approved(approval)))

    def waiting(self, seconds: float) -> AsyncSandbox:
        """Return a view whose operations wait for approval, at most 600 seconds, before they raise `ApprovalNeeded`."""
        return self._seen(self._connection.carrying(waiting(seconds), wait_s=seconds))

    def _seen(self, connection: AsyncConnection) -> AsyncSandbox:
        view = copy.copy(self)
        view._connection = connection
        view._add_operations()
        return view

    async def info(self) -> SandboxInfo:
        """Get the state of the sandbox."""
        return await self._connection.get(SandboxInfo, self._path)

    async def image(self) -> ImageDetails | None:
        """Return the image that the sandbox runs from, with its entry point; None if its root is the host's own."""
        digest = (await self.info()).image_digest
        return None if digest is None else await self._connection.get(ImageDetails, f"/v1/images/{digest}")

    async def health(self) -> SupervisorHealth:
        """Get the health report of the sandbox's supervisor."""
        return await self._connection.get(SupervisorHealth, f"{self._path}/health")

    async def execute(
        self,
        code: str,
        *,
        language: str = "shell",
        timeout: Timeout = "default",
        files: Mapping[str, bytes] | None = None,
    ) -> ExecuteResult:
        """Write `files` to the workspace, then run code. The result names the files that it produced."""
        given = None if files is None else {path: base64.b64encode(data).decode() for path, data in files.items()}
        body = {"code": code, "language": language, "timeout": run_timeout(timeout), "files": given}
        return await self._connection.post(ExecuteResult, f"{self._path}/execute", body, deadline=answer_limit(timeout))

    async def tool(self, tool_name: str, params: Mapping[str, object] | None = None) -> ToolResult:
        """Call a tool by name, such as `create_file`, with its parameters."""
        body = {"tool_name": tool_name, "params": params or {}}
        return await self._connection.post(ToolResult, f"{self._path}/tools", body, deadline=None)

    async def terminal(
        self, rows: int = 24, cols: int = 80, command: str | Sequence[str] | None = None
    ) -> AsyncTerminal:
        """Open a terminal that runs a shell, or `command`: a shell text, or a list of words that needs no shell."""
        from carrel.client._async.terminal import AsyncTerminal

        return await AsyncTerminal.open(self._connection, self._path, rows, cols, command)

    async def snapshot(self) -> SnapshotInfo:
        """Take a snapshot of the workspace. Running commands go on."""
        return await self._connection.post(SnapshotInfo, f"{self._path}/snapshots", deadline=None)

    async def snapshots(self) -> list[SnapshotInfo]:
        """List the snapshots of this context, newest first."""
        return [item async for item in self._connection.pages(SnapshotPage, f"{self._path}/snapshots")]

    async def restore(self, snapshot: SnapshotInfo | str) -> SandboxInfo:
        """Replace the files of the workspace by those of a snapshot. Running commands are killed."""
        body = {"snapshot_id": _id(snapshot)}
        return await self._connection.post(SandboxInfo, f"{self._path}/restore", body, deadline=None)

    async def fork(
        self, context_id: str, snapshot: SnapshotInfo | str | None = None, *, secrets: bool = True
    ) -> AsyncSandbox:
        """Create a context with the same settings and a copy of the files, of now or of a snapshot, and start it.

        `secrets=False` leaves the secrets out. Secrets that the new context already has are not replaced.
        """
        chosen = None if snapshot is None else _id(snapshot)
        body = {"context_id": context_id, "snapshot_id": chosen, "secrets": secrets}
        info = await self._connection.post(SandboxInfo, f"{self._path}/fork", body, deadline=None)
        return AsyncSandbox(self._connection, info)

    async def diff(self, before: SnapshotInfo | str, after: SnapshotInfo | str) -> list[FileChange]:
        """List the files that differ between two snapshots."""
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
        arriving = self._connection.pieces(path, deadline=None)
        if isinstance(target, str | os.PathLike):
            await save_as(arriving, Path(target), 0o666, progress)
        else:
            await give(arriving, target, progress)

    async def usage(self) -> WorkspaceUsage:
        """Report the size of the workspace and its limit."""
        return await self._connection.get(WorkspaceUsage, f"{self._path}/usage")

    async def sync(self, direction: SyncDirection | str = "both") -> SyncSummary:
        """Sync the workspace with its filespace: `push`, `pull`, or `both` (pull, then push)."""
        body = {"direction": direction}
        return await self._connection.post(SyncSummary, f"{self._path}/sync", body, deadline=None)

    async def stop(self) -> SandboxInfo:
        """Kill what runs and keep the files; `resume` starts the sandbox again."""
        return await self._connection.post(SandboxInfo, f"{self._path}/stop", deadline=None)

    async def resume(self) -> SandboxInfo:
        """Start a stopped sandbox with its files. Does nothing when it runs."""
        if self.context_id is None:
            raise InvalidRequest(
                "an ephemeral sandbox cannot be resumed: its files are gone",
                field="context_id",
                hint="create the sandbox with a context_id",
            )
        headers, body = {"idempotency-key": uuid.uuid4().hex}, {"context_id": self.context_id}
        info = await self._connection.post(SandboxInfo, "/v1/sandboxes", body, headers=headers, deadline=None)
        self._identify(info)
        return info

    async def terminate(
        self, *, reason: str = "", delete_files: bool = False, snapshot: bool | None = None
    ) -> SandboxInfo:
        """End the sandbox and everything that runs in it. The workspace of a context stays unless `delete_files`.

        `snapshot` says whether to take a last snapshot; by default yes, unless the files are deleted.
        """
        body = {"reason": reason, "delete_files": delete_files, "snapshot": snapshot}
        return await self._connection.post(SandboxInfo, f"{self._path}/terminate", body, deadline=None)

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
            # An error inside the block matters more than a failure to clean up after it.
            if error is None:
                raise


def _id(snapshot: SnapshotInfo | str) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.id
