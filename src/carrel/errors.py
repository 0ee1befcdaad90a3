"""The error tree of carrel, and the conversion of errors to problem objects and back.

    CarrelError
    ├── InvalidRequest          400  the request is invalid; `field` names the wrong part
    │   ├── UnknownSetting      400
    │   ├── InvalidPath         400  a path that leaves the workspace or cannot exist
    │   └── TooLarge            413
    ├── Unauthorized            401
    ├── Denied                  403  policy denies the operation; `.rule`, `.reason`
    │   └── ApprovalNeeded      403  a person has to decide first; `.approval` is the id
    ├── NotFound                404
    │   └── FileMissing         404
    ├── Conflict                409
    │   ├── AlreadyExists       409
    │   ├── EditMismatch        409  the text to replace is absent or not unique
    │   ├── NotRunning          409
    │   ├── ThreadBusy          409  another process runs this thread of a graph
    │   └── RunsElsewhere       409  between servers: another one has the session; `node`
    ├── Unsupported             422  the provider or the host lacks a capability
    ├── ImageRefused            422  an image is damaged, hostile, too large or not for this machine
    ├── LimitExceeded           429  a quota or a capacity is used up
    ├── RegistryFailed          502  an image registry does not answer, refuses, or broke the protocol
    ├── McpServerFailed         502  an MCP server died, did not start, or broke the protocol
    ├── PortNotOpen             502  no server listens on that port of the sandbox, or it broke the protocol; `port`
    ├── CommandFailed           —    only with `check=True`; otherwise a non-zero exit code is a result
    └── PlatformError           500  carrel itself or its host failed; never the result of a command
        ├── ProviderUnavailable 503
        ├── ArchiveUnavailable  503  the archive's storage does not answer
        ├── DatabaseUnavailable 503  the database of the servers does not answer; ask again after `Retry-After`
        ├── SnapshotDamaged     500  stored content is missing or has changed
        ├── SandboxLost         502  the sandbox died or sent an invalid response
        ├── NodeUnreachable     503  the server that has the session does not answer; ask again after `Retry-After`
        └── ServerUnreachable   503

Errors cross process borders as codes of this table, never as class names. This module imports nothing of carrel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

Problem = dict[str, Any]


class CarrelError(Exception):
    """Base of all errors of carrel: what happened (`detail`), where (`field`), what to do (`hint`)."""

    code: ClassVar[str] = "carrel_error"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "carrel failed"

    def __init__(self, detail: str, *, field: str | None = None, hint: str | None = None, **extra: object):
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.hint = hint
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.detail} ({self.hint})" if self.hint else self.detail

    def problem(self) -> Problem:
        """Convert the error to a problem object (RFC 9457)."""
        body: Problem = {
            "type": f"urn:carrel:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.field is not None:
            body["field"] = self.field
        if self.hint is not None:
            body["hint"] = self.hint
        body.update({key: value for key, value in self.extra.items() if key not in body})
        return body


class InvalidRequest(CarrelError):
    """The request is invalid."""

    code, status, title = "invalid_request", 400, "The request is not valid"


class UnknownSetting(InvalidRequest):
    """A setting or field that does not exist."""

    code, title = "unknown_setting", "Unknown setting"


class InvalidPath(InvalidRequest):
    """A path that leaves the workspace or cannot exist."""

    code, title = "invalid_path", "The path is not usable"


class TooLarge(InvalidRequest):
    """A body or value over its limit."""

    code, status, title = "too_large", 413, "Too large"


class Unauthorized(CarrelError):
    """There is no token, or an invalid one."""

    code, status, title = "unauthorized", 401, "A valid token is needed"


class Denied(CarrelError):
    """Policy denies the operation."""

    code, status, title = "denied_by_policy", 403, "Denied by policy"

    @property
    def rule(self) -> str | None:
        """The rule that decided."""
        return _text(self.extra.get("rule"))

    @property
    def reason(self) -> str:
        """The reason, for the agent."""
        return _text(self.extra.get("reason")) or self.detail


class ApprovalNeeded(Denied):
    """A person has to decide first. After the approval, repeat the request with its id; it then runs once."""

    code, title = "approval_needed", "A person has to decide"

    @property
    def approval(self) -> str | None:
        """The id of the pending approval."""
        return _text(self.extra.get("approval"))


class NotFound(CarrelError):
    """Something that the request names does not exist."""

    code, status, title = "not_found", 404, "Not found"


class FileMissing(NotFound):
    """No file or directory at that path."""

    code, title = "file_not_found", "File not found"


class Conflict(CarrelError):
    """The current state does not allow the operation."""

    code, status, title = "conflict", 409, "Not possible in this state"


class AlreadyExists(Conflict):
    """Something with this name exists already."""

    code, title = "already_exists", "Already exists"


class EditMismatch(Conflict):
    """The text to replace is absent or not unique."""

    code, title = "edit_mismatch", "The text to replace was not matched exactly once"


class NotRunning(Conflict):
    """The command, terminal or sandbox has ended."""

    code, title = "not_running", "Not running"


class ThreadBusy(Conflict):
    """Another process runs this thread of a graph."""

    code, title = "thread_busy", "Another process runs this thread"


class RunsElsewhere(Conflict):
    """Another server on the same database has the session; `node` in `extra` names it. Servers tell each other this; a
    caller never gets it.
    """

    code, title = "runs_elsewhere", "Another server has this session"


class Unsupported(CarrelError):
    """The provider or the host lacks a capability."""

    code, status, title = "unsupported", 422, "Not supported here"


class ImageRefused(CarrelError):
    """An image is damaged, hostile, too large or not for this machine. Nothing of it is kept."""

    code, status, title = "image_refused", 422, "The image is refused"


class LimitExceeded(CarrelError):
    """A quota or a capacity is used up."""

    code, status, title = "limit_exceeded", 429, "Limit reached"


class RegistryFailed(CarrelError):
    """An image registry does not answer, refuses, or broke the protocol. This is not a failure of carrel."""

    code, status, title = "registry_failed", 502, "The image registry failed"


class McpServerFailed(CarrelError):
    """An MCP server died, did not start, or broke the protocol. This is not a failure of carrel."""

    code, status, title = "mcp_server_failed", 502, "The MCP server failed"


class PortNotOpen(CarrelError):
    """No server listens on that port of the sandbox, or it does not speak HTTP. This is not a failure of carrel."""

    code, status, title = "port_not_open", 502, "The port is not open"


class PlatformError(CarrelError):
    """carrel itself or its host failed; never the result of a command."""

    code, status, title = "platform_error", 500, "carrel failed"


class ProviderUnavailable(PlatformError):
    """No available provider meets the request."""

    code, status, title = "provider_unavailable", 503, "No suitable provider is available"


class ArchiveUnavailable(PlatformError):
    """The storage of the archive does not answer or refuses the request. The archive is unchanged."""

    code, status, title = "archive_unavailable", 503, "The archive cannot be reached"


class DatabaseUnavailable(PlatformError):
    """The database that servers share does not answer. The same request succeeds when it is back. `retry_after` in
    `extra` is in seconds.
    """

    code, status, title = "database_unavailable", 503, "The database cannot be reached"


class SnapshotDamaged(PlatformError):
    """Stored content is missing or has changed; `objects` in `extra` names the damaged objects."""

    code, title = "snapshot_damaged", "The snapshot is damaged"


class SandboxLost(PlatformError):
    """The sandbox died or sent an invalid response."""

    code, status, title = "sandbox_lost", 502, "The sandbox is gone"
    sent = True
    """Whether the request may have reached the sandbox."""


class NodeUnreachable(PlatformError):
    """The server that has the session does not answer. The same request succeeds later: when that server answers again,
    or when its lease has ended and another takes the session over. `retry_after` in `extra` is in seconds.
    """

    code, status, title = "node_unreachable", 503, "The server of the session does not answer"


class ServerUnreachable(PlatformError):
    """No carrel server answers at this address."""

    code, status, title = "server_unreachable", 503, "No carrel server answers"


class CommandFailed(CarrelError):
    """A command ended with a non-zero exit code, and the caller used `check=True`."""

    code, status, title = "command_failed", 422, "The command failed"

    def __init__(self, detail: str, *, result: object = None, **extra: Any):
        super().__init__(detail, **extra)
        self.result = result


def _all(cls: type[CarrelError]) -> dict[str, type[CarrelError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_all(child))
    return found


BY_CODE: dict[str, type[CarrelError]] = _all(CarrelError)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def from_problem(problem: Mapping[str, object], status: int = 500) -> CarrelError:
    """Convert a problem object to an error; an unknown or malformed one becomes a `PlatformError`."""
    code = _text(problem.get("code")) or ""
    cls = BY_CODE.get(code, PlatformError)
    detail = _text(problem.get("detail")) or _text(problem.get("title")) or f"the server answered {status}"
    known = {"type", "title", "status", "code", "detail", "field", "hint", "self", "result"}
    extra = {key: value for key, value in problem.items() if key not in known}
    return cls(detail, field=_text(problem.get("field")), hint=_text(problem.get("hint")), **extra)
