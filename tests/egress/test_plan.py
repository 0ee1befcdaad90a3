from __future__ import annotations

from carrel.egress.plan import EgressPlan, Injected, PackageIndex, Upstream
from carrel.policy.documents import settings, sources
from carrel.policy.rules.layers import Layer

SETTINGS = settings.load('{"permissions": {"allow": ["network(outbound:a.example)"], "deny": ["shell(curl:*)"]}}')
SOURCES = sources.load(
    '{"web_access": {"allowed_domains": ["*.b.example"], "allowed_ports": [443], "credentials":'
    ' [{"host": "api.b.example", "secret": "key", "methods": ["GET"], "paths": ["/v1"]}]},'
    ' "git": {"allowed_remotes": ["https://c.example/*"], "max_clone_size_mb": 5}}'
)


def test_a_plan_survives_the_way_to_the_proxy() -> None:
    plan = EgressPlan(
        "sbx-1",
        "c",
        (Layer("server", None, SOURCES, "/etc/sources.json"), Layer("settings.json", SETTINGS)),
        (Injected("api.b.example", "Authorization", "Bearer v", "v", "key", ("GET",), ("/v1",)),),
        (Upstream("eu", "http://u:p@127.0.0.1:3128", remote_names=True),),
        (PackageIndex("own", "https://python-index.example/simple/", trusted=True),),
        "pem",
    )
    again = EgressPlan.from_memory_file(plan.to_memory_file())
    assert again == plan
    assert again.policy().allow.hosts.keys() == {"a.example"}
    assert EgressPlan.from_memory_file(EgressPlan("s", None).to_memory_file()) == EgressPlan("s", None)


def test_a_plan_does_not_show_what_it_hides() -> None:
    plan = EgressPlan(
        "s",
        None,
        injected=(Injected("h", "X", "hidden-value", "hidden-secret", "n"),),
        upstreams=(Upstream("u", "http://hidden-user@h"),),
        indexes=(PackageIndex("i", "https://hidden-index@h"),),
        authority="hidden-pem",
    )
    assert "hidden" not in repr(plan)
