"""Runs Python calls without a context, each in a sandbox that the routing table chooses.

A sandbox runs one call at a time, and only ever for one caller: it is emptied after each call, after the answer is
sent, and ended if emptying fails. The table follows events of the sandboxes; nothing polls.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress

from carrel.config import RouterSettings
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.operations.operations import Operations, OwnOperations
from carrel.control.python.calls import PythonOperations
from carrel.control.python.stateless_callers import MemoryUse, Owner, PooledSandbox, RoutingTable, WaitingCall
from carrel.control.python.template_packages import TemplatePackages
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.owners import STATELESS
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.bundles import Large, contents
from carrel.errors import CarrelError, LimitExceeded, NotFound, NotRunning, PlatformError
from carrel.metrics import OK, Metrics, outcome_of
from carrel.models import ExecuteRequest, SandboxInfo, SandboxRequest, StatelessRequest, StatelessResult
from carrel.models.operations import DEPLOY_OR_RESUME
from carrel.primitives import tasks

log = logging.getLogger("carrel.router")

MOST_RETURNED = 8 * 1024 * 1024
"""Bytes of produced files that a result contains; further files are only named."""
Put = Callable[[str], Awaitable[None]]
"""Puts files into a sandbox."""
HELD_S = 300.0
"""How long the transfer of files to or from a sandbox may take."""
SLOW_S = 0.05
"""How long a call waits for a sandbox that is being emptied before it takes a new one."""
_TRIES = 3


class StatelessPool:
    """The sandboxes for calls without a context."""

    def __init__(
        self,
        settings: RouterSettings,
        sessions: Sessions,
        operations: Operations,
        own: OwnOperations,
        python: PythonOperations,
        packages: TemplatePackages,
        metrics: Metrics,
    ):
        self.table = RoutingTable(settings)
        self._sessions = sessions
        self._operations = operations
        self._own = own
        self._python = python
        self._packages = packages
        self._metrics = metrics
        self._given: dict[WaitingCall, asyncio.Future[PooledSandbox]] = {}
        self._timers: dict[PooledSandbox, asyncio.TimerHandle] = {}
        self._used: dict[str | None, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def _settings(self) -> RouterSettings:
        return self.table.settings

    async def open(self) -> None:
        """End the sandboxes that the previous process left."""
        for box in self._sessions.live():
            if box.record.ephemeral and STATELESS in box.record.labels:
                await self._sessions.terminate(OWN_WORK, box.record.id, "its server is gone")

    async def close(self) -> None:
        """End all waiting. The sandboxes end with the sessions."""
        self._closing = True
        for wish, future in self._given.items():
            self.table.leave(wish)
            if not future.done():
                future.set_exception(PlatformError("the server is shutting down"))
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await tasks.cancel(self._tasks)

    def _ended(self, box: LiveSandbox) -> None:
        """Remove a sandbox that is about to end, for whatever reason."""
        for place in [each for each in self.table.places if each.id == box.record.id]:
            self._forget(place)

    async def run(self, caller: Caller, request: StatelessRequest) -> StatelessResult:
        """Run code in some sandbox. `LimitExceeded` when none becomes free in time."""
        async with self.running(caller, request) as (sandbox, result):
            return result.model_copy(update={"files": await self._produced(caller, sandbox, result.files_produced)})

    @asynccontextmanager
    async def running(
        self, caller: Caller, request: StatelessRequest, put: Put | None = None
    ) -> AsyncIterator[tuple[str, StatelessResult]]:
        """Run code in some sandbox, after `put` has put files into it. The sandbox stays for the block, with the files
        that the code produced; nobody else uses it meanwhile.
        """
        outcome = OK
        try:
            async with self._ran(caller, request, put) as (place, result):
                yield place.id, result
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._metrics.routed(outcome)

    @asynccontextmanager
    async def _ran(
        self, caller: Caller, request: StatelessRequest, put: Put | None
    ) -> AsyncIterator[tuple[PooledSandbox, StatelessResult]]:
        identity = caller.identity
        env = request.env_name
        if request.requirements is not None:
            env = json.dumps([sorted(request.requirements), request.python_index])
        call = ExecuteRequest(language="python", **request.model_dump(exclude={"template"}, exclude_defaults=True))
        for _ in range(_TRIES):
            async with self._held(caller, (identity.subject, identity.namespace), request.template, env) as place:
                if not await self._alive(place):
                    continue
                if put is not None:
                    with self._in_time(place):
                        await put(place.id)
                try:
                    done = await self._python.execute(caller, place.id, call)
                except NotRunning:  # the sandbox ended before the call reached it
                    if put is not None:
                        break  # the files were a stream, which cannot be read twice
                    continue
                if env is not None:
                    place.envs.add(env)
                with self._in_time(place):
                    yield place, StatelessResult(**done.model_dump())
                return
        raise PlatformError("the sandboxes for this call ended before it began", hint="ask again")

    @contextmanager
    def _in_time(self, place: PooledSandbox) -> Iterator[None]:
        """End the sandbox if a transfer of files in the block takes too long: other calls wait for it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(HELD_S, lambda: self._background(self._end(place, "its files took too long")))
        try:
            yield
        finally:
            timer.cancel()

    # getting a sandbox

    @asynccontextmanager
    async def _held(
        self, caller: Caller, owner: Owner, template: str | None, env: str | None
    ) -> AsyncIterator[PooledSandbox]:
        """Hold a sandbox for one call; afterwards it is emptied, or ended."""
        place = await self._wait(owner, template, env)
        clean = False
        try:
            await self._enter(caller, place, owner)
            yield place
            clean = True
        except CarrelError as error:
            clean = not isinstance(error, PlatformError)
            raise
        finally:
            if place.id:
                self._used[template] = place.used_at = time.monotonic()
            if place in self.table.places:
                reuse = clean and place.reusable
                place.state = "emptying" if reuse else "ending"
                self._background(self._empty(place) if reuse else self._end(place, "used"))

    async def _wait(self, owner: Owner, template: str | None, env: str | None) -> PooledSandbox:
        """Wait until a sandbox is given to the call."""
        if self._closing:
            raise PlatformError("the server is shutting down", hint="ask again when it is back")
        wish = self.table.ask(owner, template, env)
        future: asyncio.Future[PooledSandbox] = asyncio.get_running_loop().create_future()
        self._given[wish] = future
        self._turn()
        try:
            async with asyncio.timeout(self._settings.wait_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._let_go(future.result())
            self.table.leave(wish)
            self._measure()
            if isinstance(error, TimeoutError):
                raise self._busy(f"no sandbox became free within {self._settings.wait_s:g} s") from None
            raise
        finally:
            del self._given[wish]

    def _turn(self) -> None:
        """Carry out the moves of the table."""
        if self._closing:
            return
        moves = self.table.match()
        unwanted: list[PooledSandbox] = []
        for wish, place in moves.given:
            self._disarm(place)
            if self._given[wish].done():  # its caller has just gone
                unwanted.append(place)
            else:
                self._given[wish].set_result(place)
        for wish in moves.refused:
            if not self._given[wish].done():
                self._given[wish].set_exception(self._busy("too many calls wait already"))
        for place in moves.to_end:
            self._background(self._end(place, "room for another call"))
        self._measure()
        for place in unwanted:
            self._let_go(place)

    def _busy(self, why: str) -> LimitExceeded:
        return LimitExceeded(
            f"all {self._settings.max_sandboxes} sandboxes for calls without a context are busy: {why}",
            hint="ask again in a moment, or raise CARREL_ROUTER_MAX_SANDBOXES",
            retry=True,
        )

    # the life of a sandbox

    async def _enter(self, caller: Caller, place: PooledSandbox, owner: Owner) -> None:
        """Start the sandbox, or admit the use of a spare; from now on it is the caller's."""
        request = SandboxRequest(template=place.template, labels={STATELESS: "call"})
        if place.state == "starting":
            info, _ = await self._operations.deploy_or_resume(caller, request)
            await self._started(place, info)
            place.state = "busy"
        elif not place.entered:
            arguments = request.model_dump(mode="json", exclude_defaults=True)
            async with self._operations.admit(caller, DEPLOY_OR_RESUME, arguments, place.id):
                pass
        place.entered = True

    async def _alive(self, place: PooledSandbox) -> bool:
        try:
            box = await self._sessions.find(place.id)
        except (NotFound, NotRunning):
            return False
        if await box.provider.alive(box.handle):
            box.only_for, box.asks_as = place.owner, json.dumps(["stateless", place.owner, place.template])
            return True
        await self._sessions.lost(box)
        return False

    async def _produced(self, caller: Caller, id: str, names: list[str]) -> dict[str, str]:
        """Return the contents of the files that a call produced, as far as they may be read and fit."""
        files: dict[str, str] = {}
        left = MOST_RETURNED
        async with aclosing(contents(caller, self._operations, id, names)) as found:
            async for name, each in found:
                if isinstance(each, CarrelError) or (len(each) if isinstance(each, bytes) else each.size) > left:
                    continue
                content = each if isinstance(each, bytes) else await _whole(each)
                if content is not None:
                    files[name] = b64encode(content).decode()
                    left -= len(content)
        return files

    async def _started(self, place: PooledSandbox, info: SandboxInfo) -> None:
        """Register a new sandbox. One that does not isolate has the files of the host: it is never emptied."""
        place.id = info.id
        (await self._sessions.find(info.id)).on_end.append(self._ended)
        if not info.unsafe:
            with suppress(NotFound):  # its zygote is from an older carrel without this route
                await self._look(place)

    async def _look(self, place: PooledSandbox) -> None:
        """Empty a sandbox; the first call records its first state."""
        found = await self._own.empty(OWN_WORK, place.id)
        place.reusable, place.load = found.clean, MemoryUse(found.memory_bytes)
        if not found.clean:
            log.info("sandbox %s is not in its first state: %s", place.id, found.reason)

    async def _empty(self, place: PooledSandbox) -> None:
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._slow, place)
        try:
            await self._look(place)
        except CarrelError as error:
            place.reusable = False
            log.info("sandbox %s could not be emptied: %s", place.id, error)
        finally:
            slow.cancel()
        place.slow = False
        if place.reusable:
            self._let_go(place)
        else:
            await self._end(place, "used")

    def _slow(self, place: PooledSandbox) -> None:
        place.slow = True
        self._turn()

    def _let_go(self, place: PooledSandbox) -> None:
        """Mark a sandbox as idle."""
        if place not in self.table.places:
            return
        if place.state == "starting":  # it was not started
            self._forget(place)
            return
        place.state = "idle"
        self._arm(place)
        self._turn()
        self._refill(place.template)

    def _arm(self, place: PooledSandbox) -> None:
        self._disarm(place)
        loop = asyncio.get_running_loop()
        self._timers[place] = loop.call_later(self._settings.idle_s, self._rested, place)

    def _disarm(self, place: PooledSandbox) -> None:
        timer = self._timers.pop(place, None)
        if timer is not None:
            timer.cancel()

    def _rested(self, place: PooledSandbox) -> None:
        """End a sandbox that was idle for long; keep a spare of a template in use."""
        del self._timers[place]
        if place.state != "idle" or place not in self.table.places:
            return
        recent = time.monotonic() - self._used.get(place.template, 0.0) < self._settings.idle_s
        if place.owner is None and recent:
            self._arm(place)
            return
        self._background(self._end(place, "idle"))

    async def _end(self, place: PooledSandbox, reason: str) -> None:
        self._disarm(place)
        place.state = "ending"
        try:
            if place.id:
                await self._sessions.terminate(OWN_WORK, place.id, reason)
        except CarrelError as error:
            log.warning("sandbox %s of the router could not be ended: %s", place.id, error)
        finally:
            self._forget(place)

    def _forget(self, place: PooledSandbox) -> None:
        self._disarm(place)
        self.table.forget(place)
        self._turn()

    # spares

    def _refill(self, template: str | None) -> None:
        place = None if self._closing else self.table.spare(template)
        if place is not None:
            self._background(self._start_spare(place))

    async def _start_spare(self, place: PooledSandbox) -> None:
        request = SandboxRequest(template=place.template, labels={STATELESS: "spare"})
        try:
            info, _ = await self._own.deploy_or_resume(OWN_WORK, request)
        except CarrelError as error:
            log.info("no spare sandbox could be started: %s", error)
            self._forget(place)
            return
        except BaseException:
            self.table.forget(place)
            raise
        try:
            await self._started(place, info)
            await self._packages.ready(await self._sessions.find(place.id))
        except CarrelError as error:
            log.info("no spare sandbox of template %s: %s", place.template, error)
            await self._end(place, "it was not ready")
            return
        place.used_at, place.state = time.monotonic(), "idle"
        self._let_go(place)

    def _background(self, work: Coroutine[object, object, None]) -> None:
        """Run work of the server in a task that does not belong to the approved run of a caller."""
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _measure(self) -> None:
        idle = self.table.idle
        self._metrics.router(self.table.waiting, len(self.table.places) - idle, idle, self.table.memory_bytes)


async def _whole(file: Large) -> bytes | None:
    """Return the content of a file; None when it cannot be read to its end."""
    try:
        return b"".join([piece async for piece in file.stream if isinstance(piece, bytes)])
    except CarrelError:
        return None
