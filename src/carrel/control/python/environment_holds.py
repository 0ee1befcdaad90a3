"""Which contexts use which environment. A context, or an ephemeral session, holds an environment until it releases it
or ends.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from carrel.control.sessions.attachments import Attachment, Fork
from carrel.primitives.process_locks import LocksOf
from carrel.store.environments import EnvironmentStore


class EnvironmentHolds(Attachment):
    """The holders of the environments of one server. Change or rely on `holders` only while `lock` is held."""

    def __init__(self, store: EnvironmentStore, locks: LocksOf):
        self._store = store
        self._being_forked: set[str] = set()
        self._locks = locks
        self.holders: dict[str, set[str]] = {}
        """By the name of the environment."""

    @property
    def lock(self) -> AbstractAsyncContextManager[object]:
        """The lock on the environments of this server."""
        return self._locks("environments")

    async def read(self) -> None:
        """Read the holders again: sessions may have ended, here or on another server."""
        self.holders = await self._store.held(self._being_forked)

    def of(self, name: str) -> set[str]:
        return self.holders.get(name, set())

    async def hold(self, name: str, holder: str, at: float) -> bool:
        """Record that an environment is held, and was used at that time; False if there is no such environment."""
        if not await self._store.used(name, at, holder):
            return False
        self.holders.setdefault(name, set()).add(holder)
        return True

    async def release(self, name: str, holder: str) -> bool:
        """Release an environment; return whether it was held."""
        # Before the store: a holder that is still in memory would not be stored again.
        self.of(name).discard(holder)
        return await self._store.release(holder, name)

    async def fork(self, fork: Fork) -> None:
        """Let a fork hold the environments of its origin, before it has a session: its virtual environment may be based
        on one.
        """
        fork.finished.callback(self._being_forked.discard, fork.context_id)
        fork.undo.push_async_callback(self._release_all, fork.context_id)
        async with self.lock:
            self._being_forked.add(fork.context_id)
            await self._store.copy_uses(fork.origin, fork.context_id)
            for holders in self.holders.values():
                if fork.origin in holders:
                    holders.add(fork.context_id)

    async def _release_all(self, holder: str) -> None:
        async with self.lock:
            for name in await self._store.holds(holder):
                await self.release(name, holder)
