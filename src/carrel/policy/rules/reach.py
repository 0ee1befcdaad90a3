"""Which hosts, ports and addresses a policy lets an agent reach. The door and the wire decide with the same code.

Built once of a policy and asked often: domains and networks are looked up, not searched. Looks no name up itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from carrel.policy.documents.sources import Sources, WebAccess
from carrel.policy.rules import addresses
from carrel.policy.rules.addresses import Address
from carrel.policy.rules.layers import Layer, Policy
from carrel.policy.rules.remotes import Place, places
from carrel.policy.rules.rules import Rule, first
from carrel.policy.verdict import Verdict

PORTS = frozenset({80, 443})
"""The ports of allowed hosts where nobody says which."""


class Domains:
    """Domains as `sources.json` writes them, laid out for look-ups."""

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
        """The pattern that means a host, which is lower-case and without a trailing dot. An address (`literal`) is
        never below a name, whatever its numbers look like.
        """
        if (found := self._exact.get(host)) is not None:
            return found
        parent = "" if literal else host.partition(".")[2]
        while parent and self._below:
            if (found := self._below.get(parent)) is not None:
                return found
            parent = parent.partition(".")[2]
        return "*" if self._every else None


@dataclass(frozen=True, slots=True)
class _Web:
    """What one layer's `sources.json` says of hosts."""

    layer: Layer
    enabled: bool
    allowed: Domains | None
    blocked: Domains
    ports: frozenset[int] | None
    places: tuple[Place, ...]
    registries: dict[tuple[str, int], Verdict]

    @classmethod
    def of(cls, layer: Layer, sources: Sources) -> _Web:
        web = sources.web_access or WebAccess()
        return cls(
            layer,
            web.enabled,
            None if web.allowed_domains is None else Domains(web.allowed_domains),
            Domains(web.blocked_domains),
            None if web.allowed_ports is None else frozenset(web.allowed_ports),
            places(sources.git),
            dict(_named_registries(layer, sources)),
        )

    def say(self, host: str, port: int | None, *, literal: bool) -> Verdict | None:
        """Allowed or denied by this layer; None when it says nothing."""
        source = self.layer.sources_name
        if not self.enabled:
            return Verdict("deny", f"{host} cannot be reached: web access is off", "web_access.enabled: false", source)
        if blocked := self.blocked.find(host, literal=literal):
            return Verdict(
                "deny", f"{host} is blocked for this agent", f"web_access.blocked_domains: {blocked}", source
            )
        if self.allowed is not None and (allowed := self.allowed.find(host, literal=literal)):
            return Verdict("allow", f"{host} is allowed", f"web_access.allowed_domains: {allowed}", source)
        if place := self.remote(host, port, literal=literal):
            return Verdict("allow", f"{host} is a remote", f"git.allowed_remotes: {place.text}", source)
        if port is not None and (registry := self.registries.get((host, port))):
            return registry
        if self.allowed is None:
            return None
        return Verdict("deny", f"{host} is not among the domains of this agent", "web_access.allowed_domains", source)

    def remote(self, host: str, port: int | None, *, literal: bool) -> Place | None:
        """The git remotes that lie on a host."""
        for each in self.places:
            if port in {None, each.port} and (each.host == host if literal else each.means(host)):
                return each
        return None


class Reach:
    """What a policy says of hosts. `None` from `host` means that nothing is said."""

    def __init__(
        self,
        policy: Policy,
        *,
        indexes: Iterable[str] = (),
        internet: bool = False,
        registries: Iterable[tuple[str, str, int]] = (),
    ):
        """`indexes` are URLs of package indexes that the front uses although no layer names them. With `internet` every
        public host is allowed that no layer denies, at every port unless a layer names the ports. `registries` are the
        places (package manager, host, port) that the host's own package managers use; pip and uv have the front.
        """
        self._internet = internet
        self._host_registries = dict(_open_registries(policy, registries))
        self._policy = policy
        self._webs = tuple(_Web.of(layer, layer.sources) for layer in policy.layers if layer.sources is not None)
        self._fronted = dict(_fronted(policy, indexes))

    def host(self, host: str, port: int | None = None) -> Verdict | None:
        """What is said of a name or an address. `port` None: not known yet."""
        name = host.strip("[]").rstrip(".").lower()
        address = addresses.read(name)
        if address is not None:
            address = addresses.same(address)
            name = str(address)
        shown, literal = name[:200], address is not None
        said = [found for each in self._webs if (found := each.say(name, port, literal=literal))]
        denied = next((each for each in said if each.verdict == "deny"), None) or self._denied(name, port)
        if denied is None and address is not None:
            denied = self._denied_address(address, port)
        if denied is not None:
            return denied
        rules = self._allowed(name, port)
        if address is not None and (words := addresses.private(address)) and self._naming(address, port) is None:
            return _private(shown, words)
        registry = None if port is None else self._registry(name, port)
        if registry is None and port is not None and (refused := self._port(shown, port, rules, literal=literal)):
            return refused
        if fronted := self._fronted.get(name):
            return fronted
        if rules:
            return Verdict("allow", f"connecting to {shown} is allowed", rules[0].text, rules[0].source)
        if said:
            return said[0]
        if registry is not None:
            return registry
        return Verdict("allow", f"{shown} is on the internet", "network: internet") if self._internet else None

    def _registry(self, name: str, port: int) -> Verdict | None:
        """The permission to reach a registry: one that a layer names, else one that the host itself uses."""
        named = (each for web in self._webs if (each := web.registries.get((name, port))) is not None)
        return next(named, None) or self._host_registries.get((name, port))

    def address(self, address: Address, port: int, host: str = "") -> Verdict:
        """What is said of an address that an allowed name, the `host`, turned out to have."""
        if denied := self._denied_address(address, port):
            return denied
        words = addresses.private(address)
        if words is None:
            return Verdict("allow", f"{address} is a public address")
        if (host, port) in self._host_registries and addresses.internal(address):
            return self._host_registries[host, port]
        return self._naming(addresses.same(address), port) or _private(str(address), words)

    def remote(self, host: str, *, literal: bool = False) -> bool:
        """Whether git remotes that some layer names lie on a host."""
        return any(web.remote(host, None, literal=literal) for web in self._webs)

    def _denied(self, name: str, port: int | None) -> Verdict | None:
        rule = first(self._policy.deny.network(name, port, deny=True))
        return None if rule is None else _denied(name, port, rule)

    def _denied_address(self, address: Address, port: int | None) -> Verdict | None:
        """The refusal of an address by its network, in whichever of its forms it is named."""
        for form in addresses.forms(address):
            for web in self._webs:
                if blocked := web.blocked.find(str(form), literal=True):
                    rule = f"web_access.blocked_domains: {blocked}"
                    return Verdict("deny", f"{form} is blocked for this agent", rule, web.layer.sources_name)
            if (denied := first(self._policy.deny.addresses(form, port, deny=True))) is not None:
                return _denied(str(form), port, denied)
        return None

    def _naming(self, address: Address, port: int | None) -> Verdict | None:
        """What names this very address or its network: a rule, or the domains of every layer that has the key."""
        # Without a port, a rule for any one of them is enough not to refuse yet.
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
        """The refusal of a port that is neither usual nor named."""
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
        f"open ports: {open_ports}; others are opened by web_access.allowed_ports or network(outbound:{host}:{port})",
    )


def _denied(name: str, port: int | None, rule: Rule) -> Verdict:
    what = name[:200] if port is None else f"{name[:200]}:{port}"
    return Verdict("deny", f"connecting to {what} is denied for this agent", rule.text, rule.source)


def _private(shown: str, words: str) -> Verdict:
    return Verdict(
        "deny",
        f"{shown} is {words}, and no rule names it",
        hint="such addresses are reached only where a rule allows the address or its network",
    )


_FRONTED = frozenset({"pip", "uv"})
"""Package managers whose registries the front asks in the place of the sandbox."""


def _named_registries(layer: Layer, sources: Sources) -> Iterable[tuple[tuple[str, int], Verdict]]:
    """The registries that a layer names. Those of limited package managers stay closed: only the front could hold the
    limits.
    """
    for name, manager in sources.package_managers.named().items():
        if name in _FRONTED or manager.limited or not manager.enabled:
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
    """Those of the host's registries that are open: no layer switches their package manager off, limits it or names
    other registries for it.
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
            words = f"{host} is a registry that {name} on this server's machine is configured with"
            yield (host, port), Verdict("allow", words, f"package_managers.{name}", "the server's own configuration")


def _fronted(policy: Policy, indexes: Iterable[str]) -> Iterable[tuple[str, Verdict]]:
    """The hosts of package indexes whose rules hold only where the front asks for the sandbox."""
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
        reason = f"{host} is a package index whose packages are limited for this agent"
        hint = "install with pip or uv as they are set up here; they go through the index of the sandbox"
        yield host, Verdict("deny", reason, *limits[0], hint)
