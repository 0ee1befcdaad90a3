"""Asks a person when many files of a folder are deleted, whatever deletes them (see `deletion_counter`).

Until the person has answered, the processes of the sandbox are stopped. A refusal, or no answer, kills them: a program
that was told no could go on deleting. Each approval allows ten times as many files as the one before, so that a large
removal asks a few times and not for each part of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller
from carrel.control.sessions.attachments import Attachment
from carrel.control.sessions.deletion_counter import DeletionCounter
from carrel.control.sessions.live import LiveSandbox, SessionNotes
from carrel.errors import CarrelError
from carrel.identity import Identity, OwnerKind
from carrel.models.operations import DELETE_MANY_FILES
from carrel.primitives.atomic import write_file
from carrel.primitives.tasks import cancel, readable
from carrel.store import SessionRecord
from carrel.threads import run_to_end

log = logging.getLogger("carrel.folders")

PAUSE_S = 0.02
"""A pause after each look: an agent that changes files all the time must not keep the server busy."""
STOP_AGAIN_S = 1.0
"""How often processes that were started meanwhile are stopped too."""
KILL_S = 5.0
"""How long the supervisor may take to kill a command."""
GROWTH = 10
MOST_SHOWN = 5
MOST_KILLED = 1000
UNCOUNTED = "not all deletions of files in the folder are noticed: it has too many directories, or inotify is used up"

Question = dict[str, object]
"""The arguments of the operation that a person is asked about."""


@dataclass
class _Counted:
    box: LiveSandbox
    counter: DeletionCounter
    allowed: int
    """How many files may go until a person is asked."""


class DeletionLimits(Attachment):
    """The limits of all folders of this server. `directory` is for questions that wait, so that they are asked again
    after a restart; `ignored` are the names of folders that do not count.
    """

    def __init__(
        self,
        directory: str,
        admission: Admission,
        notes: SessionNotes,
        limit_of: Callable[[SessionRecord], Awaitable[int | None]],
        *,
        ignored: Collection[str],
        wait_s: float,
    ):
        self._directory = directory
        self._admission = admission
        self._notes = notes
        self._limit_of = limit_of
        self._ignored = ignored
        self._wait_s = wait_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def open(self, boxes: Iterable[LiveSandbox]) -> None:
        """Count in the folders of sandboxes that run already. One that was stopped for a question asks it again."""
        for box in boxes:
            await self._start(box, await asyncio.to_thread(self._stored, box.record))

    async def close(self) -> None:
        await cancel(self._tasks.values())

    async def attach(self, box: LiveSandbox) -> None:
        """Count the deleted files of a new sandbox's folder, if a policy limits them."""
        await self._start(box, None)

    def detach(self, box: LiveSandbox) -> None:
        if (task := self._tasks.pop(box.record.id, None)) is not None:
            task.cancel()

    async def save(self, record: SessionRecord, workspace: str) -> None:
        await asyncio.to_thread(self._forget, record)

    async def _start(self, box: LiveSandbox, question: Question | None) -> None:
        folder = box.record.workspace_path
        if folder is None or (limit := await self._limit_of(box.record)) is None:
            return
        try:
            counter = await run_to_end(lambda: DeletionCounter(folder, self._ignored), DeletionCounter.close)
        except OSError as error:
            log.warning("deletions in the folder of %s are not counted: %s", box.record.owner, error)
            await self._tell(box, UNCOUNTED)
            return
        if not counter.complete:
            await self._tell(box, UNCOUNTED)
        counted = _Counted(box, counter, limit)
        self._tasks[box.record.id] = asyncio.get_running_loop().create_task(self._count(counted, question))

    async def _count(self, counted: _Counted, question: Question | None) -> None:
        box, counter = counted.box, counted.counter
        try:
            if question is not None:
                await self._ask(counted, question)
            while True:
                await readable(counter.fd)
                complete, count = counter.complete, await run_to_end(counter.look)
                if complete and not counter.complete:
                    await self._tell(box, UNCOUNTED)
                if count > counted.allowed:
                    await self._ask(counted, {"count": count, "paths": _shown(counter)})
                await asyncio.sleep(PAUSE_S)
        except Exception:
            log.exception("deletions in the folder of %s are not counted any more", box.record.owner)
            await self._tell(box, UNCOUNTED)
        finally:
            counter.close()

    async def _ask(self, counted: _Counted, question: Question) -> None:
        """Stop the sandbox, ask, and let it go on or kill what runs in it."""
        box = counted.box
        await asyncio.to_thread(self._store, box.record, question)
        stopped = await box.provider.pause(box.handle)  # if this fails, nobody is asked: the answer is no
        again = asyncio.get_running_loop().create_task(self._stop_again(box))
        try:
            allowed = stopped and await self._admits(box, question)
        finally:
            await cancel([again])
        if allowed:
            counted.allowed = max(1, counted.allowed) * GROWTH
            await box.provider.unpause(box.handle)
        else:
            await self._kill(box)
            await self._tell(
                box,
                f"{question['count']} files of the folder were deleted and nobody allowed it, so the programs in the "
                "sandbox were ended; `carrel undo` brings the files back",
            )
        await run_to_end(counted.counter.look)
        counted.counter.reset()
        await asyncio.to_thread(self._forget, box.record)

    async def _stop_again(self, box: LiveSandbox) -> None:
        while True:
            await asyncio.sleep(STOP_AGAIN_S)
            await box.provider.pause(box.handle)

    async def _admits(self, box: LiveSandbox, question: Question) -> bool:
        record = box.record
        # Programs in a sandbox have no token: they cannot decide approvals.
        who = Caller(Identity(f"sandbox:{record.id}", OwnerKind.AGENT, frozenset()), wait_s=self._wait_s)
        call = Call(DELETE_MANY_FILES, question, who, record.id, record.context_id, box.asks_as)
        try:
            async with self._admission.admit(call):
                return True
        except CarrelError as error:
            log.info("sandbox %s: deleting many files was refused: %s", record.id, error)
            return False

    async def _kill(self, box: LiveSandbox) -> None:
        """Kill the running commands, then everything that is still stopped: servers and interpreters of the agent."""
        try:
            async with asyncio.timeout(KILL_S):
                while running := [each.id for each in (await box.connection.list_commands()).items if each.running]:
                    for command in running[:MOST_KILLED]:
                        with suppress(CarrelError):  # it has ended
                            await box.connection.signal_command(command, {"signal": "KILL", "tree": True})
                    await asyncio.sleep(PAUSE_S)
        except (CarrelError, TimeoutError) as error:
            log.warning("sandbox %s: its commands could not be killed one by one: %s", box.record.id, error)
        await box.provider.kill_paused(box.handle)

    async def _tell(self, box: LiveSandbox, words: str) -> None:
        before = box.record.notice
        if words not in (before or ""):
            await self._notes.write(box.record, notice=words if before is None else f"{before}; {words}"[:2000])

    # files; blocking

    def _path(self, record: SessionRecord) -> str:
        return os.path.join(self._directory, f"{record.id}.json")

    def _store(self, record: SessionRecord, question: Question) -> None:
        os.makedirs(self._directory, 0o700, exist_ok=True)
        write_file(self._path(record), json.dumps(question).encode())

    def _stored(self, record: SessionRecord) -> Question | None:
        try:
            with open(self._path(record), "rb") as file:
                question: Question = json.load(file)
                return question
        except FileNotFoundError:
            return None

    def _forget(self, record: SessionRecord) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(record))


def _shown(counter: DeletionCounter) -> str:
    names = ", ".join(islice(counter.gone, MOST_SHOWN))
    more = f" and {len(counter.gone) - MOST_SHOWN} more" if len(counter.gone) > MOST_SHOWN else ""
    return names.encode(errors="backslashreplace").decode() + more
