"""Real servers in processes of their own, as root and as an ordinary user; and two of them, for the whole run, that have a
template with real packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.support.fork_server import Forked, start

from carrel import Client

SOURCE = Path(__file__).parents[2] / "src"
USER = 64_321  # nobody on any distribution; it has no name and no home
ROOT = os.geteuid() == 0
HEAVY = {"ruff", "mypy", "mypyc", "setuptools", "hypothesis", "pytest", "_pytest", "pygments", "jedi"}
BUILDING = {"uv", "pip"}
"""What a server needs only to build environments."""
SCIENCE, SMALL = "science", "small"
MUCH = 'packages = ["pandas", "matplotlib"]\nimports = ["pandas", "matplotlib.pyplot"]\n'
LITTLE = 'packages = ["pyparsing"]\nimports = ["pyparsing"]\n'
"""Built in a second; the other takes half a minute."""


@dataclass
class Server:
    """A running server and how to reach it."""

    data_dir: Path
    client: Client
    pid: int


def as_user(command: list[str]) -> list[str]:
    """The command as an ordinary user; as it is when we are one."""
    if not ROOT:
        return command
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--", *command]


def readable(directory: Path, *, build: bool = False) -> str:
    """A PYTHONPATH the ordinary user can read: ours, or a copy where the checkout is closed to others."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    probe = [
        os.path.realpath(sys.executable),
        "-I",
        "-c",
        f"import os; os.listdir({str(SOURCE)!r}); os.listdir({site!r})",
    ]
    if subprocess.run(as_user(probe), capture_output=True, check=False).returncode == 0:
        return f"{SOURCE}:{site}"
    copy, left_out = directory / "packages", HEAVY if build else HEAVY | BUILDING
    shutil.copytree(site, copy, ignore=lambda _path, names: [name for name in names if name in left_out], symlinks=True)
    shutil.copytree(SOURCE, directory / "src")
    return f"{directory / 'src'}:{copy}"


@contextlib.contextmanager
def serving(
    *,
    user: bool,
    options: Mapping[str, str] = MappingProxyType({}),
    build: bool = False,
    prepare: Callable[[Path], None] | None = None,
    open_files: int | None = None,
    forked: bool = False,
    data: Path | None = None,
) -> Iterator[Server]:
    """A server; `prepare` is given its data directory before it starts, `build` says that it builds environments,
    `open_files` is its limit of descriptors. `forked`: from a process that has carrel imported (see `fork_server`); a
    server of this user only. `data` is its data directory, if it has to be at some place.
    """
    directory = Path(tempfile.mkdtemp(prefix="carrel-attacked-"))
    command = [sys.executable, "-m", "carrel"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    environment["CARREL_POOL_SIZE"] = "0"  # slots come and go while a test looks for what is left of its sandboxes
    data = data or directory / "data"
    if prepare is not None:
        data.mkdir()
        prepare(data)
    if user and ROOT:
        directory.chmod(0o755)
        packages = readable(directory, build=build)
        environment |= {"PYTHONPATH": packages, "HOME": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
        command[0] = os.path.realpath(sys.executable)
        data.mkdir(exist_ok=True)
        for path in (data, *data.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)
    command += ["serve", "--port", "0", "--data-dir", str(data), "--set", "sandbox.allow_process=true"]
    command += [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    if open_files is not None:
        command = ["prlimit", f"--nofile={open_files}:{open_files}", *command]
    log = (directory / "log").open("wb")
    process: Forked | subprocess.Popen[bytes]
    if forked:
        process = start(command, env=environment, stdout=log, stderr=log, cwd="/")
    else:
        command = ["setpriv", "--pdeathsig=TERM", "--", *command]  # a run that is killed leaves no servers
        if user:
            command = as_user(command)
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd="/", start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while not (data / "server.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("the server did not start:\n" + (directory / "log").read_text())
            time.sleep(0.02)
        url = json.loads((data / "server.json").read_text())["url"]
        with Client(url, (data / "token").read_text().strip()) as client:
            client.host()  # opens the connection that all tests share
            yield Server(data, client, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            log.close()
            shutil.rmtree(directory)


@contextlib.contextmanager
def science(recipe: str, *, user: bool) -> Iterator[Server]:
    """A server whose template `science` has real packages, built from the host's own index; sandboxes of the template
    `small` may use little.
    """

    def prepare(data: Path) -> None:
        for name, text in {SCIENCE: recipe, SMALL: "limits = { memory_mb = 256, processes = 64 }\n"}.items():
            folder = data / "templates" / name
            folder.mkdir(parents=True)
            (folder / "template.toml").write_text(text)

    with serving(user=user, build=True, prepare=prepare) as server:
        with server.client.sandbox(template=SCIENCE) as box:
            said: list[str] = []
            box.envs.attach(progress=said.append)
            code = "import " + ", ".join(tomllib.loads(recipe)["imports"])
            assert box.python.run(code).exit_code == 0, said
        yield server
