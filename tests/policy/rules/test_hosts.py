from __future__ import annotations

from ipaddress import ip_address

import pytest
from tests.support.policies import policy, settings
from tests.support.policies import sources as of

from carrel.policy.rules.decide import decide_network
from carrel.policy.rules.hosts import Domains, HostPolicy
from carrel.policy.rules.layers import Layer, Policy


def hosts(*webs: dict[str, object], allow: list[str] | None = None, deny: list[str] | None = None) -> HostPolicy:
    """What a policy lets hosts whose layers say these things of the web; the first has the rules too."""
    rules = settings(allow, deny) if allow is not None or deny is not None else None
    layers = [Layer(f"settings-{n}", None, of(web_access=web), f"sources-{n}") for n, web in enumerate(webs)]
    first = layers[0] if layers else Layer("settings-0")
    return HostPolicy(
        Policy.of([Layer(first.name, rules, first.sources, first.sources_name), *layers[1:]], context_id="c")
    )


def said(found: object) -> tuple[str, str | None] | None:
    return None if found is None else (found.verdict, found.rule)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("host", "answer"),
    [("a.example", None), ("b.a.example", "*.a.example"), ("c.b.a.example", "*.a.example"), ("xa.example", None), ("e.example", "E.example."), ("x.e.example", None), ("", None), (".a.example", "*.a.example"),
     ("example", None), ("a.example.evil.example", None)],
)  # fmt: skip
def test_domains_are_found(host: str, answer: str | None) -> None:
    assert Domains(["*.a.example", "E.example."]).find(host) == answer


def test_an_address_is_never_below_a_name() -> None:
    domains = Domains(["*.0.0.1", "8.8.8.8"])
    assert domains.find("127.0.0.1", literal=True) is None
    assert domains.find("8.8.8.8", literal=True) == "8.8.8.8"
    assert Domains(["*"]).find("8.8.8.8", literal=True) == "*"


def test_blocked_beats_allowed_and_disabled_beats_all() -> None:
    found = hosts({"allowed_domains": ["*.a.example"], "blocked_domains": ["b.a.example"]})
    assert said(found.host("c.a.example")) == ("allow", "web_access.allowed_domains: *.a.example")
    assert said(found.host("C.A.example.")) == ("allow", "web_access.allowed_domains: *.a.example")
    assert said(found.host("b.a.example")) == ("deny", "web_access.blocked_domains: b.a.example")
    assert said(found.host("a.example")) == ("deny", "web_access.allowed_domains")
    off = hosts({"enabled": False, "allowed_domains": ["a.example"]}, allow=["network(outbound:a.example)"])
    assert said(off.host("a.example")) == ("deny", "web_access.enabled: false")
    assert hosts({}).host("a.example") is None
    assert HostPolicy(Policy.open()).host("a.example") is None


def test_domains_of_the_example(example: Policy) -> None:
    only = HostPolicy(Policy.of([Layer("x", None, example.layers[0].sources)]))
    hosts = {
        "api.github.com": "allow", "API.GitHub.com.": "allow", "x.api.github.com": "deny", "a.internal": "deny", "metadata.google.internal": "deny",
        "huggingface.co": "allow", "huggingface.co.evil.example": "deny", "": "deny", "github.com": "allow", "gist.github.com": "deny", "python-index.example": "deny",
    }  # fmt: skip
    assert {host: (said(only.host(host, 443)) or ("",))[0] for host in hosts} == hosts
    assert said(HostPolicy(example).host("api.github.com", 443)) == ("deny", "network(outbound:*)")


def test_a_deny_of_any_layer_holds() -> None:
    both = hosts({"allowed_domains": ["a.example", "b.example"]}, {"allowed_domains": ["b.example", "c.example"]})
    assert [(said(both.host(f"{each}.example")) or ("",))[0] for each in "abc"] == ["deny", "allow", "deny"]
    rules = hosts({"allowed_domains": ["a.example"]}, allow=["network(outbound:b.example)"], deny=["network(outbound:a.example:80)"])  # fmt: skip
    assert said(rules.host("a.example", 80)) == ("deny", "network(outbound:a.example:80)")
    assert said(rules.host("a.example")) == ("deny", "network(outbound:a.example:80)")
    assert said(rules.host("a.example", 443)) == ("allow", "web_access.allowed_domains: a.example")
    assert said(rules.host("b.example", 443)) == ("deny", "web_access.allowed_domains")


def test_hosts_of_git_remotes_are_allowed_by_their_layer() -> None:
    git = {
        "allowed_remotes": [
            "https://git.example/*",
            "https://*.many.example/*",
            "git@ssh.example:*",
            "https://odd.example:8443/x",
        ]
    }
    layer = Layer(
        "s", None, of(web_access={"allowed_domains": ["a.example"], "blocked_domains": ["b.many.example"]}, git=git)
    )
    found = HostPolicy(Policy.of([layer]))
    assert said(found.host("git.example", 443)) == ("allow", "git.allowed_remotes: https://git.example/*")
    assert said(found.host("a.many.example", 443)) == ("allow", "git.allowed_remotes: https://*.many.example/*")
    assert said(found.host("ssh.example", 22)) == ("allow", "git.allowed_remotes: git@ssh.example:*")
    assert said(found.host("odd.example", 8443)) == ("allow", "git.allowed_remotes: https://odd.example:8443/x")
    for host, port in (
        ("git.example", 22),
        ("many.example", 443),
        ("b.many.example", 443),
        ("ssh.example", 443),
        ("odd.example", 443),
    ):
        assert (said(found.host(host, port)) or ("",))[0] == "deny"
    other = Layer("t", None, of(web_access={"allowed_domains": ["a.example"]}))
    assert said(HostPolicy(Policy.of([layer, other])).host("git.example", 443)) == (
        "deny",
        "web_access.allowed_domains",
    )
    assert HostPolicy(Policy.of([Layer("s", None, of(git={**git, "enabled": False}))])).host("git.example", 443) is None
    assert found.remote("git.example")
    assert not found.remote("a.example")


def test_usual_ports_are_open_and_others_where_they_are_named() -> None:
    found = hosts(
        {"allowed_domains": ["a.example"]}, allow=["network(outbound:a.example:22)", "network(outbound:a.example:*)"]
    )
    for port, answer in ((80, "allow"), (443, "allow"), (22, "allow"), (25, "deny"), (8080, "deny")):
        assert (said(found.host("a.example", port)) or ("",))[0] == answer
    refused = found.host("a.example", 25)
    assert refused is not None
    assert "network(outbound:a.example:25)" in (refused.hint or "")
    assert (said(hosts().host("nobody.example", 22)) or ("",))[0] == "deny"
    assert hosts().host("nobody.example", 443) is None


def test_of_named_ports_those_of_every_layer_are_open() -> None:
    every = {"allowed_domains": ["a.example"]}
    found = hosts({**every, "allowed_ports": [443, 22, 8080]}, {**every, "allowed_ports": [22, 443, 9000]}, every)
    open_ports = [
        port for port in (22, 80, 443, 8080, 9000) if (said(found.host("a.example", port)) or ("",))[0] == "allow"
    ]
    assert open_ports == [22, 443]
    none = hosts({**every, "allowed_ports": []})
    assert said(none.host("a.example", 443)) == ("deny", "web_access.allowed_ports")


def test_a_rule_opens_a_port_only_for_its_own_layer() -> None:
    web = of(web_access={"allowed_domains": ["a.example"], "allowed_ports": [443]})
    naming = settings(["network(outbound:a.example:22)"])
    assert said(HostPolicy(Policy.of([Layer("x", naming, web)], context_id="c")).host("a.example", 22)) == ("allow", "network(outbound:a.example:22)")  # fmt: skip
    below = Policy.of([Layer("x", None, web), Layer("x", naming)], context_id="c")
    assert said(HostPolicy(below).host("a.example", 22)) == ("deny", "web_access.allowed_ports")


PRIVATE = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[fd00::1]"]


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_need_a_rule_that_names_them(host: str) -> None:
    nothing = hosts()
    found = nothing.host(host, 80)
    assert found is not None
    assert (found.verdict, found.rule) == ("deny", None)
    assert nothing.address(ip_address(host.strip("[]")), 80).verdict == "deny"
    bare = host.strip("[]").removeprefix("::ffff:")
    named = hosts(allow=[f"network(outbound:[{bare}])" if ":" in bare else f"network(outbound:{bare})"])
    assert (said(named.host(host, 80)) or ("",))[0] == "allow"
    assert named.address(ip_address(host.strip("[]")), 80).verdict == "allow"


def test_networks_in_rules_hold_for_what_was_looked_up() -> None:
    found = hosts(allow=["network(outbound:10.0.0.0/8:8080)", "network(outbound:a.example)"], deny=["network(outbound:10.1.0.0/16)", "network(outbound:93.184.0.0/16:80)"])  # fmt: skip
    answers = {("10.0.0.1", 8080): "allow", ("10.0.0.1", 80): "deny", ("10.1.0.1", 8080): "deny", ("93.184.1.1", 80): "deny", ("93.184.1.1", 443): "allow", ("192.168.0.1", 80): "deny",
               ("::ffff:10.0.0.1", 8080): "allow", ("::ffff:10.1.0.1", 8080): "deny", ("64:ff9b::5db8:101", 80): "deny", ("64:ff9b::a00:1", 8080): "deny"}  # fmt: skip
    assert {each: found.address(ip_address(each[0]), each[1]).verdict for each in answers} == answers
    assert (said(found.host("10.0.0.1", 8080)) or ("",))[0] == "allow"
    assert (said(found.host("10.0.0.1")) or ("ask",))[0] == "ask"
    assert (said(found.host("64:ff9b::5db8:101", 80)) or ("",))[0] == "deny"


def test_domains_that_are_addresses() -> None:
    found = hosts({"allowed_domains": ["10.0.0.1", "9.9.9.9", "*.0.0.2"], "blocked_domains": ["9.9.9.10"]}, {})
    assert said(found.host("10.0.0.1", 80)) == ("allow", "web_access.allowed_domains: 10.0.0.1")
    assert found.address(ip_address("10.0.0.1"), 80).rule == "web_access.allowed_domains: 10.0.0.1"
    assert said(found.host("9.9.9.9", 80)) == ("allow", "web_access.allowed_domains: 9.9.9.9")
    assert said(found.host("10.0.0.2", 80)) == ("deny", "web_access.allowed_domains")
    assert found.address(ip_address("10.0.0.2"), 80).verdict == "deny"
    assert found.address(ip_address("::ffff:9.9.9.10"), 80).rule == "web_access.blocked_domains: 9.9.9.10"
    one_more = hosts({"allowed_domains": ["10.0.0.1", "a.example"]}, {"allowed_domains": ["a.example"]})
    assert one_more.address(ip_address("10.0.0.1"), 80).verdict == "deny"


def test_a_public_address_asks() -> None:
    assert hosts().host("9.9.9.9", 443) is None
    assert decide_network(policy(), "9.9.9.9", 443).verdict == "ask"


@pytest.mark.parametrize("limit", [{"blocked_packages": ["x"]}, {"allowed_packages": []}, {"max_install_size_mb": 1}])
@pytest.mark.parametrize("key", ["pip", "uv"])
def test_indexes_with_limits_are_only_for_the_front(key: str, limit: dict[str, object]) -> None:
    registries = [{"name": "x", "url": "https://Index.example:8443/simple"}]
    web = {"allowed_domains": ["index.example", "host-index.example"]}
    layers = [Layer("s", None, of(package_managers={key: {"registries": registries, **limit}}, web_access=web))]
    found = HostPolicy(Policy.of(layers), indexes=["https://host-index.example/"])
    for host in ("index.example", "host-index.example"):
        remark = found.host(host, 443)
        assert remark is not None
        assert (remark.verdict, remark.rule) == ("deny", f"package_managers.{key}.{next(iter(limit))}")
        assert "pip or uv" in (remark.hint or "")
    free = HostPolicy(
        Policy.of([Layer("s", None, of(package_managers={key: {"registries": registries}}, web_access=web))])
    )
    assert (said(free.host("index.example", 443)) or ("",))[0] == "allow"


@pytest.mark.parametrize(
    ("host", "port"), [("a.example", 443), ("a.example", 8443), ("8.8.8.8", 443), ("2606:4700::1111", 80)]
)
def test_internet_allows_public_hosts_that_no_layer_speaks_of(host: str, port: int) -> None:
    assert said(HostPolicy(Policy.open(), internet=True).host(host, port)) == ("allow", "network: internet")


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "10.0.0.1", "127.0.0.1", "::1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "fd00:ec2::254"],
)
def test_internet_never_reaches_private_or_metadata_addresses(address: str) -> None:
    hosts = HostPolicy(Policy.open(), internet=True)
    remark = hosts.host(address, 443)
    assert remark is not None and remark.verdict == "deny"
    assert hosts.address(ip_address(address), 443).verdict == "deny", "a name must not lead there either"


def test_internet_leaves_denials_and_domains_of_layers_in_force() -> None:
    rules = settings([], ["network(outbound:bad.example)"])
    denying = HostPolicy(
        Policy.of([Layer("s", rules, of(web_access={"blocked_domains": ["worse.example"]}))]), internet=True
    )
    for host in ("bad.example", "worse.example"):
        remark = denying.host(host, 443)
        assert remark is not None and remark.verdict == "deny"
    assert said(denying.host("good.example", 443)) == ("allow", "network: internet")
    only = HostPolicy(Policy.of([Layer("s", None, of(web_access={"allowed_domains": ["a.example"]}))]), internet=True)
    assert said(only.host("b.example", 443)) == ("deny", "web_access.allowed_domains")
    ports = HostPolicy(Policy.of([Layer("s", None, of(web_access={"allowed_ports": [443]}))]), internet=True)
    assert said(ports.host("a.example", 22)) == ("deny", "web_access.allowed_ports")


NPM = ("npm", "npm.example", 443)


def with_managers(managers: dict[str, object], web: dict[str, object] | None = None) -> HostPolicy:
    given = of(package_managers=managers, **({} if web is None else {"web_access": web}))
    return HostPolicy(
        Policy.of([Layer("s", None, given, "sources.json")]), registries=[NPM, ("go", "go.example", 8443)]
    )


def test_registries_of_the_host_are_open_where_nothing_is_said_of_them() -> None:
    hosts = HostPolicy(Policy.open(), registries=[NPM, ("go", "go.example", 8443)])
    assert said(hosts.host("npm.example", 443)) == ("allow", "package_managers.npm")
    assert said(hosts.host("go.example", 8443)) == ("allow", "package_managers.go")
    assert hosts.host("npm.example", 80) is None, "another port is another place"
    assert hosts.host("other.example", 443) is None


@pytest.mark.parametrize(
    "manager",
    [
        {"enabled": False},
        {"blocked_packages": ["left-pad"]},
        {"allowed_packages": []},
        {"max_install_size_mb": 1},
        {"registries": [{"name": "ours", "url": "https://ours.example/"}]},
    ],
)
def test_registries_of_the_host_stay_closed_where_a_layer_limits_their_manager(manager: dict[str, object]) -> None:
    hosts = with_managers({"npm": manager})
    assert hosts.host("npm.example", 443) is None
    assert said(hosts.host("go.example", 8443)) == ("allow", "package_managers.go")


def test_registries_that_a_layer_names_are_open_even_beside_its_domains() -> None:
    named = {"npm": {"registries": [{"name": "ours", "url": "https://ours.example:4873/npm/"}]}}
    for web in (None, {"allowed_domains": ["a.example"]}):
        hosts = with_managers(named, web)
        assert said(hosts.host("ours.example", 4873)) == ("allow", "package_managers.npm.registries: ours")
    limited = {"npm": {"registries": named["npm"]["registries"], "blocked_packages": ["left-pad"]}}
    assert with_managers(limited).host("ours.example", 443) is None


def test_domains_and_denials_of_a_layer_hold_for_registries_of_the_host() -> None:
    only = with_managers({}, {"allowed_domains": ["a.example"]})
    assert said(only.host("npm.example", 443)) == ("deny", "web_access.allowed_domains")
    blocked = with_managers({}, {"blocked_domains": ["npm.example"]})
    assert said(blocked.host("npm.example", 443)) == ("deny", "web_access.blocked_domains: npm.example")


@pytest.mark.parametrize(
    ("address", "verdict"),
    [("10.1.2.3", "allow"), ("fd12::1", "allow"), ("127.0.0.1", "deny"), ("169.254.169.254", "deny"),
     ("fd00:ec2::254", "deny"), ("::1", "deny"), ("::ffff:127.0.0.1", "deny"), ("fe80::1", "deny")],
)  # fmt: skip
def test_registry_of_the_host_may_be_internal_but_never_this_machine_or_metadata(address: str, verdict: str) -> None:
    hosts = with_managers({})
    assert hosts.address(ip_address(address), 443, "npm.example").verdict == verdict
    assert hosts.address(ip_address(address), 443, "other.example").verdict == "deny"
    named = with_managers({"npm": {"registries": [{"name": "ours", "url": "https://ours.example/"}]}})
    assert named.address(ip_address(address), 443, "ours.example").verdict == "deny", "only the host's configuration"
