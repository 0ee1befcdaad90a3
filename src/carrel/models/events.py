"""Models of events: what happened to a context, and log records that programs send."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field

from carrel.errors import InvalidRequest
from carrel.models.base import Answer, ContextId, Moment, Request, namespace_of

MAX_BODY = 4096
"""The most characters of an event's body, in JSON."""
MAX_RECORDS = 500
MAX_MESSAGE = 2000
"""The most characters of a log message, and of any other text in an event."""
_SHARES = (512, 128, 32)
_MOST_ITEMS = 64
_DEEPEST = 4


class EventKind(StrEnum):
    """What happened. The part before the dot is the family, which can be asked for as a whole."""

    SESSION = "session"
    COMMAND_STARTED = "command.started"
    COMMAND_ENDED = "command.ended"
    PYTHON_STARTED = "python.started"
    PYTHON_ENDED = "python.ended"
    FILE_WRITTEN = "file.written"
    FILE_DELETED = "file.deleted"
    FILE_MOVED = "file.moved"
    TOOL_STARTED = "tool.started"
    TOOL_ENDED = "tool.ended"
    OPERATION_REFUSED = "operation.refused"
    APPROVAL_ASKED = "approval.asked"
    APPROVAL_DECIDED = "approval.decided"
    CONNECTION = "connection"
    SNAPSHOT_TAKEN = "snapshot.taken"
    SNAPSHOT_RESTORED = "snapshot.restored"
    SNAPSHOT_DELETED = "snapshot.deleted"
    CONTEXT_FORGOTTEN = "context.forgotten"
    JOB_QUEUED = "job.queued"
    JOB_STARTED = "job.started"
    JOB_PROGRESS = "job.progress"
    JOB_WAITING = "job.waiting"
    JOB_CANCELLING = "job.cancelling"
    JOB_ENDED = "job.ended"
    JOB_REMOVED = "job.removed"
    PORT_SHARED = "port.shared"
    PORT_CLOSED = "port.closed"
    POOL_DRY = "pool.dry"
    NOTICE = "notice"
    LOG = "log"


TRUNCATED = "truncated"
"""The kind of the event that stands for those that retention has removed. It is only in streams, never stored."""

MEANINGS: Mapping[EventKind, str] = {
    EventKind.SESSION: "the session has another `state`; `reason` or `error` says why",
    EventKind.COMMAND_STARTED: "a command was admitted; `record` is its number in the audit log",
    EventKind.COMMAND_ENDED: "it is over: `exit` is its class; its output is read with `command_id`",
    EventKind.PYTHON_STARTED: "a Python call or cell was admitted",
    EventKind.PYTHON_ENDED: "it is over, as for a command",
    EventKind.FILE_WRITTEN: "a file or directory was made or changed through the API",
    EventKind.FILE_DELETED: "a file or directory was deleted through the API",
    EventKind.FILE_MOVED: "a file or directory was moved from `path` to `destination`",
    EventKind.TOOL_STARTED: "a call of a tool of an MCP server was admitted",
    EventKind.TOOL_ENDED: "it is over",
    EventKind.OPERATION_REFUSED: "policy or a person refused an operation",
    EventKind.APPROVAL_ASKED: "an operation waits for a person",
    EventKind.APPROVAL_DECIDED: "it was approved or denied, or it has expired",
    EventKind.CONNECTION: "outbound connections to one host: the first one, then a sum for each minute",
    EventKind.SNAPSHOT_TAKEN: "a snapshot is complete",
    EventKind.SNAPSHOT_RESTORED: "the workspace was brought back to a snapshot",
    EventKind.SNAPSHOT_DELETED: "a snapshot was deleted",
    EventKind.CONTEXT_FORGOTTEN: "an administrator deleted a context, with its events",
    EventKind.JOB_QUEUED: "a job was accepted, or is queued again: `reason` says why",
    EventKind.JOB_STARTED: "a server began an attempt of a job",
    EventKind.JOB_PROGRESS: "a job said how far it is",
    EventKind.JOB_WAITING: "a job waits for a person; `approval` names the approval",
    EventKind.JOB_CANCELLING: "somebody cancelled a job; `job.ended` confirms it",
    EventKind.JOB_ENDED: "a job has ended: `state`, and `reason` where it is not obvious",
    EventKind.JOB_REMOVED: "the record of a job was removed: its time to live is over",
    EventKind.PORT_SHARED: "somebody made a URL for a `port`, for everybody if it is `public`",
    EventKind.PORT_CLOSED: "a public port was made private again",
    EventKind.POOL_DRY: "a sandbox found no slot ready in its pool; the next event comes after the pool was full again",
    EventKind.NOTICE: "carrel tells the owner of the session something",
    EventKind.LOG: "a log record that a program sent",
}


def kinds_of(names: Iterable[str]) -> frozenset[EventKind] | None:
    """Return the kinds with these names or of these families; None for all, if there are no names."""
    found: set[EventKind] = set()
    for name in names:
        matching = {kind for kind in EventKind if kind == name or kind.startswith(f"{name}.")}
        if not matching:
            raise InvalidRequest(
                f"there is no kind of event '{name[:64]}'", field="kind", hint=f"they are: {', '.join(EventKind)}"
            )
        found |= matching
    return frozenset(found) or None


class EventInfo(Answer):
    """Something that happened. `kind` is one of the kinds of events, or `truncated`."""

    id: int = Field(description="grows in the order in which events can be read")
    at: datetime
    kind: str
    context_id: str | None = None
    session_id: str | None = None
    job_id: str | None = Field(default=None, description="the job that it tells of")
    node: str = Field(default="", description="the server that wrote it")
    body: dict[str, object] = Field(default_factory=dict)


class LogRecord(Request):
    """One record of a program's log."""

    message: str
    level: str = Field(default="INFO", max_length=32)
    logger: str = Field(default="root", max_length=200)
    at: Moment | None = Field(default=None, description="when it was made; by default now")


def _listed(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_RECORDS:
        raise ValueError(f"at most {MAX_RECORDS} records in one request")
    return value


class LogRecords(Request):
    """Log records of a program, for the event log."""

    context_id: ContextId | None = Field(default=None, description="the context that they belong to")
    records: Annotated[list[LogRecord], BeforeValidator(_listed)] = Field(min_length=1)
    dropped: int = Field(default=0, ge=0, le=10**12, description="records that the program had to drop before these")


class LogReceipt(Answer):
    """The answer to log records."""

    stored: int


class EventDraft(NamedTuple):
    """An event before it has an id. `body` is JSON in ASCII."""

    at: float
    kind: str
    context_id: str | None
    session_id: str | None
    node: str
    body: str
    job_id: str | None = None


class StoredEvent(NamedTuple):
    """An event of the log."""

    id: int
    at: float
    kind: str
    context_id: str | None
    session_id: str | None
    node: str
    body: str
    job_id: str | None = None


_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), default=str).encode


def body_of(values: Mapping[str, object]) -> str:
    """Encode the body of an event, without what is None, in at most `MAX_BODY` characters."""
    kept = {name: value for name, value in values.items() if value is not None}
    text = _encode(kept)
    if len(text) <= MAX_BODY:
        return text
    for share in _SHARES:
        cut = {**{name: _cut(value, share, _DEEPEST) for name, value in kept.items()}, "cut": True}
        text = _encode(cut)
        if len(text) <= MAX_BODY:
            return text
    return _encode({"cut": True})


def _cut(value: object, share: int, deepest: int) -> object:
    if isinstance(value, str):
        return value if len(value) <= share else f"{value[:share]}…"
    if isinstance(value, Mapping):
        if deepest == 0:
            return "…"
        return {str(key)[:share]: _cut(each, share, deepest - 1) for key, each in [*value.items()][:_MOST_ITEMS]}
    if isinstance(value, list | tuple):
        return [_cut(each, share, deepest - 1) for each in value[:_MOST_ITEMS]] if deepest else "…"
    return value if isinstance(value, int | float | None) else str(value)[:share]


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events a reader gets: what it asked for, within the `contexts` and the `namespace` of its token."""

    context_id: str | None = None
    session_id: str | None = None
    kinds: frozenset[EventKind] | None = None
    contexts: frozenset[str] | None = None
    namespace: str | None = None
    job_id: str | None = None

    def matches(self, event: StoredEvent) -> bool:
        """Whether the reader gets an event."""
        context = event.context_id
        if self.context_id is not None and context != self.context_id:
            return False
        if self.session_id is not None and event.session_id != self.session_id:
            return False
        if self.job_id is not None and event.job_id != self.job_id:
            return False
        if self.kinds is not None and event.kind not in self.kinds:
            return False
        if self.contexts is not None and context not in self.contexts:
            return False
        return self.namespace is None or (context is not None and namespace_of(context) == self.namespace)


EVERYTHING = EventFilter()
