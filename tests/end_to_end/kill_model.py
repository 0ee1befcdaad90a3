"""What may be true of a context after a kill: the contents each file may have, the snapshots and commands there must be.

Pure: fed with what clients asked and what was answered, and when; asked whether what is found can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from carrel.client import AsyncSandbox

Content = bytes | None
"""What a file holds; None where there is none."""

Contents = frozenset[Content]
NOTHING: Contents = frozenset({None})


class Broken(AssertionError):
    """The server broke a promise."""


class FileHistory:
    """What one file may have held, at every moment."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, Contents]] = [(-math.inf, NOTHING)]

    @property
    def now(self) -> Contents:
        """What it may hold now."""
        return self._moments[-1][1]

    def may_become(self, contents: Contents, when: float) -> None:
        """Something was asked that has not been answered."""
        self._moments.append((when, self.now | contents))

    def becomes(self, contents: Contents, when: float) -> None:
        """It holds one of these from now on: something was answered, or somebody looked."""
        self._moments.append((when, contents))

    def between(self, start: float, end: float) -> Contents:
        """What somebody may have seen who looked once, somewhere between."""
        seen: Contents = frozenset()
        for index, (when, contents) in enumerate(self._moments):
            until = self._moments[index + 1][0] if index + 1 < len(self._moments) else math.inf
            if when <= end and until >= start:
                seen |= contents
        return seen


class Life(Enum):
    """What is known of a session."""

    NONE = "no session"
    RUNNING = "running"
    STOPPED = "stopped"
    UNSURE = "something was asked and not answered"


@dataclass
class Picture:
    """What a snapshot holds, as far as is known."""

    files: dict[str, Contents]
    may_be_gone: bool = False


@dataclass
class Background:
    """A command that prints numbered lines, and what a client has got of them."""

    id: str
    expected: bytes
    exit_code: int
    got: bytes = b""
    offset: int = 0
    may_be_gone: bool = False
    ended: bool = False

    def take(self, data: bytes, offset: int) -> None:
        """More output: it must continue exactly where the client stopped."""
        self.got += data
        self.offset = offset
        if not self.expected.startswith(self.got):
            at = next(index for index, byte in enumerate(self.got) if self.expected[index : index + 1] != bytes([byte]))
            raise Broken(
                f"output of command {self.id} is not what it printed, from byte {at}: {self.got[max(0, at - 20) :][:60]!r}"
            )


@dataclass
class Context:
    """One context as its clients know it."""

    name: str
    life: Life = Life.NONE
    box: AsyncSandbox | None = None
    files: dict[str, FileHistory] = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)
    commands: list[Background] = field(default_factory=list)
    made: bool = False
    """Whether its workspace is certain to exist."""
    may_be_made: bool = False
    """Whether its workspace may exist."""

    def file(self, name: str) -> FileHistory:
        """The history of one file."""
        return self.files.setdefault(name, FileHistory())

    def picture(self, start: float, end: float) -> Picture:
        """What a snapshot taken between two moments holds."""
        return Picture({name: history.between(start, end) for name, history in self.files.items()})

    def may_become(self, picture: Picture, when: float) -> None:
        """The files were asked to be replaced by these."""
        for name in self.files.keys() | picture.files.keys():
            self.file(name).may_become(picture.files.get(name, NOTHING), when)

    def becomes(self, picture: Picture, when: float) -> None:
        """The files were replaced by these."""
        for name in self.files.keys() | picture.files.keys():
            self.file(name).becomes(picture.files.get(name, NOTHING), when)

    def commands_may_end(self) -> None:
        """The sandbox may have been ended, and with it what ran."""
        for command in self.commands:
            command.may_be_gone = True

    def look(self, found: Mapping[str, bytes], when: float) -> None:
        """What the workspace holds must be possible; from now on it is certain."""
        compare(f"workspace of {self.name}", {name: history.now for name, history in self.files.items()}, found)
        for name, history in self.files.items():
            history.becomes(frozenset({found.get(name)}), when)

    def look_at_picture(self, snapshot_id: str, found: Mapping[str, bytes]) -> None:
        """The same for a snapshot."""
        picture = self.pictures[snapshot_id]
        compare(f"snapshot {snapshot_id} of {self.name}", picture.files, found)
        for name in picture.files:
            picture.files[name] = frozenset({found.get(name)})


def compare(what: str, possible: Mapping[str, Contents], found: Mapping[str, bytes]) -> None:
    """Raise `Broken` unless every file found may be so, and none is missing that must be there."""
    wrong = []
    for name in sorted(possible.keys() | found.keys()):
        content, allowed = found.get(name), possible.get(name, NOTHING)
        if content not in allowed:
            wanted = " or ".join(sorted(shown(each) for each in allowed))
            wrong.append(f"{name} is {shown(content)}, expected {wanted}")
    if wrong:
        raise Broken(f"{what}: " + "; ".join(wrong))


def shown(content: Content) -> str:
    """A content in few words."""
    return "missing" if content is None else f"{content[:24]!r} ({len(content)} bytes)"
