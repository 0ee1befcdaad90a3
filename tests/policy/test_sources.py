from __future__ import annotations

import json
from pathlib import Path

import pytest
from policies import sources as of

from carrel.errors import InvalidRequest
from carrel.policy import sources
from carrel.policy.sources import Limits, decide_domain, domain_matches, limits

EXAMPLE = (Path(__file__).parent / "examples" / "sources.json").read_text()


def test_the_example_loads_unchanged() -> None:
    loaded = sources.load(EXAMPLE)
    assert loaded.agent_type == "python-data-agent"
    assert loaded.package_managers.pip is not None
    assert loaded.package_managers.pip.registries is not None
    assert loaded.package_managers.pip.registries[0].trusted
    assert loaded.runtime.interpreters == {"python": "/usr/bin/python3", "bash": "/bin/bash"}
    assert limits(loaded) == Limits(300, 2048, 500, 1000)


def test_of_several_limits_the_smallest_holds() -> None:
    one, two = of(runtime={"max_memory_mb": 100}), of(runtime={"max_memory_mb": 50, "max_execution_time_seconds": 9})
    assert limits(one, two) == Limits(9, 50)
    assert limits() == Limits()


@pytest.mark.parametrize(
    ("host", "answer"),
    [("api.github.com", "allow"), ("API.GitHub.com.", "allow"), ("github.com", "deny"), ("x.api.github.com", "deny"), ("a.internal", "deny"),
     ("metadata.google.internal", "deny"), ("huggingface.co", "allow"), ("huggingface.co.evil.example", "deny"), ("", "deny")],
)  # fmt: skip
def test_domains_of_the_example(host: str, answer: str) -> None:
    found = decide_domain(sources.load(EXAMPLE).web_access, host)
    assert found is not None
    assert found[0] == answer


def test_blocked_beats_allowed_and_disabled_beats_all() -> None:
    web = of(web_access={"allowed_domains": ["*.a.example"], "blocked_domains": ["b.a.example"]}).web_access
    assert decide_domain(web, "c.a.example") == ("allow", "web_access.allowed_domains: *.a.example")
    assert decide_domain(web, "b.a.example") == ("deny", "web_access.blocked_domains: b.a.example")
    assert decide_domain(web, "a.example") == ("deny", "web_access.allowed_domains")
    assert decide_domain(of(web_access={"enabled": False}).web_access, "a.example") == (
        "deny",
        "web_access.enabled: false",
    )
    assert decide_domain(of(web_access={}).web_access, "a.example") is None
    assert decide_domain(None, "a.example") is None
    assert domain_matches("*", "x")
    assert not domain_matches("*.a", ".a")


@pytest.mark.parametrize("domains", [["*"], ["*.com"], ["https://a"], ["a b"], ["a/*"], ["*a.example"]])
def test_domains_that_are_too_broad_or_none_are_refused(domains: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        sources.load(json.dumps({"web_access": {"allowed_domains": domains}}))


def test_registries_are_urls_without_users() -> None:
    for url in ("ftp://a", "a.example", "https://user:password@a.example/"):
        with pytest.raises(InvalidRequest):
            sources.load(json.dumps({"package_managers": {"pip": {"registries": [{"name": "a", "url": url}]}}}))
