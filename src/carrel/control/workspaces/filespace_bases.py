"""The common state of a workspace and its filespace at their last sync: a file for each context, which is also stored
with the snapshots of the workspace.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from carrel.errors import PlatformError
from carrel.workspaces.filespace_sync import ASIDE, read_base, save_base
from carrel.workspaces.layout import encode


class FilespaceBases:
    """The files of one server in `directory`, which is made. `alone`: no other process uses them. The constructor
    blocks.
    """

    def __init__(self, directory: str, *, alone: bool):
        self._directory = directory
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            for name in os.listdir(directory) if alone else ():  # a killed server may have left some
                if name.startswith(ASIDE):
                    os.unlink(os.path.join(directory, name))
        except OSError as error:
            raise PlatformError(f"filespaces cannot be used: {error.strerror}", field="data_dir") from None

    def path(self, context: str) -> str:
        return os.path.join(self._directory, encode(context, ephemeral=False))

    async def get(self, context: str) -> bytes:
        """Return the state of a context; empty if there is none."""
        return await asyncio.to_thread(read_base, self.path(context))

    async def set(self, context: str, base: bytes) -> None:
        """Set the state that belongs to a restored workspace; empty if there was none."""
        if not base:
            await self.forget(context)
            return
        await asyncio.to_thread(save_base, self.path(context), base)

    async def forget(self, context: str) -> None:
        """Forget the state: the workspace is gone, the filespace stays."""

        def run() -> None:
            with suppress(FileNotFoundError):
                os.unlink(self.path(context))

        await asyncio.to_thread(run)
