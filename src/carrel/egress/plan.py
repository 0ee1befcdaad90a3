"""The plan of a sandbox, which the control plane sends to the proxy: its policy, and what only the proxy may know.

Plans hold credentials. They travel over a `carrel.primitives.channel` in a memory file, and are never shown or logged.
The control plane sends `attach`, `change` and `detach` of a sandbox, `answer` to a question, `ack` of log entries,
`describe` and `drain`. The proxy sends `done` or `failed` for each of these that has a number, `ask` and `log`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache

from pydantic import TypeAdapter, ValidationError

from carrel.policy.rules.layers import Layer, Policy

VERSION = 3
"""The version of the messages. A control plane of another version drains the proxy that it finds and starts its own."""


def placeholder(name: str) -> str:
    """Return the text that a sandbox gets in place of the value of a secret."""
    return f"carrel-placeholder-{name}"


@dataclass(frozen=True, slots=True)
class Injected:
    """A credential of `sources.json` with its value. `value` is the whole header, `secret` the hidden part."""

    host: str
    header: str
    value: str = field(repr=False)
    secret: str = field(repr=False)
    name: str
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """A proxy of the operator: `http://user:password@host:port` or `socks5://…`. It is given addresses, or names with
    `remote_names`, which it then looks up itself.
    """

    name: str
    url: str = field(repr=False)
    remote_names: bool = False


@dataclass(frozen=True, slots=True)
class PackageIndex:
    """A package index. `url` may hold a user and password; `cert` is a file of certificate authorities, if those of the
    system are not enough.
    """

    name: str
    url: str = field(repr=False)
    trusted: bool = False
    cert: str | None = None


@dataclass(frozen=True, slots=True)
class HostRegistry:
    """A registry of one of the host's package managers: `manager` is a key of `package_managers`."""

    manager: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class EgressPlan:
    """All that the proxy knows of one sandbox."""

    sandbox: str
    context: str | None
    layers: tuple[Layer, ...] = ()
    injected: tuple[Injected, ...] = ()
    upstreams: tuple[Upstream, ...] = ()
    """The proxies to use, in this order. If there are none, connections are direct."""
    indexes: tuple[PackageIndex, ...] = ()
    """The indexes of the host's own pip, used when the policy names none."""
    authority: str | None = field(default=None, repr=False)
    """The key and certificate, as PEM, that sign the certificates for inspected hosts."""
    internet: bool = False
    """Whether every public host is allowed that the policy does not deny."""
    registries: tuple[HostRegistry, ...] = ()
    """The registries of the host's other package managers."""

    def policy(self) -> Policy:
        """Parse the policy."""
        return Policy.of(self.layers, context_id=self.context, workspace="/workspace")

    def to_memory_file(self) -> int:
        """Write the plan to a file in memory and return its descriptor, which the caller closes."""
        descriptor = os.memfd_create("carrel-plan", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(_json().dump_json(self, exclude_unset=True))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def from_memory_file(cls, descriptor: int) -> EgressPlan:
        """Read such a file and close it. Raises `ValueError`, which shows nothing of the plan."""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            data = file.read()
        try:
            return _json().validate_json(data)
        except ValidationError:
            raise ValueError("these bytes are not a plan") from None


@cache
def _json() -> TypeAdapter[EgressPlan]:
    return TypeAdapter(EgressPlan)
