"""The verdict of a sandbox's policy on a connection. Without any rule for a target, the verdict is to ask.

Pure, and fast enough for every connection: the policy is parsed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from carrel.egress.access import Address, Target
from carrel.egress.http.credentials import refuse_ambiguous
from carrel.egress.plan import HostRegistry, PackageIndex
from carrel.policy.documents.sources import PackageManager, Registry, RequestRule, Sources, WebAccess
from carrel.policy.rules.hosts import Domains, HostPolicy
from carrel.policy.rules.layers import Policy
from carrel.policy.rules.packages import normalised
from carrel.policy.rules.patterns import pattern
from carrel.policy.verdict import Verdict, strictest

MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class EgressLimits:
    """The limits of all layers, the lowest of each; None if no layer sets one."""

    connections: int | None = None
    per_minute: int | None = None
    download_bytes: int | None = None
    upload_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PackageRules:
    """The package rules of all layers, for pip and uv. Names are normalised as indexes do."""

    enabled: bool = True
    registries: tuple[Registry, ...] | None = None
    """The only registries, in the order of the highest layer; None if no layer names any."""
    blocked: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    max_install_bytes: int | None = None


class EgressRules:
    """The rules of one sandbox."""

    limits: EgressLimits
    packages: PackageRules

    def __init__(
        self,
        policy: Policy,
        *,
        indexes: Sequence[PackageIndex] = (),
        internet: bool = False,
        registries: Sequence[HostRegistry] = (),
    ):
        """`indexes` are used when the policy names none. With `internet`, public targets that the policy does not
        mention are allowed. `registries` are those of the host's other package managers.
        """
        sources = [each for _, each in policy.sources]
        webs = [each.web_access for each in sources if each.web_access is not None]
        self.limits = _limits(webs)
        self.packages = _packages(sources)
        own = [] if self.packages.registries is not None else [each.url for each in indexes]
        places = [(each.manager, each.host, each.port) for each in registries]
        self._hosts = HostPolicy(policy, indexes=own, internet=internet, registries=places)
        self._opaque = _DomainLists(each.opaque_domains for each in webs)
        self._inspected = _DomainLists(each.inspected_domains for each in webs)
        self._credited = frozenset(each.host for web in webs for each in web.credentials)
        self._requests = [
            _RequestMatch(each, name)
            for name, layer in policy.sources
            if layer.web_access is not None
            for each in layer.web_access.requests
        ]
        clone = policy.limits.max_clone_size_mb
        self._most_cloned = None if clone is None else clone * MB

    def decide(self, target: Target) -> Verdict:
        """Return the verdict on a host and port."""
        verdict = self._hosts.host(target.host, target.port)
        if verdict is not None:
            return verdict
        return Verdict("ask", f"no rule allows or denies connecting to {target}", hint="a person can approve it")

    def check_address(self, target: Target, address: Address) -> Verdict:
        """Return the verdict on an address of a target. Called after `decide`."""
        return self._hosts.address(address, target.port, target.host)

    def opaque(self, target: Target) -> bool:
        """Whether a connection need not name its target in TLS or HTTP."""
        return self._opaque.has(target)

    def inspected(self, target: Target) -> bool:
        """Whether the TLS of the host is opened: the policy says so, a credential is injected, or the policy decides
        single requests to it.
        """
        return (
            self.credited(target)
            or self._inspected.has(target)
            or any(each.concerns(target) for each in self._requests)
        )

    def decide_request(self, target: Target, method: str, path: str) -> Verdict | None:
        """Return the verdict of the rules for single requests; None if none of them is for this one. Raises
        `BadRequest` for a path that is not clear.
        """
        concerned = (each for each in self._requests if each.concerns(target))
        return strictest(verdict for each in concerned if (verdict := each.decide(target, method, path)))

    def credited(self, target: Target) -> bool:
        """Whether a credential is injected into requests to the host."""
        return target.host in self._credited

    def most_received(self, target: Target) -> int | None:
        """Return how many bytes one connection may receive; None for no limit."""
        if self._most_cloned is None or not self._hosts.remote(target.host, literal=target.literal is not None):
            return None
        return self._most_cloned


class _RequestMatch:
    """A rule for single requests to a host."""

    def __init__(self, rule: RequestRule, source: str):
        self._host = Domains((rule.host,))
        self._methods = None if rule.methods is None else {each.upper() for each in rule.methods}
        self._paths = None if rule.paths is None else [pattern(each.casefold()) for each in rule.paths]
        self._rule, self._source = rule, source

    def concerns(self, target: Target) -> bool:
        """Whether the rule is about requests to the host."""
        return self._host.find(target.host, literal=target.literal is not None) is not None

    def decide(self, target: Target, method: str, target_path: str) -> Verdict | None:
        """Return the verdict on a request to the host; None if the rule does not match it."""
        if self._methods is not None and method.upper() not in self._methods:
            return None
        path = target_path.partition("?")[0]
        if self._paths is not None:
            refuse_ambiguous(path, "a rule for requests")
            known = unquote(path).rstrip("/").casefold()
            if not any(each.matches(known) for each in self._paths):
                return None
        what = self._rule.reason or f"{method} {path[:200]}"
        if self._rule.verdict == "ask":
            reason, hint = f"{what}: a person is asked about this request to {target.host}", "a person can approve it"
        else:
            reason, hint = f"{what}: this request to {target.host} is denied for this agent", "do it without this"
        return Verdict(self._rule.verdict, reason, f"web_access.requests: {self._rule.host}", self._source, hint)


class _DomainLists:
    """Domain lists of several layers. A host must be in all of them."""

    def __init__(self, lists: Iterable[Sequence[str] | None]):
        self._layers = [Domains(each) for each in lists if each is not None]

    def has(self, target: Target) -> bool:
        """Whether every list contains the host."""
        literal = target.literal is not None
        return bool(self._layers) and all(each.find(target.host, literal=literal) for each in self._layers)


def _least(numbers: Iterable[int | None], unit: int = 1) -> int | None:
    return min((number * unit for number in numbers if number is not None), default=None)


def _limits(webs: Sequence[WebAccess]) -> EgressLimits:
    return EgressLimits(
        _least(each.max_connections for each in webs),
        _least(each.max_connections_per_minute for each in webs),
        _least((each.max_download_mb for each in webs), MB),
        _least((each.max_upload_mb for each in webs), MB),
    )


def _packages(sources: Sequence[Sources]) -> PackageRules:
    """The index cannot distinguish pip from uv, so the rules of one apply to the other."""
    layers = [_managers(each) for each in sources]
    every = [each for layer in layers for each in layer]
    allowed = [frozenset(map(normalised, each.allowed_packages)) for each in every if each.allowed_packages is not None]
    return PackageRules(
        all(any(each.enabled for each in layer) for layer in layers if layer),
        _registries([each.registries for each in every if each.registries is not None]),
        frozenset(normalised(name) for each in every for name in each.blocked_packages),
        frozenset.intersection(*allowed) if allowed else None,
        _least((each.max_install_size_mb for each in every), MB),
    )


def _managers(sources: Sources) -> list[PackageManager]:
    managers = sources.package_managers
    return [each for each in (managers.pip, managers.uv) if each is not None]


def _registries(lists: Sequence[Sequence[Registry]]) -> tuple[Registry, ...] | None:
    if not lists:
        return None
    trusted = [{each.url.rstrip("/"): each.trusted for each in registries} for registries in lists]
    return tuple(
        each.model_copy(update={"trusted": all(known[each.url.rstrip("/")] for known in trusted)})
        for each in lists[0]
        if all(each.url.rstrip("/") in known for known in trusted)
    )
