"""Values that all parts of the proxy share: a target, an access to it, a refusal; and the interfaces between parts."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Literal, Protocol

from carrel.policy.verdict import DENIED, Verdict

Address = IPv4Address | IPv6Address
Spoken = Literal["connect", "http", "socks5", "index"]
"""How a sandbox asked: a tunnel, a plain request, a SOCKS tunnel, a package of the index front."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where somebody wants to go. `host` is in the one spelling that rules are compared with: a name in lower-case
    ASCII without a trailing dot, or an address as Python writes it, which then is `literal` too.
    """

    host: str
    port: int
    literal: Address | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if isinstance(self.literal, IPv6Address) else f"{self.host}:{self.port}"


class Refused(Exception):
    """A connection or a request that does not happen. Carries what the sandbox is told."""

    def __init__(
        self,
        reason: str,
        *,
        code: str = "denied_by_policy",
        status: int = 403,
        rule: str | None = None,
        source: str | None = None,
        hint: str | None = None,
        approval: str | None = None,
        retry: bool = False,
    ):
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.status = status
        self.rule = rule
        self.source = source
        self.hint = hint
        self.approval = approval
        self.retry = retry

    @classmethod
    def by(cls, said: Verdict) -> Refused:
        """The refusal of what was denied, or asked for in vain."""
        return cls(said.reason, rule=said.rule, source=said.source, hint=said.hint, approval=said.approval)

    def shown(self) -> dict[str, object]:
        """The refusal as every part of carrel shows one."""
        return {
            "code": self.code,
            "operation": "network",
            "rule": self.rule,
            "source": self.source,
            "reason": self.reason,
            "retry": self.retry,
            "approval": self.approval,
            "hint": self.hint,
        }


@dataclass(slots=True)
class Access:
    """One connection or request from its first byte to its last: what the access log says of it."""

    sandbox: str
    protocol: Spoken
    target: Target | None = None
    method: str | None = None
    path: str | None = None
    """Only of plain and inspected requests; without the query, which may hold secrets."""
    said: Verdict = DENIED
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
    """Set by who reports it, so that the end finds its beginning."""


class Report(Protocol):
    """Where accesses are told. Neither call waits. `opened` raises `Refused` when it cannot be written down."""

    def opened(self, access: Access) -> None:
        """It was decided: once for every access, also for one that is refused."""

    def closed(self, access: Access) -> None:
        """It ended; once for every access that was opened."""


class Ask(Protocol):
    """Asks a person, by way of the control plane, and waits as long as that is worth it."""

    async def __call__(self, sandbox: str, target: Target, said: Verdict) -> Verdict:
        """What the person said. Never raises: what cannot be asked is denied."""


class Dial(Protocol):
    """Makes connections to the outside, directly or through an upstream proxy."""

    async def __call__(self, target: Target, addresses: Sequence[Address], access: Access) -> socket.socket:
        """A connected non-blocking socket on which the target answers. `addresses` have been checked, the best first.
        Sets `access.address` and `access.upstream`. Raises `Refused` with status 502 or 504.
        """


class Resolve(Protocol):
    """Looks names up."""

    async def __call__(self, name: str) -> Sequence[Address]:
        """The addresses of a name. Raises `Refused` with status 502 when there are none."""
