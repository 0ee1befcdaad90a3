"""Values and interfaces that all parts of the proxy share: a target, an access to it, a refusal."""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Literal, Protocol

from carrel.policy.verdict import DENIED, Verdict

Address = IPv4Address | IPv6Address
Spoken = Literal["connect", "http", "socks5", "index"]
"""The protocol of an access: a tunnel, a plain request, a SOCKS tunnel, a request to the package index."""


@dataclass(frozen=True, slots=True)
class Target:
    """A host and a port. `host` has the one spelling that rules compare: a name in lower-case ASCII without a trailing
    dot, or an address as Python writes it; then `literal` is set too.
    """

    host: str
    port: int
    literal: Address | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if isinstance(self.literal, IPv6Address) else f"{self.host}:{self.port}"


class AccessRefused(Exception):
    """A connection or a request was refused. Carries the verdict that the sandbox is shown."""

    def __init__(
        self,
        verdict: Verdict | str,
        *,
        code: str = "denied_by_policy",
        status: int = 403,
        hint: str | None = None,
        retry: bool = False,
    ):
        """`verdict`: of a rule or a person; or only the reason, with a `hint`."""
        if isinstance(verdict, str):
            verdict = Verdict("deny", verdict, hint=hint)
        self.verdict = replace(verdict, verdict="deny")
        super().__init__(self.verdict.reason)
        self.code = code
        self.status = status
        self.retry = retry

    @property
    def reason(self) -> str:
        """The reason of the verdict."""
        return self.verdict.reason

    def as_dict(self) -> dict[str, object]:
        """Return the refusal in the form that all parts of carrel use."""
        verdict = self.verdict
        return {
            "code": self.code,
            "operation": "network",
            "rule": verdict.rule,
            "source": verdict.source,
            "reason": verdict.reason,
            "retry": self.retry,
            "approval": verdict.approval,
            "hint": verdict.hint,
        }


class BadRequest(AccessRefused):
    """A client sent something that is not valid."""

    def __init__(self, reason: str, *, status: int = 400, hint: str | None = None):
        super().__init__(reason, code="bad_request", status=status, hint=hint)


class BadResponse(AccessRefused):
    """A server sent something that is not valid."""

    def __init__(self, reason: str):
        super().__init__(reason, code="bad_response", status=502)


@dataclass(slots=True)
class Access:
    """One connection or request, as it is recorded in the access log."""

    sandbox: str
    protocol: Spoken
    target: Target | None = None
    method: str | None = None
    path: str | None = None
    """Set for plain and inspected requests; without the query, which may hold secrets."""
    verdict: Verdict = DENIED
    address: str | None = None
    upstream: str | None = None
    inspected: bool = False
    credential: str | None = None
    sent: int = 0
    """Bytes from the sandbox."""
    received: int = 0
    """Bytes to the sandbox."""
    result: str = "ok"
    """`ok`, or the code of a refusal or failure."""
    began: float = field(default_factory=time.time)
    ended: float | None = None
    number: int = 0
    """Set by the access log, to match the end of an access with its beginning."""


class AccessRecorder(Protocol):
    """Records accesses. Neither method waits."""

    def opened(self, access: Access) -> None:
        """Record an access that was decided, also a refused one. Raises `AccessRefused` when it cannot be recorded."""

    def closed(self, access: Access) -> None:
        """Record the end of an access. Called once for every access that was opened."""


Ask = Callable[[str, Target, Verdict, str | None], Awaitable[Verdict]]
"""Asks the control plane about a target, or about one request to it, given the verdict of the rules, and waits for the
verdict of admission. Never raises: if nobody can be asked, the verdict is to deny.
"""
Dial = Callable[[Target, Sequence[Address], Access], Awaitable[socket.socket]]
"""Connects to a target at one of its checked addresses, the best first, directly or through an upstream proxy. Sets
`access.address` and `access.upstream`, returns a non-blocking socket. Raises `AccessRefused` with status 502 or 504.
"""
Resolve = Callable[[str], Awaitable[Sequence[Address]]]
"""Looks a name up. Raises `AccessRefused` with status 502 when it has no address."""
