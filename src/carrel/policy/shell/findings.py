"""What is found in a shell text: commands, files, hosts, reasons to ask. Values only."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Literal

from carrel.policy.shell.arguments import Argument, shown


@dataclass(frozen=True, slots=True)
class Command:
    """A program or shell builtin that may run. `via` names the programs that run it."""

    arguments: tuple[Argument, ...]
    via: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The command as a person would write it."""
        return " ".join(shown(argument) for argument in self.arguments)


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file that a redirection or an option opens; `path` is absolute, None when it is known only at run time."""

    operation: Literal["read", "write", "delete"]
    path: str | None
    source: str


@dataclass(frozen=True, slots=True)
class HostUse:
    """A connection that a redirection to `/dev/tcp` or `/dev/udp` opens."""

    host: str
    port: str


@dataclass(frozen=True, slots=True)
class Found:
    """Everything a text could run or touch, and why a person must look."""

    commands: tuple[Command, ...]
    files: tuple[FileUse, ...]
    hosts: tuple[HostUse, ...]
    asks: tuple[str, ...]
    opaque: tuple[str, ...]
    """Commands in other places that it runs and that cannot be seen here: a file, standard input."""


def normal(path: str) -> str:
    """An absolute path without `.`, `..` and doubled slashes. Links are not looked at: there is no disk here."""
    return "/" + posixpath.normpath(path).lstrip("/")
