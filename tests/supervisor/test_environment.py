"""What tools are told of the way out."""

from __future__ import annotations

import pytest
from tests.support.sandboxes import KINDS, House

from carrel.isolation import rootfs
from carrel.models import Network
from carrel.supervisor import environment

PORT = 3128


def variables(
    proxy_port: int | None = None, trust: bool = False, offline: bool = False, **given: str
) -> dict[str, str]:
    return environment.variables(
        workspace="/w",
        home="/h",
        path="/bin",
        proxy_port=proxy_port,
        offline=offline,
        trust=trust,
        given=given,
    )


def test_without_a_way_out_nothing_is_said_of_one() -> None:
    assert variables() == {
        "PATH": "/bin",
        "HOME": "/h",
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "WORKSPACE": "/w",
    }


def test_both_cases_say_the_same_and_none_names_socks() -> None:
    found = variables(PORT)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WS_PROXY", "WSS_PROXY"):
        assert found[name] == found[name.lower()] == "http://127.0.0.1:3128"
    assert found["NO_PROXY"] == found["no_proxy"] == "localhost,127.0.0.1,::1"
    assert not any("socks" in value for value in found.values())
    assert not any(value == environment.CERTIFICATES for value in found.values())


def test_the_program_for_node_is_where_the_root_has_it() -> None:
    assert environment.NODE_PRELOAD == rootfs.NODE_PRELOAD


def test_trust_is_a_set_of_its_own() -> None:
    added = {name: value for name, value in variables(PORT, trust=True).items() if name not in variables(PORT)}
    assert set(added.values()) == {environment.CERTIFICATES}
    assert {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT"} <= added.keys()
    assert {"NODE_EXTRA_CA_CERTS", "NPM_CONFIG_CAFILE"} <= added.keys()


@pytest.mark.parametrize("name", sorted(variables(PORT, trust=True)))
def test_what_a_caller_gives_wins(name: str) -> None:
    assert variables(PORT, trust=True, **{name: "mine"})[name] == "mine"


@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
async def test_every_sandbox_of_its_own_network_has_them(houses: dict[str, House]) -> None:
    house = House("namespace", houses["namespace"].directory)
    async with (
        house.box() as none,
        house.box(network=Network.ALLOWLIST, env={"PIP_INDEX_URL": "mine"}) as way,
        house.box(network=Network.ALLOWLIST, trust=True) as trusting,
    ):
        show = "echo $http_proxy $HTTPS_PROXY $PIP_INDEX_URL $SSL_CERT_FILE $GIT_CONFIG_COUNT"
        proxy = f"http://127.0.0.1:{PORT}"
        assert (await none.supervisor.run(show))["stdout"] == f"{proxy} {proxy} {proxy}/simple/ 1\n"
        assert (await way.supervisor.run(show))["stdout"] == f"{proxy} {proxy} mine\n"
        told = f"{proxy} {proxy} {proxy}/simple/ {environment.CERTIFICATES}\n"
        assert (await trusting.supervisor.run(show))["stdout"] == told
    await house.provider.close()


def test_image_loses_against_carrel_and_the_caller() -> None:
    own = {"PATH": "/x", "HOME": "/root", "LANG": "de_DE.UTF-8", "A": "1", "B": "1", "SSL_CERT_FILE": "/image.pem"}
    found = environment.variables(
        workspace="/workspace", home="/home/agent", path="/bin", proxy_port=None, offline=False, trust=True,
        given={"B": "2"}, image=own, user="app",
    )  # fmt: skip
    wanted = {"PATH": "/bin", "HOME": "/home/agent", "LANG": "de_DE.UTF-8", "A": "1", "B": "2", "USER": "app"}
    assert {name: found[name] for name in wanted} == wanted
    assert found["SSL_CERT_FILE"] == environment.CERTIFICATES


def test_path_of_an_image_has_writable_directories_last() -> None:
    path = "/tmp/x:/opt/bin::relative:/workspace:/bin:/home/agent/bin:/home/agents"
    last = "/opt/bin:/bin:/home/agents:/tmp/x:/workspace:/home/agent/bin:/workspace/.venv/bin"
    assert environment.image_path(path, launchers=False) == last
    assert environment.image_path("", launchers=True) == environment.PATH
