"""Writes the accesses that the egress process sends to the audit log and to the metrics.

A connection that lasts is written when it opens and again when it ends; a short or refused one is written once. The
buffer and its timer are in the egress process: batches are written here as soon as they arrive, and then acknowledged.
Those that arrive during a write are written together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from carrel.audit import AuditLog
from carrel.audit.log import Ticket
from carrel.audit.records import AuditEntry, Ending, chain_of
from carrel.control.egress.connection_events import ConnectionEvents
from carrel.control.operations.admission import Redact
from carrel.errors import CarrelError
from carrel.metrics import Metrics
from carrel.primitives.cache import Cache
from carrel.primitives.tasks import cancel
from carrel.tracing import Tracing

log = logging.getLogger("carrel.egress")

NAMES = {"connect": "connect", "socks5": "connect", "http": "request", "index": "package"}
_ARGUMENTS = ("host", "port", "protocol", "method", "path", "address", "upstream", "credential")
_KNOWN_LATER = ("address", "upstream", "method", "path")
_RETRY_S = 1.0
_MOST_KNOWN = 20_000

Item = Mapping[str, object]


class AccessOwner(NamedTuple):
    """Whose an access is: the context of the sandbox, whom its workspace belongs to, and its template."""

    context: str | None = None
    agent: str | None = None
    template: str | None = None


OwnerOf = Callable[[str], AccessOwner | None]
_Owned = tuple[Item, AccessOwner | None]
_Batch = tuple[int, list[_Owned]]


class AccessLogWriter:
    """Writes the access log of one server."""

    def __init__(
        self,
        audit: AuditLog,
        metrics: Metrics,
        events: ConnectionEvents,
        redact: Redact,
        acknowledge: Callable[[int], None],
        tracing: Tracing | None,
        find_owner: Callable[[str], Awaitable[AccessOwner]],
    ):
        """`find_owner` is asked for the owners of sandboxes that this process does not know."""
        self._find_owner = find_owner
        self._audit = audit
        self._events = events
        self._metrics = metrics
        self._redact = redact
        self._acknowledge = acknowledge
        self._tracing = tracing
        self._batches: asyncio.Queue[_Batch | None] = asyncio.Queue()
        self._open: dict[int, Ticket] = {}
        # By number and beginning, because a proxy that found no journal counts from 1 again.
        self._known: Cache[tuple[int, object], bool] = Cache(_MOST_KNOWN)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that writes."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def take(self, upto: int, items: list[Item], owner_of: OwnerOf) -> None:
        """Take a batch, which is acknowledged as `upto` once it is written."""
        owned = [(item, owner_of(str(item["sandbox"]))) for item in items]
        self._batches.put_nowait((upto, owned))

    def lost(self) -> None:
        """End every open access: the egress process is gone, with all its connections."""
        self._batches.put_nowait(None)

    async def close(self) -> None:
        """Write what was taken, and stop."""
        if self._task is None:
            return
        self.lost()
        await self.wait_until_written()
        await cancel([self._task])

    async def wait_until_written(self) -> None:
        """Wait until the batches that were taken are written, but not long for a database that is away."""
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._batches.join()

    async def _run(self) -> None:
        while True:
            batches = [await self._batches.get()]
            while batches[-1] is not None and not self._batches.empty():
                batches.append(self._batches.get_nowait())
            try:
                taken = [batch for batch in batches if batch is not None]
                if taken:
                    items = list(_last_of_each([item for _, items in taken for item in items]))
                    await self._write(taken[-1][0], items)
                if batches[-1] is None:
                    self._end_all()
            except Exception:
                log.exception("a part of the access log could not be written")
            finally:
                for _ in batches:
                    self._batches.task_done()

    def _end_all(self) -> None:
        for ticket in self._open.values():
            ticket.end(Ending("unknown", reason="the egress process ended"))
        self._open.clear()

    async def _write(self, upto: int, items: list[_Owned]) -> None:
        while True:
            try:
                while items:
                    await self._one(*items[0])
                    del items[0]
                await self._audit.flush()
                break
            except CarrelError as error:
                log.warning("the access log cannot be written: %s", error)
            except Exception:  # never acknowledge what is not written
                log.exception("the access log cannot be written")
            await asyncio.sleep(_RETRY_S)
        self._acknowledge(upto)

    async def _one(self, item: Item, owner: AccessOwner | None) -> None:
        number = item["number"]
        assert isinstance(number, int)
        key = (number, item["began"])
        ended = self._known.get(key)
        if ended or (item.get("recovered") and ended is not None):
            return  # written already, though the proxy or its successor does not know
        await self._written(number, item, owner or await self._find_owner(str(item["sandbox"])))
        self._known.put(key, item["ended"] is not None)

    async def _written(self, number: int, item: Item, owner: AccessOwner) -> None:
        ended = item["ended"]
        ticket = self._open.get(number)
        if ended is None:
            if ticket is None:
                self._open[number] = await self._audit.begin(await self._entry(item, owner))
            return
        ending = await self._ending(item, owner)
        entry = await self._entry(item, owner) if ticket is None else ticket.entry
        if ticket is not None:
            later = _later(item, ticket.entry.arguments)
            redacted = await self._redact(owner.context or str(item["sandbox"]), later) if later else later
            del self._open[number]
            ticket.end(replace(ending, arguments=redacted))
        else:
            self._audit.record(entry, ending)
        seconds = 0.0 if ending.duration_ms is None else ending.duration_ms / 1000
        sizes = ending.bytes_in or 0, ending.bytes_out or 0
        self._metrics.egress_ended(str(item["protocol"]), ending.result, *sizes, seconds, template=owner.template)
        if self._tracing is not None:
            self._trace(item, entry, ending, owner)
        port = item.get("port")
        self._events.ended(
            owner.context,
            str(item["sandbox"]),
            str(entry.arguments.get("host", "")),
            port if isinstance(port, int) else None,
            ending.result,
            *sizes,
        )

    def _trace(self, item: Item, entry: AuditEntry, ending: Ending, owner: AccessOwner) -> None:
        assert self._tracing is not None
        began, ended, port = item["began"], item["ended"], item.get("port")
        assert isinstance(began, int | float)
        assert isinstance(ended, int | float)
        facts: dict[str, str | int | None] = {
            "context": owner.context,
            "host": _text(entry.arguments.get("host")),
            "port": port if isinstance(port, int) else None,
            "protocol": str(item["protocol"]),
            "outcome": ending.result,
            "bytes_in": ending.bytes_in,
            "bytes_out": ending.bytes_out,
        }
        self._tracing.connection(str(item["sandbox"]), began, ended, facts)

    async def _ending(self, item: Item, owner: AccessOwner) -> Ending:
        ending = _ending(item)
        if ending.reason is None:
            return ending
        redacted = await self._redact(owner.context or str(item["sandbox"]), {"reason": ending.reason})
        return replace(ending, reason=str(redacted["reason"]))

    async def _entry(self, item: Item, owner: AccessOwner) -> AuditEntry:
        sandbox = str(item["sandbox"])
        arguments = {name: item[name] for name in _ARGUMENTS if item.get(name) is not None}
        if item.get("inspected"):
            arguments["inspected"] = True
        verdict = item["verdict"]
        approval = item.get("approval")
        redacted = await self._redact(owner.context or sandbox, {**arguments, "rule": _text(item.get("rule"))})
        return AuditEntry(
            chain=chain_of(owner.context, sandbox),
            actor=f"sandbox:{sandbox}",
            kind="network",
            name=NAMES.get(str(item["protocol"]), "connect"),
            decision=verdict if verdict in {"allow", "deny", "ask"} else "deny",
            rule=_text(redacted.pop("rule")),
            source=_text(item.get("source")),
            arguments=redacted,
            arguments_hash=self._audit.hash_arguments(arguments),
            approval=_text(approval),
            agent=owner.agent,
        )


def _last_of_each(items: list[_Owned]) -> Iterator[_Owned]:
    """Return the newest state of each access, in the order of their first."""
    newest = {item["number"]: item for item, _ in items}
    for item, owner in items:
        if (last := newest.pop(item["number"], None)) is not None:
            yield last, owner


def _later(item: Item, known: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that were not known when the access began."""
    return {name: item[name] for name in _KNOWN_LATER if item.get(name) is not None and item[name] != known.get(name)}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _ending(item: Item) -> Ending:
    began, ended = item["began"], item["ended"]
    assert isinstance(began, int | float)
    assert isinstance(ended, int | float)
    sent, received, result = item["sent"], item["received"], str(item["result"])
    # The reason why an access was allowed does not explain why it then failed.
    explains = result != "ok" and (item["verdict"] != "allow" or bool(item.get("recovered")))
    return Ending(
        result,
        max(0.0, ended - began) * 1000,
        bytes_in=received if isinstance(received, int) else None,
        bytes_out=sent if isinstance(sent, int) else None,
        reason=_text(item.get("reason")) if explains else None,
    )
