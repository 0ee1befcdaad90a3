"""A server process whose provider has slots. It can be killed at each line of a claim."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.fork_server import Forked
from tests.support.kill_server import Server
from tests.support.slots import slot_provider

from carrel.config import load

KILLED_IN = ("/slots.py", "/starting.py", "/slot_table.py", "/attachments.py", "/live.py", "/zygote_provider.py")
"""The modules on the way of a claim. The process is killed before one of their lines."""
KILLED = "killed"
"""The lines are counted from the moment on in which a sandbox of a context starts whose name begins so."""


class Lines:
    """Counts the lines of a claim that run on the event loop, and kills this process at one of them."""

    def __init__(self, fatal: int) -> None:
        self.seen = 0
        self._fatal = fatal
        self._armed = False

    def calls(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """The trace function."""
        if not frame.f_code.co_filename.endswith(KILLED_IN):
            return None
        if not self._armed and frame.f_code.co_name == "start" and "request" in frame.f_locals:
            self._armed = (frame.f_locals["request"].context_id or "").startswith(KILLED)
        return self._line if self._armed else None

    def _line(self, _frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


def main() -> None:
    """Serve with the arguments LINE and DATA_DIR: die at that line of a claim, or count the lines."""
    from carrel.server import running

    lines, data_dir = Lines(int(sys.argv[1])), sys.argv[2]
    settings = load({"data_dir": data_dir, "port": 0, "volumes": "directory"}, environ={})

    async def serve() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with running(settings, providers={"namespace": slot_provider(settings)}):
            sys.settrace(lines.calls)
            await stop.wait()
            sys.settrace(None)
            Path(data_dir, "lines").write_text(str(lines.seen))

    asyncio.run(serve())


class SlotServer(Server):
    """A server whose provider has slots, and which dies at a line of a claim."""

    line = 0

    def _spawn(self) -> Forked | subprocess.Popen[bytes]:
        return self._start(["-c", "from tests.support.slot_server import main; main()", str(self.line), str(self.data)])

    def handles(self) -> dict[str, str]:
        """The ids of the sandboxes that sessions have, by their contexts."""
        with sqlite3.connect(self.data / "carrel.db") as database:
            rows = database.execute("SELECT context_id, handle FROM sessions WHERE handle IS NOT NULL").fetchall()
        return {context: json.loads(handle)["id"] for context, handle in rows if handle != "null"}

    def sandboxes(self) -> set[str]:
        """The ids of the sandboxes that run."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect(str(self.data / "run" / "zygote-namespace.sock"))
            connection.send(json.dumps({"seq": 1, "op": "list"}).encode())
            return set(json.loads(connection.recv(1 << 16))["ids"])
