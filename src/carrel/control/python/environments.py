"""Environments: sets of Python packages that are built and stored once, and usable in every sandbox that knows their
name.

Only callers whose contexts hold or built an environment see its name; one with a label is for everybody, by the label.
However many ask, a request is resolved once and a lock is built once. An environment in use is never removed: a
context, or an ephemeral session, holds it from the attachment until the session is terminated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from carrel.config import EnvironmentSettings
from carrel.control.operations.caller import Caller
from carrel.control.python.environment_builds import Builder
from carrel.control.python.environment_checks import (
    Lock,
    Requester,
    ResolvableRequest,
    interpreter_of,
    name_of,
    requirements_of,
    wanted,
)
from carrel.control.python.environment_holds import EnvironmentHolds
from carrel.egress.index.host import host_index
from carrel.egress.plan import PackageIndex
from carrel.errors import CarrelError, Conflict, NotFound, PlatformError
from carrel.isolation.inside import ENVIRONMENTS
from carrel.models import EnvironmentInfo, EnvironmentList, EnvironmentPackage, EnvironmentRequest
from carrel.policy.rules.layers import Policy
from carrel.primitives import tasks
from carrel.primitives.cache import Cache
from carrel.store.environments import EnvironmentRecord, EnvironmentStore
from carrel.workspaces.environments import EnvironmentStorage

log = logging.getLogger("carrel.environments")

RESOLVED_S = 3600.0
"""How long a request keeps its lock before the index is asked again."""
MOST_RESOLVED = 1024
GRACE_S = 60.0
"""How long after its last use an environment that nobody holds is kept: somebody may be about to hold it."""
USED_S = 60.0
"""How old the stored time of the last use may be."""
LOOKED_S = 10.0
"""How long a new or removed interpreter of the host may go unnoticed."""
MOST_INTERPRETERS = 64
PARALLEL = 4
MOST_SAID = 1000
DAY_S = 86_400.0
EPHEMERAL = "eph-"
"""The prefix of the ids of ephemeral sessions, which have no context."""

Clean = Callable[[str | None, str], Awaitable[str]]
"""Removes the secrets of a context, or of an ephemeral sandbox, from a text."""
Say = Callable[[str], None]
T = TypeVar("T")
Records = list[EnvironmentRecord]


class SharedWork(Generic[T]):
    """Work that many callers wait for; a late caller gets the earlier progress lines too."""

    def __init__(self) -> None:
        self.task: asyncio.Task[T]
        self._said: list[str] = []
        self._listeners: set[Say] = set()

    def say(self, line: str) -> None:
        """Pass a progress line to everybody who waits."""
        if len(self._said) < MOST_SAID:
            self._said.append(line)
        for listener in list(self._listeners):
            listener(line)

    async def wait(self, say: Say) -> T:
        """Wait for the end. A caller that stops waiting does not stop the work."""
        for line in self._said:
            say(line)
        self._listeners.add(say)
        try:
            return await asyncio.shield(self.task)
        finally:
            self._listeners.discard(say)


class Environments:
    """The environments of one server. `open` it before use, `close` it while sandboxes can still be ended."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        store: EnvironmentStore,
        holds: EnvironmentHolds,
        storage: EnvironmentStorage,
        builder: Builder,
        key: bytes,
        policy_of: Callable[[str | None, str | None], Awaitable[Policy]],
        clean: Clean,
    ):
        self._settings = settings
        self._store = store
        self._holds = holds
        self._storage = storage
        self._builder = builder
        self._key = key
        self._policy_of = policy_of
        self._clean = clean
        self._known: dict[str, EnvironmentRecord] = {}
        self._answers: dict[str, str] = {}
        self._resolved: Cache[str, Lock] = Cache(MOST_RESOLVED, RESOLVED_S)
        self._resolving: dict[str, SharedWork[Lock]] = {}
        self._building: dict[str, SharedWork[EnvironmentRecord]] = {}
        self._host: Sequence[PackageIndex] | None = None
        self._interpreters: Cache[str | None, tuple[str, str]] = Cache(MOST_INTERPRETERS, LOOKED_S)
        self._gate = asyncio.Semaphore(PARALLEL)
        self.grace_s = GRACE_S

    async def open(self, *, alone: bool) -> None:
        """Read the records. If this process is `alone`, make records and disk agree, and remove unfinished builds."""
        if not alone:
            await self.read_again()
            return
        records = {record.name: record for record in await self._store.all()}
        there = set(await asyncio.to_thread(self._storage.sweep, list(records)))
        await self._store.forget(records.keys() - there)
        self._known = {name: record for name, record in records.items() if name in there}
        await self._holds.read()
        self._answers = await self._store.answers()

    async def read_again(self) -> None:
        """Read the records again: another worker has built, used or removed an environment."""
        async with self._holds.lock:
            known = {record.name: record for record in await self._store.all()}
            await self._holds.read()
            self._known, self._answers = known, await self._store.answers()

    async def close(self) -> None:
        """Cancel the builds under way."""
        works: list[SharedWork[Any]] = [*self._resolving.values(), *self._building.values()]
        await tasks.cancel(work.task for work in works)

    # finding

    def find(self, caller: Caller, name: str, holder: str | None = None) -> EnvironmentRecord:
        """Return an environment by its name or a label; `NotFound` also when it is out of the reach of the caller,
        unless `holder` has it.
        """
        found = self._known.get(name)
        if found is None:
            found = next((each for each in self._known.values() if name in each.labels), None)
        elif not self._visible(caller, found) and holder not in self._holds.of(name):
            found = None
        if found is None:
            raise NotFound(f"there is no environment '{name[:64]}'", field="env", hint="`carrel envs` shows them")
        return found

    async def had_elsewhere(self, name: str, holder: str) -> EnvironmentRequest | None:
        """Return the request that builds an environment which a context holds on another server."""
        found = await self._store.had_elsewhere(holder, name)
        if found is None:
            return None
        return EnvironmentRequest(requirements=found[0], python=".".join(found[1].split(".")[:2]))

    def known(self, name: str) -> EnvironmentRecord | None:
        """Return an environment by its name, if it exists."""
        return self._known.get(name)

    def records(self) -> Iterable[EnvironmentRecord]:
        return self._known.values()

    async def list(self, caller: Caller) -> EnvironmentList:
        """List the environments that the caller may use, the last used first."""
        async with self._holds.lock:
            await self._holds.read()
        visible = [each for each in self._known.values() if self._visible(caller, each)]
        visible.sort(key=lambda each: (-each.last_used_at, each.name))
        return EnvironmentList(items=[self.info(caller, each) for each in visible])

    def _visible(self, caller: Caller, record: EnvironmentRecord) -> bool:
        return bool(record.labels) or self._reached(caller, record)

    def _reached(self, caller: Caller, record: EnvironmentRecord) -> bool:
        """Whether the caller reaches a context that holds an environment or built it."""
        reaches = caller.identity.reaches
        if reaches(None):
            return True
        holders = {each for each in self._holds.of(record.name) if not each.startswith(EPHEMERAL)}
        return any(map(reaches, holders if record.built_by is None else {record.built_by, *holders}))

    def info(self, caller: Caller, record: EnvironmentRecord) -> EnvironmentInfo:
        """Describe an environment to the caller. The name alone would let any sandbox run it, whatever its policy: so
        an environment that the caller only knows by its label is shown by that, until it is attached.
        """
        by_name, by = self._reached(caller, record) or not record.labels, record.built_by
        return EnvironmentInfo(
            name=record.name if by_name else record.labels[0],
            path=f"{ENVIRONMENTS}/{record.name}" if by_name else "",
            hash=record.hash,
            labels=record.labels,
            python=record.python,
            requirements=record.requirements,
            packages=[EnvironmentPackage.model_validate(each) for each in record.packages],
            imports=record.imports,
            size=record.size,
            created_at=datetime.fromtimestamp(record.created_at, UTC),
            last_used_at=datetime.fromtimestamp(record.last_used_at, UTC),
            built_by=by if by is not None and caller.identity.reaches(by) else None,
            in_use=bool(self._holds.of(record.name)),
        )

    # making

    async def ensure(
        self, request: EnvironmentRequest, asker: Requester, say: Say | None = None, *, as_before: bool = False
    ) -> EnvironmentRecord:
        """Return the environment of a request, built now if there is none. With `as_before` the one that the same
        request resolved to before under the same policy, even if an index has newer packages.
        """
        tell = say or _silently
        requirements = requirements_of(request.requirements)
        python = await self._interpreter(request.python)
        if self._host is None:
            self._host = await asyncio.to_thread(host_index)
        policy = await self._policy_of(asker.context_id, asker.template)
        asked = wanted(requirements, python, policy, self._host, request.index)
        before = self._known.get(self._answers.get(asked.key, ""))
        if as_before and before is not None and self._storage.has(before.name):
            return before
        try:
            lock = await self._lock(asked, asker, tell)
            record = await self._ready(asked, lock, asker, tell)
        except TimeoutError:
            raise PlatformError("the environment could not be built in time", hint="ask again") from None
        if self._answers.get(asked.key) != record.name:
            await self._store.answered(asked.key, record.name)
            self._answers[asked.key] = record.name
        return record

    async def _interpreter(self, version: str | None) -> tuple[str, str]:
        known = self._interpreters.get(version)
        if known is None:
            known = await asyncio.to_thread(interpreter_of, version)
            self._interpreters.put(version, known)
        return known

    async def _lock(self, asked: ResolvableRequest, asker: Requester, say: Say) -> Lock:
        key = asked.key
        known = self._resolved.get(key)
        if known is not None:
            return known
        work = self._resolving.get(key)
        if work is None:
            work = self._resolving[key] = SharedWork()
            work.task = self._start(self._resolve(asked, asker, work), self._resolving, key)
        return await work.wait(say)

    async def _resolve(self, asked: ResolvableRequest, asker: Requester, work: SharedWork[Lock]) -> Lock:
        lock = await self._with_words(asker, work, lambda say: self._builder.resolve(asked, asker, say))
        self._resolved.put(asked.key, lock)
        return lock

    async def _ready(self, asked: ResolvableRequest, lock: Lock, asker: Requester, say: Say) -> EnvironmentRecord:
        hash = asked.hash(lock)
        name = name_of(self._key, hash)
        work = self._building.get(name)
        if work is None:
            async with self._holds.lock:
                known = self._known.get(name)
                if known is not None and self._storage.has(name):  # one stat: a thread would cost more
                    return known
            work = self._building.get(name)
        if work is None:
            work = self._building[name] = SharedWork()
            work.task = self._start(self._build(asked, lock, asker, name, hash, work), self._building, name)
        return await work.wait(say)

    async def _build(
        self,
        asked: ResolvableRequest,
        lock: Lock,
        asker: Requester,
        name: str,
        hash: str,
        work: SharedWork[EnvironmentRecord],
    ) -> EnvironmentRecord:
        if await asyncio.to_thread(self._storage.free) * 100 < self._settings.keep_free_percent:
            await self.evict()
        built = await self._with_words(asker, work, lambda say: self._builder.build(asked, lock, asker, say))
        now = time.time()
        record = EnvironmentRecord(
            name,
            hash,
            built.python,
            asked.interpreter,
            list(asked.requirements),
            built.packages,
            built.imports,
            built.draft.size,
            now,
            now,
            asker.context_id,
        )
        await asyncio.to_thread(self._storage.sync, built.draft)
        async with self._holds.lock:
            await asyncio.to_thread(self._storage.place, built.draft, name)
            await self._store.put(record)  # if killed before this, the next start removes the files
            self._known[name] = record
        return record

    async def _with_words(self, asker: Requester, work: SharedWork[Any], act: Callable[[Say], Awaitable[T]]) -> T:
        """Run work whose progress lines are shown only after secrets are removed."""
        lines: asyncio.Queue[str | None] = asyncio.Queue(MOST_SAID)

        def hear(line: str) -> None:
            with suppress(asyncio.QueueFull):
                lines.put_nowait(line)

        async def tell() -> None:
            while (line := await lines.get()) is not None:
                work.say(await self._clean(asker.name, line))

        telling = asyncio.get_running_loop().create_task(tell())
        try:
            async with self._gate:
                return await act(hear)
        except CarrelError as error:
            error.detail = await self._clean(asker.name, error.detail)
            error.args = (error.detail,)
            raise
        finally:
            await lines.put(None)
            await telling

    def _start(self, work: Awaitable[T], running: dict[str, SharedWork[T]], key: str) -> asyncio.Task[T]:
        async def run() -> T:
            try:
                return await work
            finally:
                running.pop(key, None)

        task = asyncio.get_running_loop().create_task(run())
        task.add_done_callback(_heard)
        return task

    # using

    async def hold(self, find: Callable[[], Awaitable[EnvironmentRecord]], holder: str) -> EnvironmentRecord:
        """Return the environment that `find` returns, held by a context or an ephemeral session from now on."""
        for _ in range(3):
            record = await find()
            async with self._holds.lock:
                if record.name not in self._known:
                    continue  # it was removed meanwhile
                now = time.time()
                record = self._known[record.name]
                if holder not in self._holds.of(record.name) or now - record.last_used_at > USED_S:
                    if not await self._holds.hold(record.name, holder, now):
                        self._known.pop(record.name, None)
                        continue  # another worker removed it meanwhile
                    record = self._known[record.name] = replace(record, last_used_at=now)
                return record
        raise PlatformError("the environment is removed as often as it is built", hint="the disk may be full")

    async def of(self, caller: Caller, holder: str) -> EnvironmentList:
        """List the environments that a context, or an ephemeral session, holds."""
        names = await self._store.holds(holder)
        return EnvironmentList(items=[self.info(caller, self._known[name]) for name in names if name in self._known])

    async def release(self, caller: Caller, name: str, holder: str) -> None:
        """Release an environment; the sandbox can still use it while it exists."""
        record = self.find(caller, name, holder)
        async with self._holds.lock:
            if not await self._holds.release(record.name, holder):
                raise NotFound(f"'{holder}' does not have the environment '{name}'", field="env")

    async def label(self, record: EnvironmentRecord, label: str) -> EnvironmentRecord:
        """Give an environment a label, and take it from any other. Counts as a use."""
        if label in self._known:
            raise Conflict(f"'{label}' is the name of an environment", field="name", hint="choose another label")
        async with self._holds.lock:
            if record.name not in self._known:
                raise Conflict("the environment was removed meanwhile", field="name", hint="build it again")
            now = time.time()
            await self._store.label(label, record.name)
            await self._store.used(record.name, now)
            for each in list(self._known.values()):
                if label in each.labels:
                    self._known[each.name] = replace(each, labels=[other for other in each.labels if other != label])
            known = self._known[record.name]
            labels = sorted({*known.labels, label})
            self._known[record.name] = replace(known, labels=labels, last_used_at=now)
            return self._known[record.name]

    # removing

    async def remove(self, caller: Caller, name: str) -> None:
        """Remove an environment; `Conflict` when a session holds it."""
        record = self.find(caller, name)
        async with self._holds.lock:
            await self._holds.read()
            if held := self._holds.of(record.name):
                raise Conflict(
                    f"the environment is in use by {', '.join(sorted(held)[:5])}",
                    field="env",
                    hint="terminate those first",
                )
            gone = await self._retire(record.name)
        await self._delete(gone)

    async def evict(self) -> int:
        """Remove environments that nobody holds and that are too old, or take too much space; return how many."""
        removed = 0
        for record in sorted(self._known.values(), key=lambda each: each.last_used_at):
            async with self._holds.lock:
                now = time.time()
                record = self._known.get(record.name, record)  # noqa: PLW2901 - it may have been used meanwhile
                if now - record.last_used_at < self.grace_s or not await self._too_much(record, now):
                    continue
                await self._holds.read()
                if self._holds.of(record.name):
                    continue
                gone = await self._retire(record.name)
            log.info("environment %s was not used for a long time and is removed", record.name)
            await self._delete(gone)
            removed += 1
        return removed

    async def _too_much(self, record: EnvironmentRecord, now: float) -> bool:
        if now - record.last_used_at > self._settings.ttl_days * DAY_S:
            return True
        if sum(each.size for each in self._known.values()) > self._settings.max_mb << 20:
            return True
        return await asyncio.to_thread(self._storage.free) * 100 < self._settings.keep_free_percent

    async def _retire(self, name: str) -> str | None:
        await self._store.forget([name])
        self._known.pop(name, None)
        self._holds.holders.pop(name, None)
        self._answers = {key: answer for key, answer in self._answers.items() if answer != name}
        return await asyncio.to_thread(self._storage.retire, name)

    async def _delete(self, path: str | None) -> None:
        if path is not None:
            try:
                await asyncio.to_thread(self._storage.remove, path)
            except (CarrelError, OSError) as error:
                log.warning("an environment could not be deleted, which is tried again at the next start: %s", error)


def _silently(_line: str) -> None:
    return


def _heard(task: asyncio.Task[T]) -> None:
    if not task.cancelled():
        task.exception()  # mark it as retrieved: nobody may wait for it
