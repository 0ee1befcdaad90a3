"""The policy of sandboxes in which carrel builds Python packages: they reach the package index and nothing else."""

from __future__ import annotations

from carrel.egress.outbound.rules import Rules
from carrel.policy.documents.sources import Git, PackageManager, PackageManagers, Registry, Sources, WebAccess
from carrel.policy.rules.layers import Layer, Policy

INDEX_LABEL = "index"
"""The label of such a sandbox that names the one index it may use."""


def building_layer(policy: Policy, index: str | None) -> Layer:
    """What is added to a policy where an environment is built: nothing is reached but the package front, and there one
    index when one was chosen.
    """
    registries: tuple[Registry, ...] | None = None
    if index is not None:
        named = Rules(policy).packages.registries
        registries = None if named is None else tuple(each for each in named if each.name == index)
    pip = None if registries is None else PackageManager(registries=registries)
    sources = Sources(
        package_managers=PackageManagers(pip=pip), web_access=WebAccess(allowed_domains=()), git=Git(enabled=False)
    )
    return Layer("environment", None, sources, "environment")
