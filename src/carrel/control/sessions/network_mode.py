"""Chooses the network of a sandbox from the request, its policy and the settings of the operator. Starts nothing."""

from __future__ import annotations

from dataclasses import replace

from carrel.config import EgressSettings, SandboxSettings
from carrel.control.egress.plans import inspects, web_access
from carrel.control.governance.policies import Policies
from carrel.control.operations.call import refusal
from carrel.control.sessions.attachments import Attachment, LaunchPlan
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.owners import is_agent
from carrel.control.sessions.placement import default_network
from carrel.errors import InvalidRequest
from carrel.models import Network
from carrel.policy.documents.sources import Sources
from carrel.policy.rules.layers import Policy
from carrel.policy.verdict import Verdict
from carrel.providers.base import NETWORK_CAPABILITY, Provider
from carrel.store import SessionRecord

_AROUND = frozenset({Network.BRIDGE, Network.HOST})
"""Networks that bypass the proxy."""


class NetworkMode(Attachment):
    """Chooses the network of each session. `sandbox` has the networks of requests that name none."""

    def __init__(self, policies: Policies, settings: EgressSettings, sandbox: SandboxSettings):
        self._policies = policies
        self._settings = settings
        self._sandbox = sandbox

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        """Choose the network, or refuse the one that was asked for."""
        return replace(plan, record=await self._fit(plan.record, plan.request.network, plan.provider))

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Let a sandbox whose TLS is inspected trust the certificates of the proxy."""
        record = plan.record
        if not record.network.proxied or not is_agent(record):
            return plan
        return replace(plan, trusts_proxy=inspects(await self._policies.of_record(record)))

    async def is_outdated(self, box: LiveSandbox) -> bool:
        """Whether its network or its trusted certificates would differ after a restart."""
        if inspects(await self._policies.of_record(box.record)) and not box.trusting:
            return True
        return (await self._fit(box.record, None, box.provider)).network != box.record.network

    async def _fit(self, record: SessionRecord, asked: Network | None, provider: Provider) -> SessionRecord:
        policy = await self._policies.of_record(record)
        default = default_network(self._sandbox, record.trust, provider)
        return fit_network(record, asked, policy, self._settings, provider, default=default)


def names_hosts(policy: Policy) -> bool:
    """Whether a policy has rules about hosts, which only the proxy can enforce."""
    rules = any(index.hosts or index.networks for index in (policy.allow, policy.deny))
    return rules or bool(web_access(policy)) or any(sources.git is not None for _, sources in policy.sources)


def opens_hosts(policy: Policy) -> bool:
    """Whether a policy lets a sandbox reach any host."""
    if policy.allow.hosts or policy.allow.networks:
        return True
    return any(
        _installs(sources)
        or (sources.web_access is not None and bool(sources.web_access.allowed_domains))
        or (sources.git is not None and sources.git.enabled and bool(sources.git.allowed_remotes))
        for _, sources in policy.sources
    )


def _installs(sources: Sources) -> bool:
    """Whether package managers are enabled, whose registries must be reachable."""
    return any(manager.enabled for manager in sources.package_managers.named().values())


def fit_network(
    record: SessionRecord,
    asked: Network | None,
    policy: Policy,
    settings: EgressSettings,
    provider: Provider,
    *,
    default: Network,
) -> SessionRecord:
    """Return a session with the network that it gets. `asked` is the network of the request, None if it names none;
    `default` is the network of the operator for such requests.
    """
    off = next(
        (name for name, sources in policy.sources if sources.web_access and not sources.web_access.enabled), None
    )
    if provider.unsafe:
        return record  # it does not isolate networks
    if asked is None and record.network is Network.NONE and off is None and opens_hosts(policy):
        if NETWORK_CAPABILITY[Network.ALLOWLIST] in provider.capabilities():
            return replace(record, network=Network.ALLOWLIST)
        return record
    if off is not None and record.network is not Network.NONE:
        if asked is None:
            return replace(record, network=Network.NONE)
        reason = "the policy of this context allows no network"
        verdict = Verdict("deny", reason, "web_access.enabled: false", off, "leave the network out")
        raise refusal("network", verdict, field="network")
    if record.network is Network.INTERNET and not (settings.allow_internet or default is Network.INTERNET):
        raise InvalidRequest(
            "the network 'internet' reaches every public host and is switched off on this server",
            field="network",
            hint="choose 'allowlist', or let the operator set CARREL_EGRESS_ALLOW_INTERNET=true",
        )
    if record.network in _AROUND:
        _refuse_around(record.network, policy, settings)
    return record


def _refuse_around(network: Network, policy: Policy, settings: EgressSettings) -> None:
    enabled = settings.allow_bridge if network is Network.BRIDGE else settings.allow_host
    if not enabled:
        raise InvalidRequest(
            f"the network '{network}' bypasses the proxy and is switched off on this server",
            field="network",
            hint=f"choose 'allowlist', or let the operator set CARREL_EGRESS_ALLOW_{network.upper()}=true",
        )
    if names_hosts(policy):
        reason = f"the policy of this context names hosts, which the network '{network}' would not enforce"
        raise refusal("network", Verdict("deny", reason, hint="choose 'allowlist'"), field="network")
