"""What may be true of a context after a kill: what its files may hold, the snapshots and commands there must be.

Pure: fed with what clients asked and what was answered, and when; asked whether what is found can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tests.support.kill_history import (
    NOTHING,
    Broken,
    Content,
    Contents,
    FileHistory,
    Scene,
    Step,
    SyncedHistory,
    emptied,
    pulled,
    pushed,
)

from carrel.client import AsyncSandbox

CONTESTED = "both.txt"
"""The file that clients write in the workspace and in the filespace."""


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


@dataclass(eq=False)
class Context:
    """One context as its clients know it."""

    name: str
    filespace: bool = False
    life: Life = Life.NONE
    box: AsyncSandbox | None = None
    files: dict[str, FileHistory] = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)
    commands: list[Background] = field(default_factory=list)
    made: bool = False
    """Whether its workspace is certain to exist."""
    may_be_made: bool = False
    """Whether its workspace may exist."""
    scene: Scene = field(default_factory=Scene)

    def file(self, name: str) -> FileHistory:
        """The history of one file."""
        if name not in self.files:
            self.files[name] = self.synced(name) if self.filespace else FileHistory()
        return self.files[name]

    def synced(self, name: str) -> SyncedHistory:
        """The history of one file of a context with a filespace."""
        found = self.files.get(name)
        if not isinstance(found, SyncedHistory):
            found = self.files[name] = SyncedHistory(self.scene, contested=name == CONTESTED)
        return found

    def _all_synced(self) -> dict[str, SyncedHistory]:
        return {name: file for name, file in self.files.items() if isinstance(file, SyncedHistory)}

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

    def may_do(self, when: float, *steps: Step) -> dict[str, int]:
        """The server was asked for these; until it answers, any of them may happen to any file."""
        self.scene.steps += steps
        for file in self._all_synced().values():
            file.look_again(when)
        return {name: file.events for name, file in self._all_synced().items()}

    def does(self, asked: Mapping[str, int], when: float, *steps: Step) -> None:
        """It answered. For a file that clients left alone meanwhile it is known what that came to."""
        self.scene.steps.clear()
        for name, file in self._all_synced().items():
            if asked.get(name) == file.events:
                for step in steps:
                    file.does(step, when)

    def may_be_restored(self, picture: Picture, when: float) -> None:
        """The files were asked to be replaced by these, and the sandbox to be stopped and started for it."""
        self.may_do(when, pushed, pulled)
        self.may_become(picture, when)

    def is_restored(self, picture: Picture, when: float) -> None:
        """The same was answered."""
        self.scene.steps.clear()
        for file in self._all_synced().values():
            file.does(pushed, when)
        self.becomes(picture, when)
        for file in self._all_synced().values():
            file.does(pulled, when)

    def may_be_deleted(self, when: float) -> None:
        """The workspace was asked to be deleted; its filespace stays."""
        if self.filespace:
            self.may_do(when, emptied)
        else:
            self.may_become(Picture({}), when)
        for picture in self.pictures.values():
            picture.may_be_gone = True

    def reborn(self) -> Context:
        """The same name after that was answered, and nothing of what was but the filespace."""
        scene = Scene()
        files: dict[str, FileHistory] = {name: file.emptied(scene) for name, file in self._all_synced().items()}
        return Context(self.name, self.filespace, files=files, scene=scene)

    def settle(self, when: float) -> None:
        """The server was killed: what was asked is done or will not be."""
        for file in self._all_synced().values():
            file.settle(when)
        self.scene.steps.clear()

    def commands_may_end(self) -> None:
        """The sandbox may have been ended, and with it what ran."""
        for command in self.commands:
            command.may_be_gone = True

    def look(self, found: Mapping[str, bytes], when: float) -> None:
        """What the workspace holds must be possible; from now on it is certain."""
        compare(f"workspace of {self.name}", {name: history.now for name, history in self.files.items()}, found)
        for name, history in self.files.items():
            history.seen(found.get(name), when)

    def look_there(self, found: Mapping[str, bytes], when: float) -> None:
        """The same for the filespace."""
        synced = self._all_synced()
        compare(f"filespace of {self.name}", {name: history.there for name, history in synced.items()}, found)
        for name, history in synced.items():
            history.seen_there(found.get(name), when)

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
