"""A supervisor that is started from the bundle in a root of the caller's choice, as other runtimes start it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from carrel.control.supervisor.connection import SupervisorConnection
from carrel.models import Network
from carrel.providers import bundle
from carrel.providers.base import Launch
from carrel.providers.control_directory import REPORT, ControlDirectory, facts_of, waiting_supervisor
from carrel.providers.links import LocalLink

PYTHON = bundle.command("")[: bundle.command("").index("-I")]
"""The words that start the interpreter of the bundle inside a sandbox."""
MOUNTS = ("opt/carrel", "run/carrel", "workspace", "proc", "dev", "home/agent", "run/secrets")
_ENTER = """
set -e
ip link set lo up
mount --bind "$1" "$4/opt/carrel"
mount --bind "$2" "$4/run/carrel"
mount --bind "$3" "$4/workspace"
mount --bind /dev/null "$4/dev/null"
mount -t proc proc "$4/proc"
mount -t tmpfs -o mode=0700,uid=1000,gid=1000 tmpfs "$4/run/carrel/private/secrets"
mount --bind "$4/run/carrel/private/secrets" "$4/run/secrets"
mount -o remount,bind,ro "$4/run/secrets"
root=$4
shift 4
exec chroot "$root" "$@"
"""


class ProgramBox:
    """A supervisor that runs as a program, its control directory, and a connection to it."""

    def __init__(self, control: ControlDirectory, pid: int):
        self.control = control
        self.pid = pid
        self.connection = SupervisorConnection(LocalLink(control.socket_path))

    async def python(self, code: str, **fields: object) -> Any:
        """Run code on the interpreter of the bundle, as an agent's command."""
        code = f"import bundle_modules; bundle_modules.install()\n{code}"
        return await self.run([*PYTHON, "-I", "-S", "-c", code], **fields)

    async def run(self, command: list[str] | str, **fields: object) -> Any:
        body = {"command": command, "timeout": 20, "output_limit": 1 << 20, **fields}
        return await self.connection.request_json("POST", "/commands?wait=1", body, deadline=30)


@asynccontextmanager
async def program(made: bundle.SupervisorBundle, root: Path, place: Path, **terms: Any) -> AsyncIterator[ProgramBox]:
    """Start the supervisor of a bundle in new namespaces, in a root directory to which only mounts are added."""
    for name in MOUNTS:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "dev/null").touch()
    workspace = place / f"workspace-{secrets.token_hex(4)}"
    workspace.mkdir()
    os.chown(workspace, 1000, 1000)
    launch = Launch(id="program", workspace=str(workspace), **{"network": Network.NONE, **terms})
    control = ControlDirectory(str(place / f"c-{secrets.token_hex(4)}"))
    control.create()
    words = [made.path, control.path, str(workspace), str(root), *bundle.command(REPORT)]
    with control.listen_for_supervisor() as listener:
        process = subprocess.Popen(["unshare", "-mpnif", "sh", "-c", _ENTER, "enter", *words])
        try:
            with closing(await waiting_supervisor(listener, _end(process))) as supervisor:
                await supervisor.begin(facts_of(launch, uid=1000, gid=1000, secrets=True))
            box = ProgramBox(control, *_children(process))
            try:
                yield box
            finally:
                box.connection.close()
        finally:
            for child in _children(process):  # it has become another user, so it does not end with its parent
                os.kill(child, signal.SIGKILL)
            process.kill()
            process.wait()
            control.remove()


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


async def _end(process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        await asyncio.sleep(0.02)
    return f"exit code {process.returncode}"
