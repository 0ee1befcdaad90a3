from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.policies import sources as of

from carrel.errors import InvalidRequest
from carrel.policy.documents import sources
from carrel.policy.documents.sources import LowestLimits, limits

EXAMPLE = (Path(__file__).parents[1] / "examples" / "sources.json").read_text()


def test_the_example_loads_unchanged() -> None:
    loaded = sources.load(EXAMPLE)
    assert loaded.agent_type == "python-data-agent"
    assert loaded.package_managers.pip is not None
    assert loaded.package_managers.pip.registries is not None
    assert loaded.package_managers.pip.registries[0].trusted
    assert loaded.runtime.interpreters == {"python": "/usr/bin/python3", "bash": "/bin/bash"}
    assert limits(loaded) == LowestLimits(300, 2048, 500, 1000)


def test_of_several_limits_the_smallest_holds() -> None:
    one, two = of(runtime={"max_memory_mb": 100}), of(runtime={"max_memory_mb": 50, "max_execution_time_seconds": 9})
    assert limits(one, two) == LowestLimits(9, 50)
    assert limits() == LowestLimits()


@pytest.mark.parametrize("key", ["allowed_domains", "opaque_domains", "inspected_domains"])
@pytest.mark.parametrize("domains", [["*"], ["*.com"], ["https://a"], ["a b"], ["a/*"], ["*a.example"]])
def test_domains_that_are_too_broad_or_none_are_refused(key: str, domains: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        sources.load(json.dumps({"web_access": {key: domains}}))


def test_what_the_egress_needs_is_read() -> None:
    web = of(
        web_access={
            "allowed_domains": ["a.example"],
            "allowed_ports": [443, 22],
            "opaque_domains": ["a.example"],
            "inspected_domains": ["*.a.example"],
            "credentials": [{"host": "Api.a.example", "secret": "token", "methods": ["GET"], "paths": ["/v1"]}],
            "upstreams": ["office"],
            "max_connections": 1,
            "max_connections_per_minute": 2,
            "max_download_mb": 3,
            "max_upload_mb": 4,
        }
    ).web_access
    assert web is not None
    assert web.allowed_ports == (443, 22)
    assert (web.credentials[0].host, web.credentials[0].header, web.credentials[0].format) == (
        "api.a.example",
        "Authorization",
        "Bearer {secret}",
    )
    plain = of(web_access={}).web_access
    assert plain is not None
    assert (plain.allowed_ports, plain.opaque_domains, plain.inspected_domains, plain.upstreams) == (None,) * 4
    assert plain.credentials == ()


@pytest.mark.parametrize(
    "web",
    [{"allowed_ports": [0]}, {"allowed_ports": [65_536]}, {"allowed_ports": ["443"]}, {"allowed_ports": 443}, {"max_connections": 0}, {"max_connections_per_minute": -1},
     {"max_download_mb": 0}, {"max_upload_mb": 1.5}, {"upstreams": "office"}, {"nonsense": 1}],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(web: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        sources.load(json.dumps({"web_access": web}))


@pytest.mark.parametrize(
    "credential",
    [{"host": "*.a.example"}, {"host": ""}, {"host": "a.example."}, {"host": "a.example:443"}, {"host": "a b"}, {"secret": ""}, {"header": "X Y"}, {"header": "X:\r\nY"}, {"header": ""},
     {"format": "Bearer"}, {"format": "{secret}{secret}"}, {"format": "Bearer {secret}\r\nX: y"}, {"format": "é{secret}"}, {"nonsense": 1}],
)  # fmt: skip
def test_credentials_are_for_one_host_and_one_header(credential: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        sources.load(
            json.dumps({"web_access": {"credentials": [{"host": "a.example", "secret": "token", **credential}]}})
        )


def test_registries_are_urls_without_users() -> None:
    for url in ("ftp://a", "a.example", "https://user:password@a.example/"):
        with pytest.raises(InvalidRequest):
            sources.load(json.dumps({"package_managers": {"pip": {"registries": [{"name": "a", "url": url}]}}}))
