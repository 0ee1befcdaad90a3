from __future__ import annotations

import pytest
from tests.support.records import Promising

from carrel.config import load
from carrel.control.sessions.placement import LIMIT_CAPABILITY, default_network, resolve
from carrel.errors import InvalidRequest, Unsupported
from carrel.models import Network, Trust
from carrel.providers.base import Capability

SETTINGS = load({"sandbox.memory_mb": 100}, environ={})


def promising(*capabilities: Capability) -> dict[str, Promising]:
    provider = Promising(Capability.NETWORK_NONE, *capabilities)
    return {provider.name: provider}


def test_defaults_are_limits_that_the_provider_can_enforce():
    providers = promising(Capability.LIMIT_MEMORY)
    found = resolve(
        SETTINGS, providers, provider="auto", trust=Trust.HIGH, network=None, limits={"disk_mb": 7}, host_memory_mb=500
    )
    assert found.network is Network.NONE
    assert (found.limits.memory_mb, found.limits.cpus, found.limits.disk_mb) == (100, None, 7)
    assert "disk_mb" not in LIMIT_CAPABILITY


def test_a_limit_or_a_network_that_cannot_be_enforced_is_refused():
    for asked in ({"limits": {"cpus": 1}, "network": None}, {"limits": {}, "network": Network.HOST}):
        with pytest.raises(Unsupported):
            resolve(SETTINGS, promising(), provider="auto", trust=Trust.HIGH, host_memory_mb=500, **asked)


def test_an_unsafe_provider_needs_the_operator():
    providers = promising()
    next(iter(providers.values())).unsafe = True
    with pytest.raises(InvalidRequest, match="switched off"):
        resolve(
            SETTINGS, providers, provider="auto", trust=Trust.HIGH, network=Network.NONE, limits={}, host_memory_mb=500
        )


def test_more_memory_than_the_host_has_is_refused():
    asked = {"memory_mb": 900 * 1024}
    with pytest.raises(InvalidRequest, match="asks for 921600 MB of memory, and this host has 500 MB") as caught:
        resolve(SETTINGS, {}, provider="auto", trust=Trust.HIGH, network=None, limits=asked, host_memory_mb=500)
    assert caught.value.field == "limits.memory_mb"


@pytest.mark.parametrize(
    ("given", "networks"),
    [
        ({}, ("none", "none", "none")),
        ({"sandbox.network": "internet"}, ("internet", "internet", "none")),
        ({"sandbox.low_trust_network": "allowlist"}, ("none", "none", "allowlist")),
        ({"sandbox.network": "allowlist", "sandbox.low_trust_network": "none"}, ("allowlist", "allowlist", "none")),
    ],
)
def test_the_default_network_is_that_of_the_trust_unless_the_operator_names_one(given, networks):
    sandbox = load(given, environ={}).sandbox
    unsafe = Promising()
    unsafe.unsafe = True
    for trust, network in zip((Trust.HIGH, Trust.MEDIUM, Trust.LOW), networks, strict=True):
        assert default_network(sandbox, trust, Promising()) == network
        assert default_network(sandbox, trust, unsafe) is Network.HOST


def test_a_lifetime_is_at_most_the_operators_which_is_also_the_default():
    settings = load({"sandbox.lifetime_s": 60}, environ={})
    how = {"provider": "auto", "trust": Trust.HIGH, "network": None, "host_memory_mb": 500}
    assert resolve(settings, promising(), limits={}, **how).limits.lifetime_s == 60
    assert resolve(settings, promising(), limits={"lifetime_s": 5}, **how).limits.lifetime_s == 5
    with pytest.raises(InvalidRequest, match="lifetime of 61 s, and this server allows 60 s"):
        resolve(settings, promising(), limits={"lifetime_s": 61}, **how)


def test_the_usual_provider_is_not_taken_where_it_is_too_weak():
    weak, strong = Promising(Capability.NETWORK_NONE), Promising(Capability.NETWORK_NONE)
    strong.name, strong.isolation_level = "gvisor", 2
    settings = load({"sandbox.provider": "namespace"}, environ={})

    def chosen(trust: Trust, **more: object) -> str:
        how = {"provider": "auto", "network": None, "limits": {}, "host_memory_mb": 500, **more}
        return resolve(settings, {"namespace": weak, "gvisor": strong}, trust=trust, **how).provider.name

    assert (chosen(Trust.MEDIUM), chosen(Trust.LOW), chosen(Trust.MEDIUM, least_level=2)) == (
        "namespace",
        "gvisor",
        "gvisor",
    )
    assert chosen(Trust.MEDIUM, least_level=2, provider="namespace") == "namespace", "the caller names it"
