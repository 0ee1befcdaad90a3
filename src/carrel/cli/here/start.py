"""Runs a program on the current folder: finds or starts the server, and prepares everything else meanwhile.

Imports next to nothing, so that the server starts as early as possible.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

from carrel.cli.here.server import FolderServer, server_for
from carrel.cli.here.words import HereOptions
from carrel.errors import InvalidRequest


def start(options: HereOptions) -> int:
    """Run the program of the options; return its exit code."""
    folder = _folder(options)

    @cache
    def prepared() -> Callable[[FolderServer], int]:
        from carrel.cli.here.run import prepare

        return prepare(options, folder)

    with server_for(folder, meanwhile=prepared) as server:
        return prepared()(server)


def _folder(options: HereOptions) -> str:
    """Return the current folder by its real path."""
    folder = os.path.realpath(os.getcwd())
    home = os.path.realpath(os.path.expanduser("~"))
    if (home == folder or home.startswith(folder.rstrip("/") + "/")) and not options.yes:
        raise InvalidRequest(
            f"{folder} holds your whole home directory",
            hint="change to the folder of one project; --yes uses this one nevertheless",
        )
    return folder
