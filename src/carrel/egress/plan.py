"""What the control plane tells the proxy of one sandbox: its policy, and what only the proxy may know.

Plans hold credentials. They travel over the proxy's own socket in a memory file, and are never shown or logged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from pydantic import TypeAdapter, ValidationError

from carrel.policy.rules.layers import Layer, Policy


@dataclass(frozen=True, slots=True)
class Injected:
    """A credential of `sources.json` with its value. `value` is the whole header, `secret` the part nobody may see."""

    host: str
    header: str
    value: str = field(repr=False)
    secret: str = field(repr=False)
    name: str
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """A proxy of the operator's: `http://user:password@host:port` or `socks5://…`. It gets addresses, or with
    `remote_names` the names, which it then looks up itself.
    """

    name: str
    url: str = field(repr=False)
    remote_names: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """A package index the front may use. `url` may hold a user and password; `cert` is a file of the certificates
    that vouch for it, where the system's do not.
    """

    name: str
    url: str = field(repr=False)
    trusted: bool = False
    cert: str | None = None


@dataclass(frozen=True, slots=True)
class HostRegistry:
    """Where a package manager of the host gets its packages: `manager` is a key of `package_managers`."""

    manager: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One sandbox."""

    sandbox: str
    context: str | None
    layers: tuple[Layer, ...] = ()
    injected: tuple[Injected, ...] = ()
    upstreams: tuple[Upstream, ...] = ()
    """Those to go through, in this order; none: directly."""
    indexes: tuple[Index, ...] = ()
    """Of the host's own pip, for when the policy names none."""
    authority: str | None = field(default=None, repr=False)
    """The key and certificate, as PEM, that the TLS of inspected hosts is answered with."""
    internet: bool = False
    """Whether every public host may be reached that the policy does not deny."""
    registries: tuple[HostRegistry, ...] = ()
    """Of the host's own package managers, other than pip and uv."""

    def policy(self) -> Policy:
        """The policy, read."""
        return Policy.of(self.layers, context_id=self.context, workspace="/workspace")

    def pack(self) -> bytes:
        """The plan as bytes."""
        return _json().dump_json(self, exclude_unset=True)

    @classmethod
    def unpack(cls, data: bytes) -> Plan:
        """The plan of bytes that `pack` made. Raises `ValueError`, which shows nothing of the plan."""
        try:
            return _json().validate_json(data)
        except ValidationError:
            raise ValueError("these bytes are not a plan") from None


@cache
def _json() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)
