"""Where a request about a session is answered: asks the database for the owner, and remembers it for seconds.

Reads records; forwards nothing. `placement` decides.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from carrel.control.nodes.peers import Peer, Peers, unreachable
from carrel.control.nodes.placement import HERE, Here, Place, Silent, There, choose, place_of
from carrel.control.nodes.registry import Nodes
from carrel.control.nodes.workers import server_of
from carrel.control.sessions.live import LiveSandboxes
from carrel.errors import NodeUnreachable, RunsElsewhere
from carrel.primitives.cache import Cache
from carrel.store.nodes import Holding, NodeStore
from carrel.store.snapshots import SnapshotStore

KNOWN_S, MOST_KNOWN = 10.0, 16_384
"""How long the owner of a session is remembered. A server that is asked in vain says so, so this may be out of date."""
MAX_NAME = 128
_OF_ONE_SERVER = ("workspace_path", "host_paths", "image")
"""Fields of a start that mean something on one server: folders, and images that may have been made there."""


class Routing:
    """Finds the server that answers a request."""

    def __init__(self, nodes: Nodes, peers: Peers, store: NodeStore, snapshots: SnapshotStore, live: LiveSandboxes):
        self._nodes = nodes
        self._peers = peers
        self._store = store
        self._snapshots = snapshots
        self._live = live
        self._owners: Cache[str, str] = Cache(MOST_KNOWN, KNOWN_S)

    @property
    def name(self) -> str:
        """The name of this server."""
        return self._nodes.name

    def is_worker(self, name: str) -> bool:
        """Whether a node is another worker of this server."""
        return self._nodes.worker.index_of(name) is not None

    async def require_member(self, name: str) -> None:
        """Raise `Unauthorized` unless a server is on this database and not revoked."""
        await self._nodes.require_member(name)

    async def find(self, name: str, *, forwarded: bool, readable: bool) -> Here | There:
        """Return where a session or context is. `forwarded`: another server believes that it is here. `readable`: its
        record is enough for the answer, so a silent owner is not needed.

        Raises `NodeUnreachable` while a silent server has its lease, and if nothing can be forwarded to the owner.
        """
        known = self._owners.get(name)
        if known is not None and not forwarded and await self._nodes.find(known) is not None:
            return There(known)
        place = await self._resolved(await self._store.holding(name) if len(name) <= MAX_NAME else None)
        if isinstance(place, Silent):
            if readable and not forwarded:
                return HERE
            raise _silent(place)
        if isinstance(place, There):
            self._owners.put(name, place.node)
        return place

    async def start(self, document: dict[str, Any], *, forwarded: bool) -> Here | There:
        """Return where the sandbox of a request starts, or runs already. Raises what `find` raises."""
        context, provider = document.get("context_id"), document.get("provider")
        if not isinstance(context, str) or not 0 < len(context) <= MAX_NAME:
            context = None
        elif self._live.find(context) is not None:
            return HERE
        holding = None if context is None else await self._store.holding(context, ended=True)
        place = await self._resolved(holding)
        if isinstance(place, Silent):
            raise _silent(place)
        if holding is not None and holding.owner is not None:
            return place
        if forwarded:  # the sender chose this server
            return HERE
        if document.get("workspace_path") or (holding is not None and holding.folder):
            return await self._first_worker() if isinstance(place, Here) else place
        files = None if holding is None else holding.node
        bound = any(document.get(each) for each in _OF_ONE_SERVER)
        if bound:
            if isinstance(place, There) or self._nodes.worker.count == 1:
                return place
            files = self._nodes.worker.server
        candidates = self._nodes.candidates()
        holders = [each for each in candidates.values() if server_of(each.name) == files]
        roomy = not holders or any(each.has_room for each in holders)
        movable = roomy or (not bound and await self._is_archived(context, holding))
        wanted = provider if isinstance(provider, str) and provider != "auto" else None
        chosen = choose(candidates, self._nodes.name, files=files, movable=movable, provider=wanted)
        if chosen == self._nodes.name:
            return HERE
        self._nodes.placed(chosen)
        return There(chosen)

    async def _first_worker(self) -> Here | There:
        """Return where folders of this server are guarded."""
        worker = self._nodes.worker
        first = worker.names[0]
        return There(first) if not worker.first and await self._nodes.find(first) is not None else HERE

    def starting(self) -> AbstractContextManager[None]:
        """Count a sandbox that is about to start here."""
        return self._nodes.starting()

    async def peer(self, node: str) -> Peer | None:
        """Return the connections to another server; None if it does not answer any more."""
        record = await self._nodes.find(node)
        return None if record is None else self._peers.of(record)

    def suspect(self, peer: Peer) -> None:
        """Record that no connection to a server could be opened."""
        self._nodes.suspect(peer.record.name)

    def forget(self, name: str) -> None:
        """Forget the owner of a session: it was not there."""
        self._owners.pop(name)

    async def refresh(self) -> None:
        """Look which servers answer."""
        await self._nodes.beat()

    async def _resolved(self, holding: Holding | None) -> Place:
        alive = set() if holding is None else await self._alive(holding)
        place = place_of(holding, self._nodes.name, alive)
        if isinstance(place, Silent) and (obstacle := self._nodes.why_not(place.node)) is not None:
            raise NodeUnreachable(
                f"server '{place.node}' has this session, and the request cannot be forwarded to it: {obstacle}",
                hint=f"ask server '{place.node}' itself, or let the operator see `carrel nodes`",
                node=place.node,
                retry=False,
            )
        return place

    async def _alive(self, holding: Holding) -> set[str]:
        """Return the other servers and workers that answer, as far as they matter for a session. A worker that has died
        is waited for: another process takes its place within a second.
        """
        worker, alive, owner = self._nodes.worker, set[str](), holding.owner
        if owner is not None and owner != worker.name:
            if worker.answers(owner) is False and await worker.returned(owner):
                await self._nodes.beat()
            if await self._nodes.find(owner) is not None:
                alive.add(owner)
        node = holding.node
        if node is not None and (node != worker.server or holding.folder):
            names = self._nodes.of_server(node)
            alive |= {name for name in names if name != worker.name and await self._nodes.find(name) is not None}
        return alive

    async def _is_archived(self, context: str | None, holding: Holding | None) -> bool:
        """Whether the archive has the newest files of a context."""
        if context is None or holding is None or not holding.released:
            return False
        snapshots = await self._snapshots.all_ready(context)
        return bool(snapshots) and snapshots[0].archived


def elsewhere(node: str, why: str) -> RunsElsewhere:
    """Return the answer to a server that forwarded a request to the wrong one."""
    return RunsElsewhere(
        f"server '{node}' has this session, and a request is forwarded only once" + (f": {why}" if why else ""),
        field="id",
        hint=f"ask server '{node}'",
        node=node,
    )


def _silent(place: Silent) -> Exception:
    return unreachable(place.node, "has this session and does not answer", seconds=place.seconds)
