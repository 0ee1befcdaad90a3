from __future__ import annotations

from ipaddress import ip_address

from carrel.egress.access import AccessRefused, Target
from carrel.policy.verdict import Verdict


def test_a_target_is_shown_as_people_write_it() -> None:
    assert str(Target("a.example", 443)) == "a.example:443"
    assert str(Target("::1", 80, ip_address("::1"))) == "[::1]:80"


def test_a_refusal_has_the_shape_of_every_refusal() -> None:
    said = Verdict("deny", "a.example is denied", "network(outbound:a.example)", "settings.json", "ask", "apr-1")
    assert AccessRefused(said).as_dict() == {
        "code": "denied_by_policy",
        "operation": "network",
        "rule": "network(outbound:a.example)",
        "source": "settings.json",
        "reason": "a.example is denied",
        "retry": False,
        "approval": "apr-1",
        "hint": "ask",
    }
