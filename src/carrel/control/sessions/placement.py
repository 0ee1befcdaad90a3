"""Chooses provider, network and limits of a sandbox from the request, the settings and what this host can enforce.

Starts nothing, and knows no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from carrel.config import Settings
from carrel.errors import InvalidRequest
from carrel.models import Limits, Network, Trust
from carrel.providers import choose
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Provider

LIMIT_CAPABILITY = {
    "cpus": Capability.LIMIT_CPUS,
    "memory_mb": Capability.LIMIT_MEMORY,
    "processes": Capability.LIMIT_PROCESSES,
}
"""The disk limit is not here: the control plane enforces it for every provider."""


@dataclass(frozen=True)
class Resolved:
    """The provider, network and limits of a sandbox."""

    provider: Provider
    network: Network
    limits: Limits


def resolve(
    settings: Settings,
    providers: Mapping[str, Provider],
    *,
    provider: str,
    trust: Trust,
    network: Network | None,
    limits: Mapping[str, float],
    host_memory_mb: int,
) -> Resolved:
    """Resolve a request. Raises when this host, or its operator, does not allow it."""
    memory_mb = limits.get("memory_mb")
    if memory_mb is not None and memory_mb > host_memory_mb:
        raise InvalidRequest(
            f"the request asks for {memory_mb} MB of memory, and this host has {host_memory_mb} MB",
            field="limits.memory_mb",
            hint="ask for less",
        )
    longest = settings.sandbox.lifetime_s
    if longest is not None and limits.get("lifetime_s", 0) > longest:
        raise InvalidRequest(
            f"the request asks for a lifetime of {limits['lifetime_s']:g} s, and this server allows {longest:g} s",
            field="limits.lifetime_s",
            hint="ask for less, or let the operator change CARREL_SANDBOX_LIFETIME_S",
        )
    chosen = choose(dict(providers), provider if provider != "auto" else settings.sandbox.provider, trust)
    if chosen.unsafe and not settings.sandbox.allow_process:
        raise InvalidRequest(
            f"provider '{chosen.name}' does not isolate and is switched off on this server",
            field="provider",
            hint="choose another provider, or let the operator set CARREL_SANDBOX_ALLOW_PROCESS=true",
        )
    chosen.require(*(LIMIT_CAPABILITY[name] for name in limits if name in LIMIT_CAPABILITY))
    if network is None:
        network = Network.HOST if chosen.unsafe else settings.sandbox.network
    chosen.require(NETWORK_CAPABILITY[network])
    return Resolved(chosen, network, Limits.model_validate(_defaults(settings, chosen) | dict(limits)))


def _defaults(settings: Settings, provider: Provider) -> dict[str, float]:
    defaults = settings.sandbox
    has = provider.capabilities()
    wanted = {"cpus": defaults.cpu_limit, "memory_mb": defaults.memory_mb, "processes": defaults.processes}
    enforced = {name: value for name, value in wanted.items() if LIMIT_CAPABILITY[name] in has}
    if defaults.lifetime_s is not None:
        enforced["lifetime_s"] = defaults.lifetime_s
    return {"timeout_s": defaults.timeout, "disk_mb": defaults.disk_mb, **enforced}
