"""Sandboxes whose workspace is a folder of the host: which folders are allowed, and the home that such a context keeps.

carrel never copies, empties or deletes such a folder. Its paths are checked by descriptor, and the identity of what was
checked goes to the provider: a folder that is replaced meanwhile is not mounted.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import stat
from collections.abc import Sequence
from dataclasses import replace

from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.sessions.attachments import Attachment, LaunchPlan
from carrel.errors import InvalidRequest, LimitExceeded, PlatformError, Unsupported
from carrel.isolation.inside import HOME, UNAVAILABLE, WORKSPACE
from carrel.primitives.libc import open_without_links
from carrel.primitives.trees import Identity, remove_tree
from carrel.providers.base import Capability, FolderMounts, HostMount
from carrel.store import SessionRecord
from carrel.workspaces.layout import CANONICAL_UID, encode
from carrel.workspaces.usage import max_entries, measure

MB = 1024 * 1024
HOME_FULL = "home full"
"""The reason for the end of a sandbox whose home was too large. The next start measures the home."""
_SHARED = ("/", "/home", "/media", "/mnt", "/opt", "/srv", "/tmp", "/var", "/var/cache", "/var/lib", "/var/log")
"""Directories that belong to the whole host. Folders in them are allowed, they themselves are not."""


class Folders(Attachment):
    """Checks the folders of requests, and keeps the homes of folder contexts."""

    def __init__(self, roots: Sequence[str], data_dir: str, *, home_mb: int):
        self._roots = tuple(roots)
        self._data_dir = os.path.realpath(data_dir)
        self._home_mb = home_mb
        self._homes = os.path.join(self._data_dir, "homes")

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        """Refuse a folder that is not allowed, or that cannot be mounted."""
        record = plan.record
        if record.workspace_path is None:
            if record.host_paths:
                raise InvalidRequest(
                    "host_paths need a workspace_path", field="host_paths", hint="work on a folder of the host"
                )
            return plan
        if record.context_id is None:
            raise InvalidRequest(
                "a folder needs a context", field="workspace_path", hint="give the sandbox a context_id"
            )
        if record.filespace:
            raise Unsupported(
                "a folder of the host cannot be kept in sync with a filespace",
                field="filespace",
                hint="leave filespace out: the folder itself is where the files are",
            )
        plan.provider.require(Capability.FOLDERS)
        if plan.previous is not None and plan.previous.end_reason == HOME_FULL:
            await self.measure_home(record.context_id)
        await asyncio.to_thread(self._check, record)
        if await asyncio.to_thread(_is_home, record.workspace_path):
            return replace(plan, notice="the folder is a home directory: the sandbox sees the keys and logins in it")
        return plan

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Make the home, and note the identities of everything that will be mounted."""
        if plan.record.workspace_path is None:
            return plan
        return replace(plan, folder=await asyncio.to_thread(self._mounts, plan.record))

    async def measure_home(self, context_id: str) -> float:
        """Return the seconds that it took to measure a kept home. `LimitExceeded` if the home is too large."""
        home, most = self._home(context_id), self._home_mb
        used = await measure(home, stop_bytes=most * MB, stop_entries=max_entries(most))
        if used.bytes > most * MB or used.entries > max_entries(most):
            raise LimitExceeded(
                f"the kept home of context '{context_id}' has more than {most} MB, or {max_entries(most)} files",
                field="workspace_path",
                hint=f"delete files in {home}, or let the operator raise CARREL_SANDBOX_HOME_MB",
            )
        return used.seconds

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Delete the kept home. The folder stays as it is."""
        await asyncio.to_thread(remove_tree, self._home(context_id))

    def _home(self, context_id: str) -> str:
        return os.path.join(self._homes, encode(context_id, ephemeral=False))

    def _check(self, record: SessionRecord) -> None:
        path = record.workspace_path or ""
        mode = self._allowed(path, "workspace_path")[1]
        if not stat.S_ISDIR(mode):
            raise InvalidRequest(f"{path} is not a directory", field="workspace_path", hint="name a folder")
        self._require_mountable(path, "workspace_path")
        if path == HOME or (path != WORKSPACE and _within(path, WORKSPACE)):
            raise InvalidRequest(
                f"{path} cannot be a workspace: sandboxes have something else at that path",
                field="workspace_path",
                hint="move the folder",
            )
        for index, host_path in enumerate(record.host_paths):
            where = f"host_paths.{index}"
            self._allowed(host_path.source, f"{where}.source")
            target = host_path.target or host_path.source
            self._require_mountable(target, f"{where}.target")
            if target == HOME or _within(target, WORKSPACE) or _within(target, path):
                raise InvalidRequest(
                    f"nothing can be mounted at {target}: it is the workspace or the home of the sandbox",
                    field=f"{where}.target",
                    hint="choose a path elsewhere, or below /home/agent",
                )

    def _mounts(self, record: SessionRecord) -> FolderMounts:
        path, context = record.workspace_path, record.context_id
        assert path is not None
        assert context is not None
        home = self._home(context)
        try:
            if not os.path.isdir(home):
                os.makedirs(home, 0o700)
                if os.geteuid() == 0:
                    os.chown(home, CANONICAL_UID, CANONICAL_UID)
            status = os.stat(home)
        except OSError as error:
            raise PlatformError(f"the home directory {home} cannot be made: {error.strerror}") from None
        read_only = [
            HostMount(each.source, each.target or each.source, self._allowed(each.source, "host_paths")[0])
            for each in record.host_paths
        ]
        return FolderMounts(
            HostMount(path, path, self._allowed(path, "workspace_path")[0]),
            HostMount(home, HOME, (status.st_dev, status.st_ino)),
            tuple(read_only),
        )

    def _allowed(self, path: str, field: str) -> tuple[Identity, int]:
        """Return the identity and the mode of a file of the host that sandboxes may see; else raise."""
        if os.path.normpath(path) != path or path.startswith("//"):
            raise InvalidRequest(
                f"{path[:200]} is not a plain path", field=field, hint=f"write {os.path.realpath(path)[:200]}"
            )
        if not self._roots:
            raise InvalidRequest(
                "this server lets nobody work on folders of its host",
                field=field,
                hint="let the operator list directories in CARREL_SANDBOX_FOLDER_ROOTS",
            )
        if not any(_within(path, root) for root in self._roots):
            raise InvalidRequest(
                f"{path[:200]} is outside of the directories that this server allows",
                field=field,
                hint=f"choose a folder below {' or '.join(self._roots)[:500]}",
            )
        system = path in _SHARED or path.split("/")[1] in UNAVAILABLE
        if system or _within(path, self._data_dir) or _within(self._data_dir, path):
            raise InvalidRequest(
                f"{path[:200]} belongs to the system, or has the data of carrel in it",
                field=field,
                hint="choose the folder of one project",
            )
        try:
            found = open_without_links(path)
        except OSError as error:
            real = os.path.realpath(path)
            hint = f"its real path is {real[:200]}" if real != path else "check that it exists, on the server's host"
            raise InvalidRequest(f"{path[:200]} cannot be opened: {error.strerror}", field=field, hint=hint) from None
        try:
            status = os.fstat(found)
        finally:
            os.close(found)
        return (status.st_dev, status.st_ino), status.st_mode

    @staticmethod
    def _require_mountable(target: str, field: str) -> None:
        if os.path.normpath(target) != target or target.startswith("//"):
            raise InvalidRequest(f"{target[:200]} is not a plain path", field=field, hint="write it without . and ..")
        if target in {"/", "/home", "/tmp"} or target.split("/")[1] in UNAVAILABLE:
            raise InvalidRequest(
                f"nothing can be mounted at {target[:200]} in a sandbox",
                field=field,
                hint="programs in /usr are visible anyway; choose another target for the rest",
            )


def _is_home(path: str) -> bool:
    """Whether a directory is somebody's home. The user database may be on the network."""
    return any(entry.pw_dir == path for entry in pwd.getpwall())


def _within(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place.rstrip('/')}/")
