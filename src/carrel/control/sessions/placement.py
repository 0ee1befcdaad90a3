"""Chooses provider, network and limits of a sandbox from the request, the settings and what this host can enforce.

Starts nothing, and knows no record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from carrel.config import SandboxSettings, Settings
from carrel.errors import InvalidRequest
from carrel.models import Limits, Network, Trust
from carrel.providers import choose
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Provider
from carrel.providers.choosing import believed_level
from carrel.providers.trust import RULES

LIMIT_CAPABILITY = {
    "cpus": Capability.LIMIT_CPUS,
    "memory_mb": Capability.LIMIT_MEMORY,
    "processes": Capability.LIMIT_PROCESSES,
}
"""The disk limit is not here: the control plane enforces it for every provider."""


@dataclass(frozen=True)
class Resolved:
    """The provider, network and limits of a sandbox, and the isolation level of the provider that counts."""

    provider: Provider
    level: int
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
    needs: Collection[Capability] = (),
    least_level: int = 0,
) -> Resolved:
    """Resolve a request. Raises when this host, or its operator, does not allow it.

    `needs` are capabilities besides those for limits and network. `least_level` is the isolation that the session had
    when it last ran: nothing that was chosen for it is replaced by something weaker, unless the caller names it.
    """
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
    limiting = [LIMIT_CAPABILITY[name] for name in limits if name in LIMIT_CAPABILITY]

    def needed(candidate: Provider) -> list[Capability]:
        return [*limiting, NETWORK_CAPABILITY[network or default_network(settings.sandbox, trust, candidate)], *needs]

    name, listed = provider, settings.sandbox.third_party_names
    if provider == "auto":
        usual = providers.get(settings.sandbox.provider)
        too_weak = usual is not None and believed_level(usual, listed) < max(least_level, RULES[trust].least_level)
        name = "auto" if too_weak else settings.sandbox.provider
    chosen = choose(dict(providers), name, trust, needed, least_level, listed)
    if chosen.unsafe and not settings.sandbox.allow_process:
        raise InvalidRequest(
            f"provider '{chosen.name}' does not isolate and is switched off on this server",
            field="provider",
            hint="choose another provider, or let the operator set CARREL_SANDBOX_ALLOW_PROCESS=true",
        )
    chosen.require(*limiting)
    network = network or default_network(settings.sandbox, trust, chosen)
    chosen.require(NETWORK_CAPABILITY[network])
    resolved = Limits.model_validate(_defaults(settings, chosen) | dict(limits))
    return Resolved(chosen, believed_level(chosen, listed), network, resolved)


def default_network(settings: SandboxSettings, trust: Trust, provider: Provider) -> Network:
    """Return the network of a request that names none. `NetworkMode` then asks the policy."""
    if provider.unsafe:
        return Network.HOST
    by_trust = RULES[trust].network
    if by_trust is None:
        return settings.network
    return by_trust if settings.low_trust_network is None else settings.low_trust_network


def _defaults(settings: Settings, provider: Provider) -> dict[str, float]:
    defaults = settings.sandbox
    has = provider.capabilities()
    wanted = {"cpus": defaults.cpu_limit, "memory_mb": defaults.memory_mb, "processes": defaults.processes}
    enforced = {name: value for name, value in wanted.items() if LIMIT_CAPABILITY[name] in has}
    if defaults.lifetime_s is not None:
        enforced["lifetime_s"] = defaults.lifetime_s
    return {"timeout_s": defaults.timeout, "disk_mb": defaults.disk_mb, **enforced}
