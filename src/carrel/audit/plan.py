"""Computes what one transaction of the audit log writes: records, due heads, and holds, which say what to check after a
crash. Pure except for the signature: may run in another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from carrel.audit.keys import SignedHead, SigningKey
from carrel.audit.records import AuditEntry, Ending, RecordRow, Type, genesis, row
from carrel.models.events import EventDraft

if TYPE_CHECKING:
    from carrel.audit.log import Ticket


Tip = tuple[int, bytes, int]
"""The end of a chain: seq and hash of its last record, seq of its newest head."""


class Hold(NamedTuple):
    """The state in which a server left a chain. Clean: its last record there is signed and all its operations have
    ended. Else every operation without an end has a seq of at least `open_from`.
    """

    chain: str
    node: str
    open_from: int
    clean: bool


Batch = tuple[Sequence[RecordRow], Sequence[SignedHead], Sequence[Hold], Sequence[EventDraft]]

EventOf = Callable[[str, Type, AuditEntry, Ending | None, int | None, float], Sequence[EventDraft]]
"""Returns the events that are written in the transaction of a record: from the server, the type of the record, its
facts, the seq of its operation and the time.
"""


@dataclass(slots=True)
class Item:
    """A record that waits to be written; without a chain, only a caller that waits for the records before it."""

    type: Type
    entry: AuditEntry
    ending: Ending | None
    at: float
    ticket: Ticket | None = None
    ref: int | None = None
    written: asyncio.Future[None] | None = None
    stored: bool = False
    """Whether it is in the database although that was not known at first."""


@dataclass(slots=True)
class ChainEnd:
    """The known end of a chain. `held`: the database has a hold that is not clean."""

    seq: int
    hash: bytes
    head_seq: int
    held: bool = False


class TransactionPlan:
    """One transaction. `build` does the work; the log uses `chains` and `seqs` once it is committed.

    `chains` are copies of known chains; `opened` are the open operations of every chain; `taken` are the servers whose
    operations in a chain have all been ended.
    """

    def __init__(
        self,
        key: SigningKey,
        node: str,
        chains: dict[str, ChainEnd],
        opened: Mapping[str, Collection[int]],
        items: Sequence[Item],
        seal: Collection[str],
        taken: Mapping[str, Collection[str]],
        head_records: int,
        now: float,
        event_of: EventOf,
    ):
        self.chains = chains
        self.seqs: dict[int, int] = {}
        self._key = key
        self._node = node
        self._items = items
        self._seal = seal
        self._taken = taken
        self._head_records = head_records
        self._now = now
        self._event_of = event_of
        self._events: list[EventDraft] = []
        names = {item.entry.chain for item in items} | set(seal)
        self._open = {name: set(opened.get(name, ())) for name in names}

    def still(self, name: str) -> set[int]:
        """Return the operations of a chain that are open after this transaction."""
        return self._open[name]

    def build(self, tips: Mapping[str, Tip]) -> Batch:
        """Return what to write, given the ends of chains that were not known before."""
        for name, (seq, hashed, head_seq) in tips.items():
            self.chains[name] = ChainEnd(seq, hashed if seq else genesis(name), head_seq)
        self._events = []
        rows = [self._row(item) for item in self._items]
        heads: list[SignedHead] = []
        holds: list[Hold] = []
        written = {item.entry.chain for item in self._items}
        for name, chain in self.chains.items():
            fresh = chain.seq - chain.head_seq
            signs = fresh > 0 and (name in self._seal or fresh >= self._head_records)
            if signs:
                heads.append(SignedHead.signed(self._key, name, chain.seq, chain.hash.hex(), fresh, self._now))
                chain.head_seq = chain.seq
            # Written with the first record after a head and with the next head, not in between: after a crash all
            # records from `open_from` on are checked.
            if (chain.held and signs) or (not chain.held and name in written) or name in self._taken:
                still = self._open[name]
                clean = not still and chain.head_seq == chain.seq
                chain.held = not clean
                holds.append(Hold(name, self._node, min(still, default=chain.seq + 1), clean))
            others = (node for node in self._taken.get(name, ()) if node != self._node)
            holds += [Hold(name, node, chain.seq + 1, clean=True) for node in others]
        return rows, heads, holds, self._events

    def _row(self, item: Item) -> RecordRow:
        name = item.entry.chain
        chain, ref = self.chains[name], item.ref
        if item.type == "end" and item.ticket is not None:
            ref = item.ticket.seq or self.seqs[id(item.ticket)]
        made = row(
            item.type,
            item.entry,
            item.ending,
            seq=chain.seq + 1,
            at=item.at,
            node=self._node,
            before=chain.hash,
            ref=ref,
        )
        chain.seq, chain.hash = made.seq, made.hash
        operation = made.seq if item.type == "begin" else ref
        self._events += self._event_of(self._node, item.type, item.entry, item.ending, operation, item.at)
        if item.type == "begin":
            self.seqs[id(item.ticket)] = made.seq
            self._open[name].add(made.seq)
        elif ref is not None:
            self._open[name].discard(ref)
        return made
