"""A session as the store has it, and a provider that only promises: for what decides before anything is made."""

from __future__ import annotations

from carrel.models import Limits, Network, State, Trust
from carrel.providers.base import Capability, Handle, Launch, Provider
from carrel.store import SessionRecord

SESSION = SessionRecord(
    id="sbx-1",
    context_id="c",
    ephemeral=False,
    state=State.RUNNING,
    provider="namespace",
    isolation_level=1,
    unsafe=False,
    trust=Trust.MEDIUM,
    network=Network.NONE,
    limits=Limits(),
    created_at=1.0,
    last_activity_at=2.0,
)


class Promising(Provider):
    """Has capabilities, and is never asked for more."""

    name, isolation_level = "namespace", 1

    def __init__(self, *promised: Capability):
        self._promised = frozenset(promised)

    def capabilities(self) -> frozenset[Capability]:
        return self._promised

    def missing(self) -> str | None:
        return None

    async def start(self, launch: Launch) -> Handle:
        raise AssertionError

    async def alive(self, handle: Handle) -> bool:
        raise AssertionError

    async def remove(self, handle: Handle) -> None:
        raise AssertionError
