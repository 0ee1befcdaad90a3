from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import Target
from carrel.egress.outbound.names import of_address, read_authority
from carrel.egress.outbound.rules import MB, EgressLimits, EgressRules, PackageRules
from carrel.egress.plan import PackageIndex
from carrel.policy.documents.settings import SettingsDocument
from carrel.policy.documents.sources import Registry, Sources
from carrel.policy.rules.decide import decide_network
from carrel.policy.rules.layers import Layer, Policy


def sources(**keys: object) -> Sources:
    return Sources.model_validate(keys)


def settings(allow: list[str] | None = None, deny: list[str] | None = None) -> SettingsDocument:
    return SettingsDocument.model_validate({"permissions": {"allow": allow or [], "deny": deny or []}})


def rules(*layers: Sources, allow: list[str] | None = None, deny: list[str] | None = None) -> EgressRules:
    own = [Layer("settings.json", settings(allow, deny))] if allow is not None or deny is not None else []
    return EgressRules(
        Policy.of([*own, *(Layer(f"l{n}", None, each) for n, each in enumerate(layers))], context_id="c")
    )


def web(**keys: object) -> Sources:
    return sources(web_access=keys)


def to(text: str) -> Target:
    return read_authority(text, 443)


def test_what_is_not_said_asks() -> None:
    for found in (EgressRules(Policy.open()), rules(), rules(web()), rules(allow=[])):
        said = found.decide(to("a.example"))
        assert (said.verdict, said.rule) == ("ask", None)
        assert "a.example:443" in said.reason
        assert found.decide(to("9.9.9.9")).verdict == "ask"
        assert found.decide(to("10.0.0.1")).verdict == "deny"
        assert found.decide(to("a.example:25")).verdict == "deny"


def test_said_names_the_rule_and_where_it_stands() -> None:
    found = rules(web(allowed_domains=["a.example", "b.example"]), deny=["network(outbound:b.example)"])
    said = found.decide(to("a.example"))
    assert (said.verdict, said.rule, said.source) == ("allow", "web_access.allowed_domains: a.example", "sources.json")
    said = found.decide(to("b.example"))
    assert (said.verdict, said.rule, said.source) == ("deny", "network(outbound:b.example)", "settings.json")
    said = found.decide(to("a.example:22"))
    assert (said.verdict, bool(said.hint)) == ("deny", True)


def test_addresses_after_the_look_up() -> None:
    found = rules(
        web(allowed_domains=["a.example"]),
        allow=["network(outbound:10.0.0.0/8)"],
        deny=["network(outbound:10.9.0.0/16)"],
    )
    answers = {
        "10.0.0.1": "allow",
        "10.9.0.1": "deny",
        "192.168.0.1": "deny",
        "9.9.9.9": "allow",
        "::1": "deny",
        "::ffff:10.0.0.1": "allow",
        "169.254.169.254": "deny",
    }
    assert {each: found.check_address(to("a.example"), ip_address(each)).verdict for each in answers} == answers


def test_opaque_and_inspected_hosts_are_those_of_every_layer_that_names_any() -> None:
    one = web(opaque_domains=["a.example", "*.b.example", "9.9.9.9"], inspected_domains=["c.example"])
    two = web(opaque_domains=["x.b.example", "d.example"])
    credited = web(credentials=[{"host": "Api.example", "secret": "token"}])
    assert rules(one).opaque(to("a.example"))
    assert rules(one).opaque(to("9.9.9.9"))
    assert not rules(one, two).opaque(to("a.example"))
    assert rules(one, two, credited).opaque(to("x.b.example"))
    assert not rules(one, two).opaque(to("d.example"))
    assert not rules().opaque(to("a.example"))
    assert not rules(web(opaque_domains=["*.9.9.9"])).opaque(to("9.9.9.9"))
    assert rules(one, credited).inspected(to("c.example"))
    assert rules(one, credited).inspected(to("api.example"))
    assert not rules(one, credited).inspected(to("a.example"))
    assert not rules(one, web(inspected_domains=[])).inspected(to("c.example"))


def test_of_several_limits_the_least_holds() -> None:
    one = web(max_connections=10, max_download_mb=5, max_connections_per_minute=7)
    two = web(max_connections=3, max_upload_mb=2, max_download_mb=9)
    assert rules(one, two).limits == EgressLimits(3, 7, 5 * MB, 2 * MB)
    assert rules().limits == EgressLimits()


def test_clones_are_capped_on_the_hosts_of_remotes() -> None:
    git = {"allowed_remotes": ["https://git.example/*"], "max_clone_size_mb": 10}
    found = rules(sources(git=git), sources(git={"max_clone_size_mb": 4}))
    assert found.most_received(to("git.example")) == 4 * MB
    assert found.most_received(to("a.example")) is None
    assert rules(sources(git={"allowed_remotes": ["https://git.example/*"]})).most_received(to("git.example")) is None


def test_packages_of_all_layers_together() -> None:
    a, b = {"name": "a", "url": "https://a.example/simple", "trusted": True}, {"name": "b", "url": "https://b.example/"}
    one = sources(
        package_managers={
            "pip": {
                "registries": [b, a],
                "blocked_packages": ["X_y"],
                "allowed_packages": ["A", "b"],
                "max_install_size_mb": 9,
            }
        }
    )
    two = sources(
        package_managers={
            "pip": {"registries": [{**a, "url": a["url"] + "/", "trusted": False}], "allowed_packages": ["a", "c"]},
            "uv": {"blocked_packages": ["z"], "max_install_size_mb": 3},
        }
    )
    assert rules(one, two).packages == PackageRules(
        True,
        (Registry(name="a", url="https://a.example/simple", trusted=False),),
        frozenset({"x-y", "z"}),
        frozenset({"a"}),
        3 * MB,
    )
    assert rules().packages == PackageRules()
    assert not rules(one, sources(package_managers={"pip": {"enabled": False}})).packages.enabled
    assert rules(sources(package_managers={"pip": {"enabled": False}, "uv": {}})).packages.enabled


def test_the_index_of_the_host_is_for_the_front_too() -> None:
    limited = sources(
        package_managers={"pip": {"blocked_packages": ["x"]}}, web_access={"allowed_domains": ["index.example"]}
    )
    policy, index = (
        Policy.of([Layer("x", None, limited)]),
        PackageIndex("host", "https://user:password@index.example/simple"),
    )
    said = EgressRules(policy, indexes=[index]).decide(to("index.example"))
    assert said.verdict == "deny"
    assert "password" not in str(said)
    assert EgressRules(policy).decide(to("index.example")).verdict == "allow"


HOSTS = [
    "a.example",
    "b.a.example",
    "c.b.a.example",
    "git.example",
    "index.example",
    "10.0.0.1",
    "9.9.9.9",
    "127.0.0.1",
]
PATTERNS = st.lists(st.sampled_from([*HOSTS, "*.a.example", "*.b.a.example"]), max_size=4)
RULES = st.lists(
    st.builds(
        "network(outbound:{}{})".format,
        st.sampled_from([*HOSTS, "*.a.example", "10.0.0.0/8", "9.0.0.0/8", "127.0.0.0/8"]),
        st.sampled_from(["", ":443", ":22", ":*"]),
    ),
    max_size=4,
)
WEB = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.sampled_from([True, True, True, False]),
        "allowed_domains": PATTERNS,
        "blocked_domains": PATTERNS,
        "allowed_ports": st.lists(st.sampled_from([22, 80, 443]), max_size=3),
    },
)
GIT = st.fixed_dictionaries(
    {"enabled": st.booleans(), "allowed_remotes": st.just(["https://git.example/*", "ssh://a.example/x"])}
)
PIP = st.fixed_dictionaries(
    {"registries": st.just([{"name": "x", "url": "https://index.example/"}])},
    optional={"blocked_packages": st.just(["x"])},
)
SOURCES = st.fixed_dictionaries(
    {}, optional={"web_access": WEB, "git": GIT, "package_managers": st.fixed_dictionaries({"pip": PIP})}
)


def layer(given_rules: tuple[list[str], list[str]] | None, given_sources: dict[str, object] | None) -> Layer:
    return Layer(
        "x",
        None if given_rules is None else settings(*given_rules),
        None if given_sources is None else Sources.model_validate(given_sources),
    )


LAYERS = st.lists(st.builds(layer, st.none() | st.tuples(RULES, RULES), st.none() | SOURCES), max_size=3)


@given(LAYERS, st.sampled_from(HOSTS), st.sampled_from([22, 25, 80, 443]))
def test_the_door_and_the_wire_agree(layers: list[Layer], host: str, port: int) -> None:
    """Except that the wire asks, or refuses a port or an address, where the door allows because nobody said anything."""
    policy = Policy.of(layers, context_id="c")
    wire, door = EgressRules(policy).decide(read_authority(f"{host}:{port}", None)), decide_network(policy, host, port)
    if wire.verdict == "ask":
        assert door.verdict == "ask" or (door.verdict, door.rule) == ("allow", None)
    elif policy.governed or policy.sources:
        assert (wire.verdict, wire.rule, wire.source) == (door.verdict, door.rule, door.source)
    else:
        assert wire.verdict == "deny"


@given(LAYERS, st.sampled_from(HOSTS), st.sampled_from([22, 25, 80, 443]))
def test_an_allowed_connection_is_named_by_something(layers: list[Layer], host: str, port: int) -> None:
    found = EgressRules(Policy.of(layers, context_id="c"))
    target = read_authority(f"{host}:{port}", None)
    said = found.decide(target)
    assert said.reason
    if said.verdict == "allow":
        assert said.rule
        assert said.source
        for layer in layers:
            given_web = layer.sources.web_access if layer.sources else None
            if given_web is not None:
                assert given_web.enabled
                assert host not in given_web.blocked_domains
    if target.literal is not None and said.verdict == "allow":
        assert found.check_address(target, target.literal).verdict == "allow"


@given(LAYERS, st.ip_addresses(v=4), st.sampled_from([80, 443]))
def test_every_form_of_an_address_is_decided_as_strictly(layers: list[Layer], address: object, port: int) -> None:
    found = EgressRules(Policy.of(layers, context_id="c"))
    own = found.check_address(to("a.example"), ip_address(str(address)))
    mapped = ip_address(f"::ffff:{address}")
    assert found.check_address(to("a.example"), mapped).verdict == own.verdict
    assert found.decide(of_address(mapped, port)) == found.decide(of_address(ip_address(str(address)), port))
    if own.verdict == "deny":
        for form in ("64:ff9b::{}", "64:ff9b:1::{}", "::{}", "::ffff:0:{}"):
            assert found.check_address(to("a.example"), ip_address(form.format(address))).verdict == "deny"


@pytest.mark.parametrize("host", ["localhost", "metadata.google.internal"])
def test_names_of_the_inside_are_decided_by_their_addresses(host: str) -> None:
    found = rules(web(allowed_domains=[host]))
    assert found.decide(to(host)).verdict == "allow"
    assert found.check_address(to(host), ip_address("127.0.0.1")).verdict == "deny"
