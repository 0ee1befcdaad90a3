"""The server for a folder: the one that runs on this machine if it may use the folder, else one for the purpose.

A server for the purpose ends with its last user. Each user holds a shared lock on one file, which the kernel releases
when the process ends, also when it is killed. Imports little, because `carrel here` must start quickly.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from carrel.errors import PlatformError
from carrel.primitives.file_lock import is_locked

if TYPE_CHECKING:
    from carrel.client import Client

START_S = 60.0
END_S = 60.0
_NOT_FOR_IT = frozenset({"CARREL_DATA_DIR", "CARREL_URL", "CARREL_TOKEN", "CARREL_PORT", "CARREL_HOST"})
"""Variables that are for the usual server or for a client."""


class FolderServer(NamedTuple):
    """Where the server for a folder is."""

    url: str
    token: str | None
    """The administrator's token."""
    agent_token: str | None
    """The token for agents. A person cannot approve what was asked for with the same token."""
    directory: str | None = None
    """Its data directory, if that is not the usual one."""


def usual_directory() -> str:
    """Return the data directory of `carrel serve`."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.abspath(os.environ.get("CARREL_DATA_DIR") or os.path.join(base, "carrel"))


def own_directory() -> str:
    """Return the data directory of servers for the purpose: beside the usual one."""
    return usual_directory() + "-here"


def client_directory() -> str:
    """Return the directory for files of commands. Servers show none of their own files to a sandbox."""
    return usual_directory() + "-here-client"


@contextmanager
def server_for(folder: str, meanwhile: Callable[[], object] = lambda: None) -> Iterator[FolderServer]:
    """Yield a server that may use this folder as a workspace. One that is started for it lives as long as the block,
    or as the blocks of other processes. `meanwhile` is called while it starts.
    """
    named = os.environ.get("CARREL_URL")
    if named:
        given = os.environ.get("CARREL_TOKEN")
        yield FolderServer(named.rstrip("/"), given, given) if given else _server(named.rstrip("/"), usual_directory())
        return
    usual = usual_directory()
    found = _record(usual)
    if found is not None and _covers(found.get("folder_roots"), folder) and _is_used(usual):
        yield _server(str(found["url"]), usual)
        return
    directory = own_directory()
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        users = _open(directory, "users")
    except OSError as error:
        raise PlatformError(
            f"the directory {directory} cannot be used: {error.strerror}",
            hint="choose another place with CARREL_DATA_DIR; its name and '-here' is used",
        ) from None
    try:
        _lock(users, fcntl.LOCK_SH, END_S, f"a server that is ending still uses {directory}")
        yield found_or_started(directory, meanwhile)
    finally:
        os.close(users)


@contextmanager
def client_for(folder: str) -> Iterator[Client]:
    """Open a client of the server for a folder."""
    from carrel.client import Client

    with server_for(folder) as server, Client(server.url, server.token) as client:
        yield client


def found_or_started(directory: str, meanwhile: Callable[[], object] = lambda: None) -> FolderServer:
    """Return the server that runs, or start one. One process at a time does this."""
    starting = _open(directory, "starting")
    try:
        _lock(starting, fcntl.LOCK_EX, START_S, f"another process is starting a server in {directory}")
        if not _is_used(directory):
            _start(directory, starting, meanwhile)
        found = _record(directory)
    finally:
        os.close(starting)
    if found is None:
        raise PlatformError(
            f"a server uses {directory}, but there is no address in it",
            hint=f"end that server; `fuser {directory}/lock` shows its process",
        )
    return _server(str(found["url"]), directory)._replace(directory=directory)


def _server(url: str, directory: str) -> FolderServer:
    return FolderServer(url, _token(directory, "token"), _token(directory, "agent-token"))


def _start(directory: str, starting: int, meanwhile: Callable[[], object]) -> None:
    """Start a server. It holds the lock too until it is ready: if this process is killed, the next one waits for it.
    Then it closes the lock and a pipe, which tells this process.
    """
    import select
    import signal
    import subprocess

    _remove(os.path.join(directory, "server.json"))  # of a server that was killed
    log = os.path.join(directory, "server.log")
    ended, ends = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-m", "carrel.cli.here.serve", directory, str(starting), str(ends)]
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT}
    kept["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # the search for them reads a file of every installed package
    with open(log, "wb") as output:
        os.chmod(log, 0o600)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,  # a carrel.toml of the folder must not configure it
            env=kept,
            pass_fds=(starting, ends),
            start_new_session=True,  # the keys of the terminal are not for it
        )
    process.returncode = 0  # nobody waits for it: it may live longer than this process
    os.close(ends)
    try:
        meanwhile()
        select.select([ended], [], [], START_S)
    except BaseException:
        os.kill(process.pid, signal.SIGTERM)
        os.waitpid(process.pid, 0)
        raise
    finally:
        os.close(ended)
    if _record(directory) is None:
        raise PlatformError(f"the server for this folder did not start: {_reason(log)}", hint=f"see {log}")


def _reason(log: str) -> str:
    try:
        with open(log, errors="replace") as file:
            lines = [line.strip() for line in file.read(65536).splitlines() if line.strip()]
    except OSError:
        lines = []
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (said or lines or ["it said nothing"])[-1]


def _open(directory: str, name: str) -> int:
    return os.open(os.path.join(directory, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _lock(descriptor: int, kind: int, patience: float, why: str) -> None:
    """Take a lock; wait for it up to `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise PlatformError(why, hint="wait for it, or end that process") from None
            time.sleep(0.005)


def _is_used(directory: str) -> bool:
    """Whether a server runs on a data directory: it holds a lock there. An address alone may be left from one that was
    killed, and its port may belong to another program now.
    """
    return is_locked(os.path.join(directory, "lock"))


def _record(directory: str) -> dict[str, object] | None:
    try:
        with open(os.path.join(directory, "server.json"), "rb") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("url"), str) else None


def _covers(roots: object, folder: str) -> bool:
    """Whether a folder is one of these directories or inside of one."""
    names = [root for root in roots if isinstance(root, str)] if isinstance(roots, list) else []
    return any(folder == root or folder.startswith(root.rstrip("/") + "/") for root in names)


def _token(directory: str, name: str) -> str | None:
    try:
        with open(os.path.join(directory, name), encoding="ascii") as file:
            return file.read(1024).strip() or None
    except (OSError, ValueError):
        return None


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
