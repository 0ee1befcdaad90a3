"""`python -m carrel.cli.here.serve DIRECTORY FD FD`: the server that `carrel here` starts for the purpose.

It reads no options with a library, which would take part of the time that `carrel here` may take. `server` of this
package starts it and says what the directory and the descriptors are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from carrel.cli.failures import exit_code_of
from carrel.extras import using
from carrel.primitives.imports import importing


def main(directory: str, starting: Sequence[int]) -> int:
    """Run the server until nobody uses it; return the exit code. Every failure becomes a line or two in its log."""
    try:
        with using("server"), importing():
            from carrel.isolation import probe

            probe.begin()  # a process that takes as long as the imports
            from carrel import config
            from carrel.server import serve
        flags = {
            "host": "127.0.0.1",
            "port": 0,
            "data_dir": directory,
            "log_level": "warning",
            "sandbox.folder_roots": "/",  # it belongs to the user, who chooses the folder
        }
        if "CARREL_VOLUMES" not in os.environ and not os.path.exists(os.path.join(directory, "storage", "pool.btrfs")):
            flags["volumes"] = "directory"  # folders need no volumes, and to mount a pool takes a while
        serve(config.load(flags), Path(directory, "users"), starting)
    except BaseException as error:
        return exit_code_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [int(word) for word in sys.argv[2:]]))
