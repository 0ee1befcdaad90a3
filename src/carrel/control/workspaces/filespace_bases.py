"""What a workspace and its filespace had in common at their last sync. It is kept in a file per context, and travels
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
    """The files of one server, in `directory`. Makes the directory. Blocking at first."""

    def __init__(self, directory: str):
        self._directory = directory
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            for name in os.listdir(directory):  # a server that was killed may have left some
                if name.startswith(ASIDE):
                    os.unlink(os.path.join(directory, name))
        except OSError as error:
            raise PlatformError(f"filespaces cannot be used: {error.strerror}", field="data_dir") from None

    def path(self, context: str) -> str:
        """The file of a context."""
        return os.path.join(self._directory, encode(context, ephemeral=False))

    async def get(self, context: str) -> bytes:
        """What is remembered of a context; empty when nothing is."""
        return await asyncio.to_thread(read_base, self.path(context))

    async def set(self, context: str, base: bytes) -> None:
        """The workspace was brought back as it was when this was remembered; empty when nothing was."""
        if not base:
            await self.forget(context)
            return
        await asyncio.to_thread(save_base, self.path(context), base)

    async def forget(self, context: str) -> None:
        """The workspace is gone; the filespace stays."""

        def run() -> None:
            with suppress(FileNotFoundError):
                os.unlink(self.path(context))

        await asyncio.to_thread(run)
