from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.records import SESSION, Promising

from carrel.config import EgressSettings
from carrel.control.sessions.network_mode import fit_network, names_hosts, opens_hosts
from carrel.errors import Denied, InvalidRequest
from carrel.models import Network, State
from carrel.policy.documents import settings, sources
from carrel.policy.rules.layers import Layer, Policy
from carrel.providers.base import Capability
from carrel.store import SessionRecord

RECORD = replace(SESSION, state=State.CREATING)
OFF = EgressSettings()
ON = EgressSettings(allow_bridge=True, allow_host=True)


PROVIDER = Promising(Capability.NETWORK_ALLOWLIST)


def policy(
    *, web: str | None = None, git: str | None = None, rules: str | None = None, managers: str | None = None
) -> Policy:
    given_parts = (("web_access", web), ("git", git), ("package_managers", managers))
    parts = [f'"{key}": {value}' for key, value in given_parts if value]
    given = sources.load("{" + ", ".join(parts) + "}")
    allowed = None if rules is None else settings.load(f'{{"permissions": {rules}}}')
    return Policy.of([Layer("settings.json", allowed, given)], context_id="c", workspace="/workspace")


def fitted(record: SessionRecord, asked: Network | None, by: Policy, given: EgressSettings = OFF) -> Network:
    return fit_network(record, asked, by, given, PROVIDER, default=Network.NONE).network


@pytest.mark.parametrize(
    "by",
    [
        policy(web='{"allowed_domains": ["a.example"]}'),
        policy(git='{"allowed_remotes": ["https://a.example/*"]}'),
        policy(rules='{"allow": ["network(outbound:a.example)"]}'),
        policy(rules='{"allow": ["network(outbound:192.0.2.0/24)"]}'),
    ],
)
def test_who_may_reach_hosts_gets_the_proxy_without_asking(by: Policy) -> None:
    assert opens_hosts(by) and names_hosts(by)
    assert fitted(RECORD, None, by) is Network.ALLOWLIST
    assert fitted(RECORD, Network.NONE, by) is Network.NONE
    assert fit_network(RECORD, None, by, OFF, Promising(), default=Network.NONE).network is Network.NONE


@pytest.mark.parametrize(
    "managers", ['{"pip": {}}', '{"npm": {"registries": [{"name": "a", "url": "https://a.example/"}]}}']
)
def test_package_managers_alone_get_the_proxy(managers: str) -> None:
    assert fitted(RECORD, None, policy(managers=managers)) is Network.ALLOWLIST


@pytest.mark.parametrize(
    "by",
    [
        Policy.open(),
        policy(managers='{"pip": {"enabled": false}}'),
        policy(rules='{"allow": ["shell(ls:*)"]}'),
        policy(web='{"blocked_domains": ["a.example"]}'),
        policy(git='{"enabled": false, "allowed_remotes": ["https://a.example/*"]}'),
    ],
)
def test_who_is_told_of_no_host_stays_alone(by: Policy) -> None:
    assert not opens_hosts(by)
    assert fitted(RECORD, None, by) is Network.NONE
    assert fitted(replace(RECORD, network=Network.ALLOWLIST), Network.ALLOWLIST, by) is Network.ALLOWLIST


def test_no_web_means_no_network() -> None:
    by = policy(web='{"enabled": false, "allowed_domains": ["a.example"]}')
    assert fitted(RECORD, None, by) is Network.NONE
    assert fitted(replace(RECORD, network=Network.ALLOWLIST), None, by) is Network.NONE
    with pytest.raises(Denied, match="allows no network"):
        fitted(replace(RECORD, network=Network.ALLOWLIST), Network.ALLOWLIST, by)


@pytest.mark.parametrize("network", [Network.BRIDGE, Network.HOST])
def test_what_goes_around_the_proxy_needs_the_operator_and_a_silent_policy(network: Network) -> None:
    record = replace(RECORD, network=network)
    with pytest.raises(InvalidRequest, match="switched off") as refused:
        fitted(record, network, Policy.open())
    assert refused.value.hint is not None and f"CARREL_EGRESS_ALLOW_{network.upper()}" in refused.value.hint
    assert fitted(record, network, Policy.open(), ON) is network
    assert fitted(record, network, policy(rules='{"allow": ["shell(ls:*)"]}'), ON) is network
    for by in (policy(rules='{"deny": ["network(outbound:a.example)"]}'), policy(web="{}"), policy(git="{}")):
        with pytest.raises(Denied, match="would not enforce"):
            fitted(record, network, by, ON)


def test_who_does_not_isolate_promises_nothing() -> None:
    class Unsafe(Promising):
        unsafe = True

    record = replace(RECORD, network=Network.HOST)
    by = policy(web='{"allowed_domains": ["a.example"]}')
    assert fit_network(record, None, by, OFF, Unsafe(), default=Network.NONE).network is Network.HOST


def test_internet_needs_the_operator() -> None:
    record = replace(RECORD, network=Network.INTERNET)
    with pytest.raises(InvalidRequest, match="switched off") as refused:
        fitted(record, Network.INTERNET, Policy.open())
    assert refused.value.hint is not None and "CARREL_EGRESS_ALLOW_INTERNET" in refused.value.hint
    assert fitted(record, Network.INTERNET, Policy.open(), EgressSettings(allow_internet=True)) is Network.INTERNET
    default = fit_network(record, None, Policy.open(), OFF, PROVIDER, default=Network.INTERNET)
    assert default.network is Network.INTERNET


def test_internet_is_refused_where_the_policy_allows_no_network() -> None:
    record, allowed = replace(RECORD, network=Network.INTERNET), EgressSettings(allow_internet=True)
    by = policy(web='{"enabled": false}')
    assert fitted(record, None, by, allowed) is Network.NONE
    with pytest.raises(Denied, match="allows no network"):
        fitted(record, Network.INTERNET, by, allowed)
