"""Calls of Python that have no context: which sandbox runs them, and who waits when all are busy.

A sandbox runs one call at a time, and is only ever one caller's: it is emptied after each call, and ended when that
does not work. Callers take turns. The table follows what happens to sandboxes; nothing is asked again and again.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import time
from base64 import b64encode
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from carrel.config import RouterSettings
from carrel.control.caller import caller
from carrel.control.door import SELF
from carrel.control.live import LiveSandbox
from carrel.control.operations import Operations
from carrel.control.sessions import Sessions
from carrel.errors import CarrelError, LimitExceeded, NotFound, NotRunning, PlatformError
from carrel.isolation.rootfs import HOME, WORKSPACE
from carrel.metrics import OK, Metrics, outcome_of
from carrel.models import CommandRequest, ExecuteRequest, SandboxInfo, SandboxRequest, StatelessRequest, StatelessResult

log = logging.getLogger("carrel.router")

LABEL = "carrel.router"
"""Marks the sandboxes of the router, so that the next server ends what this one left."""
MOST_RETURNED = 8 * 1024 * 1024
"""How many bytes of produced files come back with a result; the others are only named."""
MOST_LISTED = 2000
"""How many files a new sandbox may have to be emptied after a call; one with more is ended instead."""
_TRIES = 3

_EMPTY = """
import json, os, shutil, stat, sys
given = json.load(sys.stdin)
found = {}
for top in given["places"]:
    for place, dirs, files in os.walk(top):
        for name in [*dirs, *files]:
            path = os.path.join(place, name)
            known = given["known"]
            if known is not None and path not in known:
                if name in dirs and not os.path.islink(path):
                    dirs.remove(name)
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
                continue
            info = os.lstat(path)
            found[path] = [info.st_mode, info.st_uid]
            if not stat.S_ISDIR(info.st_mode):
                found[path] += [info.st_size, info.st_ino, info.st_ctime_ns]
        if len(found) > given["most"]:
            sys.exit(1)
print(json.dumps(found, sort_keys=True))
"""
"""Removes what was not there at the start, and tells what is there. What a program changed has another ctime."""

Owner = tuple[str, str | None]
_State = Literal["starting", "idle", "busy", "ending"]


@dataclass(eq=False, slots=True)
class _Place:
    """A sandbox in the table. One without an owner is a spare: nothing has run in it."""

    template: str | None
    owner: Owner | None
    state: _State
    id: str = ""
    known: dict[str, list[int]] | None = None
    """What it had when it was new; None when it is to run one call only."""
    envs: set[str] = field(default_factory=set)
    used_at: float = 0.0
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: Owner
    template: str | None
    env: str | None
    given: asyncio.Future[_Place]


class Router:
    """The sandboxes for calls without a context."""

    def __init__(self, settings: RouterSettings, sessions: Sessions, operations: Operations, metrics: Metrics):
        self._settings = settings
        self._sessions = sessions
        self._operations = operations
        self._metrics = metrics
        self._places: set[_Place] = set()
        self._waiting: OrderedDict[Owner, deque[_Waiter]] = OrderedDict()
        self._used: dict[str | None, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def open(self) -> None:
        """End what the server before this one left."""
        for box in self._sessions.live():
            if box.record.ephemeral and LABEL in box.record.labels:
                await self._sessions.terminate(box.record.id, "its server is gone")

    async def close(self) -> None:
        """Let nobody wait any longer. The sandboxes end with the sessions."""
        self._closing = True
        for line in self._waiting.values():
            for waiter in line:
                if not waiter.given.done():
                    waiter.given.set_exception(PlatformError("the server is shutting down"))
        self._waiting.clear()
        for place in self._places:
            self._disarm(place)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ended(self, box: LiveSandbox) -> None:
        """A sandbox ends, whoever ended it."""
        for place in [each for each in self._places if each.id == box.record.id]:
            self._forget(place)

    async def run(self, request: StatelessRequest) -> StatelessResult:
        """Run a code in some sandbox. `LimitExceeded` when none is free for too long."""
        identity = caller.get().identity
        outcome = OK
        try:
            return await self._run((identity.subject, identity.namespace), request)
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._metrics.routed(outcome)

    async def _run(self, owner: Owner, request: StatelessRequest) -> StatelessResult:
        env = request.env_name
        if request.requirements is not None:
            env = json.dumps([sorted(request.requirements), request.python_index])
        call = ExecuteRequest(language="python", **request.model_dump(exclude={"template"}, exclude_defaults=True))
        for _ in range(_TRIES):
            async with self._held(owner, request.template, env) as place:
                if not await self._alive(place):
                    continue
                try:
                    done = await self._operations.python.execute(place.id, call)
                except NotRunning:  # it ended before the call reached it
                    continue
                if env is not None:
                    place.envs.add(env)
                files = await self._produced(place.id, done.files_produced)
                return StatelessResult(**done.model_dump(), files=files)
        raise PlatformError("the sandboxes for this call ended before it began", hint="ask again")

    # a place for a call

    @asynccontextmanager
    async def _held(self, owner: Owner, template: str | None, env: str | None) -> AsyncIterator[_Place]:
        """A sandbox that is this call's alone; afterwards it is emptied, or ended."""
        place = await self._given(owner, template, env)
        clean = False
        try:
            await self._enter(place, owner)
            yield place
            clean = True
        except CarrelError as error:
            clean = not isinstance(error, PlatformError)
            raise
        finally:
            if place.id:
                self._used[template] = place.used_at = time.monotonic()
            if place in self._places:
                self._background(self._empty(place) if clean and place.id else self._end(place, "used"))

    async def _given(self, owner: Owner, template: str | None, env: str | None) -> _Place:
        if self._closing:
            raise PlatformError("the server is shutting down", hint="ask again when it is back")
        waiter = _Waiter(owner, template, env, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(waiter)
        self._dispatch()
        if sum(map(len, self._waiting.values())) > self._settings.queue:
            longest = max(reversed(self._waiting.values()), key=len)
            last = longest[-1]
            self._leave(last)
            if not last.given.done():
                last.given.set_exception(self._busy("too many calls wait already"))
        try:
            async with asyncio.timeout(self._settings.wait_s):
                return await waiter.given
        except BaseException as error:
            given = waiter.given
            if given.done() and not given.cancelled() and given.exception() is None:
                self._let_go(given.result())
            self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise self._busy(f"no sandbox became free within {self._settings.wait_s:g} s") from None
            raise

    async def _enter(self, place: _Place, owner: Owner) -> None:
        """Start the sandbox, or pass the door of one that was started ahead; from now on it is the caller's."""
        fresh, place.owner = place.owner is None, owner
        request = SandboxRequest(template=place.template, labels={LABEL: "call"})
        if place.state == "starting":
            info, _ = await self._operations.deploy_or_resume(request)
            await self._started(place, info)
            place.state = "busy"
        elif fresh:
            arguments = request.model_dump(mode="json", exclude_defaults=True)
            async with self._operations.session_door("deploy_or_resume", arguments, "", place.id):
                pass

    def _dispatch(self) -> None:
        """Give what is free to those who wait, to each caller in turn."""
        while self._waiting and not self._closing:
            owner, line = next(iter(self._waiting.items()))
            waiter = line[0]
            if not waiter.given.done():
                place = self._take(waiter)
                if place is None:
                    self._make_room()
                    break
                waiter.given.set_result(place)
            line.popleft()
            del self._waiting[owner]
            if line:
                self._waiting[owner] = line
        self._measure()

    def _take(self, waiter: _Waiter) -> _Place | None:
        """Of the template: one of the caller's with the environment, one of the caller's, a spare, a new one."""
        fitting = [
            each
            for each in self._places
            if each.state == "idle" and each.template == waiter.template and each.owner in {waiter.owner, None}
        ]
        if fitting:
            place = max(fitting, key=lambda each: (waiter.env in each.envs, each.owner is not None, each.used_at))
            self._disarm(place)
            place.state = "busy"
            return place
        if len(self._places) >= self._settings.max_sandboxes:
            return None
        place = _Place(waiter.template, waiter.owner, "starting")
        self._places.add(place)
        return place

    def _make_room(self) -> None:
        """End those that nobody uses, as many as are waited for, the longest unused first."""
        ending = sum(each.state == "ending" for each in self._places)
        missing = sum(map(len, self._waiting.values())) - ending
        idle = sorted((each for each in self._places if each.state == "idle"), key=lambda each: each.used_at)
        for place in idle[: max(0, missing)]:
            place.state = "ending"
            self._background(self._end(place, "room for another call"))

    def _leave(self, waiter: _Waiter) -> None:
        line = self._waiting.get(waiter.owner)
        if line is not None and waiter in line:
            line.remove(waiter)
            if not line:
                del self._waiting[waiter.owner]
        self._measure()

    def _busy(self, why: str) -> LimitExceeded:
        return LimitExceeded(
            f"all {self._settings.max_sandboxes} sandboxes for calls without a context are busy: {why}",
            hint="ask again in a moment, or raise CARREL_ROUTER_MAX_SANDBOXES",
            retry=True,
        )

    # what becomes of a sandbox

    async def _alive(self, place: _Place) -> bool:
        try:
            box = await self._sessions.find(place.id)
        except (NotFound, NotRunning):
            return False
        if await box.provider.alive(box.handle):
            return True
        await self._sessions.lost(box)
        return False

    async def _produced(self, id: str, names: list[str]) -> dict[str, str]:
        """The contents of what a call produced, as far as it may be read and there is room."""
        files: dict[str, str] = {}
        left = MOST_RETURNED
        for name in names:
            content = bytearray()
            try:
                async with aclosing(self._operations.read_file(id, name, length=left + 1)) as stream:  # type: ignore[type-var]
                    async for part in stream:
                        content += part if isinstance(part, bytes) else b""
            except CarrelError:
                continue
            if len(content) <= left:
                files[name] = b64encode(content).decode()
                left -= len(content)
        return files

    async def _empty(self, place: _Place) -> None:
        """Make a sandbox as new: nothing runs in it, and it has what it had. One where that cannot be had is ended."""
        try:
            if place.known is not None:
                for each in (await self._operations.list_commands(place.id, SELF)).items:
                    await self._operations.delete_command(place.id, each.id, SELF)
                if await self._look(place.id, place.known) == place.known:
                    self._let_go(place)
                    return
        except CarrelError as error:
            log.info("sandbox %s could not be emptied: %s", place.id, error)
        await self._end(place, "used")

    async def _started(self, place: _Place, info: SandboxInfo) -> None:
        """A new sandbox, which nobody has used. One that does not isolate has the host's files: it is never emptied."""
        place.id = info.id
        place.known = None if info.unsafe else await self._look(info.id, None)

    async def _look(self, id: str, known: dict[str, list[int]] | None) -> dict[str, list[int]] | None:
        given = {"places": [WORKSPACE, "/tmp", HOME], "known": known, "most": MOST_LISTED}
        command = ["/usr/bin/python3", "-I", "-S", "-c", _EMPTY]
        request = CommandRequest(command=command, stdin=json.dumps(given), timeout=60, output_limit=1024 * 1024)
        done = await self._operations.run_command(id, request, SELF)
        await self._operations.delete_command(id, done.id, SELF)
        if done.exit_code != 0 or done.truncated:
            return None
        try:
            found: object = json.loads(done.stdout)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _let_go(self, place: _Place) -> None:
        """Nobody uses it now."""
        if place not in self._places:
            return
        if place.state == "starting":  # it was never started
            self._forget(place)
            return
        place.state = "idle"
        self._arm(place)
        self._dispatch()
        self._refill(place.template)

    def _arm(self, place: _Place) -> None:
        self._disarm(place)
        loop = asyncio.get_running_loop()
        place.timer = loop.call_later(self._settings.idle_s, self._idle, place)

    def _disarm(self, place: _Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None

    def _idle(self, place: _Place) -> None:
        place.timer = None
        if place.state != "idle" or place not in self._places:
            return
        recent = time.monotonic() - self._used.get(place.template, 0.0) < self._settings.idle_s
        if place.owner is None and recent:
            self._arm(place)
            return
        place.state = "ending"
        self._background(self._end(place, "idle"))

    async def _end(self, place: _Place, reason: str) -> None:
        self._disarm(place)
        place.state = "ending"
        try:
            if place.id:
                await self._sessions.terminate(place.id, reason)
        except CarrelError as error:
            log.warning("sandbox %s of the router could not be ended: %s", place.id, error)
        finally:
            self._forget(place)

    def _forget(self, place: _Place) -> None:
        self._disarm(place)
        self._places.discard(place)
        self._dispatch()

    # spares

    def _refill(self, template: str | None) -> None:
        """Start a spare where one is missing and nobody needs the room."""
        spares = sum(each.owner is None and each.template == template for each in self._places)
        room = self._settings.max_sandboxes - len(self._places)
        if self._closing or self._waiting or spares >= self._settings.spares or room < 1:
            return
        place = _Place(template, None, "starting")
        self._places.add(place)
        self._background(self._start_spare(place))

    async def _start_spare(self, place: _Place) -> None:
        request = SandboxRequest(template=place.template, labels={LABEL: "spare"})
        try:
            info, _ = await self._operations.deploy_or_resume(request, actor=SELF)
        except CarrelError as error:
            log.info("no spare sandbox could be started: %s", error)
            self._forget(place)
            return
        except BaseException:
            self._places.discard(place)
            raise
        try:
            await self._started(place, info)
        except CarrelError:
            await self._end(place, "it did not answer")
            return
        place.used_at, place.state = time.monotonic(), "idle"
        self._let_go(place)

    def _background(self, work: Coroutine[object, object, None]) -> None:
        """The server's own work: no caller's identity goes with it."""
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _measure(self) -> None:
        busy = sum(each.state != "idle" for each in self._places)
        self._metrics.router(sum(map(len, self._waiting.values())), busy, len(self._places) - busy)
