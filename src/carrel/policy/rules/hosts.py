"""Decides which hosts, ports and addresses an agent may connect to. Admission and the egress proxy use the same code.

A `HostPolicy` is built once per policy and used often, so it looks domains and networks up in tables. It makes no DNS
queries.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from carrel.policy.documents.sources import Sources, WebAccess
from carrel.policy.rules import addresses
from carrel.policy.rules.addresses import Address
from carrel.policy.rules.layers import Layer, Policy
from carrel.policy.rules.remotes import RemoteHost, remote_hosts
from carrel.policy.rules.rules import Rule, first
from carrel.policy.verdict import Verdict

PORTS = frozenset({80, 443})
"""The open ports of allowed hosts if no layer names ports."""


class Domains:
    """A table of the domains of `sources.json`."""

    def __init__(self, patterns: Iterable[str]):
        self._every = False
        self._exact: dict[str, str] = {}
        self._below: dict[str, str] = {}
        for text in patterns:
            name = text.rstrip(".").lower()
            if name == "*":
                self._every = True
            elif name.startswith("*."):
                self._below.setdefault(name[2:], text)
            else:
                self._exact.setdefault(name, text)

    def find(self, host: str, *, literal: bool = False) -> str | None:
        """Return the pattern that matches a host, which is lower-case and without a trailing dot. With `literal` the
        host is an IP address, which no `*.` pattern matches.
        """
        if (found := self._exact.get(host)) is not None:
            return found
        parent = "" if literal else host.partition(".")[2]
        while parent and self._below:
            if (found := self._below.get(parent)) is not None:
                return found
            parent = parent.partition(".")[2]
        return "*" if self._every else None


class _Web:
    """The part of one layer's `sources.json` that concerns hosts."""

    def __init__(self, layer: Layer, sources: Sources):
        web = sources.web_access or WebAccess()
        self.layer = layer
        self.enabled = web.enabled
        self.allowed = None if web.allowed_domains is None else Domains(web.allowed_domains)
        self.blocked = Domains(web.blocked_domains)
        self.ports = None if web.allowed_ports is None else frozenset(web.allowed_ports)
        self.closed = web.unknown_domains == "deny"
        self.remote_hosts = remote_hosts(sources.git)
        self.registries = dict(_named_registries(layer, sources))

    def decide(self, host: str, port: int | None, *, literal: bool) -> Verdict | None:
        """Return the verdict of this layer; None if it has none."""
        source = self.layer.sources_name
        if not self.enabled:
            return Verdict("deny", f"web access is off, so {host} is denied", "web_access.enabled: false", source)
        if blocked := self.blocked.find(host, literal=literal):
            return Verdict(
                "deny", f"{host} is blocked for this agent", f"web_access.blocked_domains: {blocked}", source
            )
        if self.allowed is not None and (allowed := self.allowed.find(host, literal=literal)):
            return Verdict("allow", f"{host} is allowed", f"web_access.allowed_domains: {allowed}", source)
        if remote := self.remote(host, port, literal=literal):
            return Verdict("allow", f"{host} has an allowed git remote", f"git.allowed_remotes: {remote.text}", source)
        if port is not None and (registry := self.registries.get((host, port))):
            return registry
        if self.allowed is None:
            return None
        return Verdict("deny", f"{host} is not one of this agent's domains", "web_access.allowed_domains", source)

    def remote(self, host: str, port: int | None, *, literal: bool) -> RemoteHost | None:
        """Return the entry that allows git remotes on a host."""
        for each in self.remote_hosts:
            if port in {None, each.port} and (each.host == host if literal else each.matches(host)):
                return each
        return None


class HostPolicy:
    """The verdicts of a policy on hosts."""

    def __init__(
        self,
        policy: Policy,
        *,
        indexes: Iterable[str] = (),
        internet: bool = False,
        registries: Iterable[tuple[str, str, int]] = (),
    ):
        """`indexes` are URLs of package indexes that the egress proxy uses although no layer names them. With
        `internet` every public host is allowed that no layer denies, on every port unless a layer names ports.
        `registries` are those that the host's own package managers use, as (package manager, host, port). Pip and uv do
        not need them: their requests go through the package index of the egress proxy.
        """
        self._internet = internet
        self._host_registries = dict(_open_registries(policy, registries))
        self._policy = policy
        self._webs = tuple(_Web(layer, layer.sources) for layer in policy.layers if layer.sources is not None)
        self._limited_indexes = dict(_limited_indexes(policy, indexes))

    def host(self, host: str, port: int | None = None) -> Verdict | None:
        """Decide about a host name or an address; None if the policy has no answer. `port` is None if not known yet."""
        name = host.strip("[]").rstrip(".").lower()
        address = addresses.read(name)
        if address is not None:
            address = addresses.unmapped(address)
            name = str(address)
        shown, literal = name[:200], address is not None
        verdicts = [found for each in self._webs if (found := each.decide(name, port, literal=literal))]
        denied = next((each for each in verdicts if each.denies), None) or self._denied(name, port)
        if denied is None and address is not None:
            denied = self._denied_address(address, port)
        if denied is not None:
            return denied
        rules = self._allowed(name, port)
        if address is not None and (kind := addresses.why_not_public(address)) and not self._allowed_by(address, port):
            return _not_public(shown, kind)
        registry = None if port is None else self._registry(name, port)
        if registry is None and port is not None and (refused := self._port(shown, port, rules, literal=literal)):
            return refused
        if limited := self._limited_indexes.get(name):
            return limited
        if rules:
            return Verdict("allow", f"connecting to {shown} is allowed", rules[0].text, rules[0].source)
        if verdicts:
            return verdicts[0]
        if registry is not None:
            return registry
        closed = next((each for each in self._webs if each.closed), None)
        if closed is not None:
            reason, hint = f"{shown} is not one of this agent's domains", "use a domain that is allowed, or do without"
            return Verdict("deny", reason, "web_access.unknown_domains: deny", closed.layer.sources_name, hint)
        return Verdict("allow", f"{shown} is on the internet", "network: internet") if self._internet else None

    def _registry(self, name: str, port: int) -> Verdict | None:
        """Return the permission to connect to a registry that a layer names or that the host itself uses."""
        named = (each for web in self._webs if (each := web.registries.get((name, port))) is not None)
        return next(named, None) or self._host_registries.get((name, port))

    def address(self, address: Address, port: int, host: str = "") -> Verdict:
        """Decide about an address that an allowed name (`host`) resolved to."""
        if denied := self._denied_address(address, port):
            return denied
        kind = addresses.why_not_public(address)
        if kind is None:
            return Verdict("allow", f"{address} is a public address")
        if (host, port) in self._host_registries and addresses.is_internal(address):
            return self._host_registries[host, port]
        return self._allowed_by(addresses.unmapped(address), port) or _not_public(str(address), kind)

    def remote(self, host: str, *, literal: bool = False) -> bool:
        """Whether a layer allows git remotes on a host."""
        return any(web.remote(host, None, literal=literal) for web in self._webs)

    def _denied(self, name: str, port: int | None) -> Verdict | None:
        rule = first(self._policy.deny.network(name, port, deny=True))
        return None if rule is None else _denied(name, port, rule)

    def _denied_address(self, address: Address, port: int | None) -> Verdict | None:
        """Return the refusal of an address in any of its forms."""
        for form in addresses.forms(address):
            for web in self._webs:
                if blocked := web.blocked.find(str(form), literal=True):
                    rule = f"web_access.blocked_domains: {blocked}"
                    return Verdict("deny", f"{form} is blocked for this agent", rule, web.layer.sources_name)
            if (denied := first(self._policy.deny.addresses(form, port, deny=True))) is not None:
                return _denied(str(form), port, denied)
        return None

    def _allowed_by(self, address: Address, port: int | None) -> Verdict | None:
        """Return the permission that names this address or its network: a rule, or `allowed_domains` of every layer
        that has this key.
        """
        # While the port is unknown, a rule for any port is enough.
        if rule := first(self._policy.allow.addresses(address, port, deny=port is None)):
            return Verdict("allow", f"connecting to {address} is allowed", rule.text, rule.source)
        lists = [(web.allowed.find(str(address), literal=True), web) for web in self._webs if web.allowed is not None]
        if not lists or not all(found for found, _ in lists):
            return None
        found, web = lists[0]
        return Verdict("allow", f"{address} is allowed", f"web_access.allowed_domains: {found}", web.layer.sources_name)

    def _allowed(self, name: str, port: int | None) -> list[Rule]:
        return sorted(self._policy.allow.network(name, port, deny=False), key=lambda rule: rule.order)

    def _port(self, host: str, port: int, rules: Iterable[Rule], *, literal: bool) -> Verdict | None:
        """Return the refusal of a port that is neither a default nor named by a layer."""
        naming = [rule for rule in rules if rule.port == str(port)]
        given = [web for web in self._webs if web.ports is not None]
        for web in given:
            if port not in (web.ports or ()) and not any(self._policy.layer_of(rule) is web.layer for rule in naming):
                return _closed(host, port, web.ports or frozenset(), web.layer.sources_name)
        remote = any(web.remote(host, port, literal=literal) for web in self._webs)
        if given or naming or remote or self._internet or port in PORTS:
            return None
        return _closed(host, port, PORTS, None)


def _closed(host: str, port: int, ports: frozenset[int], source: str | None) -> Verdict:
    open_ports = ", ".join(map(str, sorted(ports)[:20])) or "none"
    return Verdict(
        "deny",
        f"port {port} of {host} is not open for this agent",
        None if source is None else "web_access.allowed_ports",
        source,
        f"open ports: {open_ports}; open others with web_access.allowed_ports or network(outbound:{host}:{port})",
    )


def _denied(name: str, port: int | None, rule: Rule) -> Verdict:
    what = name[:200] if port is None else f"{name[:200]}:{port}"
    return Verdict("deny", f"connecting to {what} is denied for this agent", rule.text, rule.source)


def _not_public(shown: str, kind: str) -> Verdict:
    return Verdict(
        "deny",
        f"{shown} is {kind}, and no rule allows it",
        hint="allow such an address with a rule that names the address or its network",
    )


def _named_registries(layer: Layer, sources: Sources) -> Iterable[tuple[tuple[str, int], Verdict]]:
    """Yield the registries that a layer names. Registries of package managers with limits stay closed, because a direct
    connection would bypass the limits. Pip and uv use the package index of the egress proxy.
    """
    for name, manager in sources.package_managers.named().items():
        if name in {"pip", "uv"} or manager.limited or not manager.enabled:
            continue
        for each in manager.registries or ():
            parts = urlsplit(each.url)
            port = parts.port or (80 if parts.scheme == "http" else 443)
            host = (parts.hostname or "").rstrip(".")
            rule = f"package_managers.{name}.registries: {each.name}"
            yield (host, port), Verdict("allow", f"{host} is a registry of {name}", rule, layer.sources_name)


def _open_registries(
    policy: Policy, registries: Iterable[tuple[str, str, int]]
) -> Iterable[tuple[tuple[str, int], Verdict]]:
    """Yield the host's registries, unless a layer switches their package manager off, limits it or names other
    registries for it.
    """
    layers = [sources.package_managers.named() for _, sources in policy.sources]
    shut = {
        name
        for named in layers
        for name, manager in named.items()
        if not manager.enabled or manager.limited or manager.registries is not None
    }
    for name, host, port in registries:
        if name not in shut:
            reason = f"{host} is a registry in the configuration of {name} on the server's machine"
            yield (host, port), Verdict("allow", reason, f"package_managers.{name}", "the server's own configuration")


def _limited_indexes(policy: Policy, indexes: Iterable[str]) -> Iterable[tuple[str, Verdict]]:
    """Yield refusals for the package indexes of pip and uv if there are limits: a direct connection
    would bypass them.
    """
    urls = list(indexes)
    limits: list[tuple[str, str]] = []
    for name, sources in policy.sources:
        for key, manager in (("pip", sources.package_managers.pip), ("uv", sources.package_managers.uv)):
            if manager is None:
                continue
            urls += [each.url for each in manager.registries or ()]
            given = {
                "allowed_packages": manager.allowed_packages is not None,
                "blocked_packages": bool(manager.blocked_packages),
                "max_install_size_mb": manager.max_install_size_mb is not None,
            }
            limits += [(f"package_managers.{key}.{limit}", name) for limit, is_given in given.items() if is_given]
    for url in urls if limits else ():
        host = (urlsplit(url).hostname or "").rstrip(".")
        reason = f"{host} is a package index, and this agent may install only some packages"
        hint = "install with pip or uv as configured in the sandbox; they use the sandbox's own package index"
        yield host, Verdict("deny", reason, *limits[0], hint)
