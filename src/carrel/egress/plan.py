"""What the control plane tells the proxy of one sandbox: its policy, and what only the proxy may know.

Plans hold credentials. They travel over the proxy's own socket in a memory file, and are never shown or logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from carrel.policy.documents.settings import Settings
from carrel.policy.documents.sources import Sources
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
        value = {
            "sandbox": self.sandbox,
            "context": self.context,
            "layers": [
                {
                    "name": layer.name,
                    "settings": layer.settings and layer.settings.model_dump(mode="json", exclude_unset=True),
                    "sources": layer.sources and layer.sources.model_dump(mode="json", exclude_unset=True),
                    "sources_name": layer.sources_name,
                }
                for layer in self.layers
            ],
            "injected": [asdict(each) for each in self.injected],
            "upstreams": [asdict(each) for each in self.upstreams],
            "indexes": [asdict(each) for each in self.indexes],
            "authority": self.authority,
            "internet": self.internet,
            "registries": [asdict(each) for each in self.registries],
        }
        return json.dumps(value).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Plan:
        """The plan of bytes that `pack` made."""
        value = json.loads(data)
        return cls(
            value["sandbox"],
            value["context"],
            tuple(_layer(each) for each in value["layers"]),
            tuple(
                Injected(**{**each, "methods": _tuple(each["methods"]), "paths": _tuple(each["paths"])})
                for each in value["injected"]
            ),
            tuple(Upstream(**each) for each in value["upstreams"]),
            tuple(Index(**each) for each in value["indexes"]),
            value["authority"],
            value["internet"],
            tuple(HostRegistry(**each) for each in value["registries"]),
        )


def _tuple(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


def _layer(value: Mapping[str, object]) -> Layer:
    settings, sources = value["settings"], value["sources"]
    return Layer(
        str(value["name"]),
        None if settings is None else Settings.model_validate_json(json.dumps(settings)),
        None if sources is None else Sources.model_validate_json(json.dumps(sources)),
        str(value["sources_name"]),
    )
