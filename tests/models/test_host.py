from __future__ import annotations

from carrel.models import Check, HostReport


def test_a_newer_server_may_say_more() -> None:
    check = {"name": "x", "status": "ok", "found": "y", "why": "z", "since": 7}
    report = HostReport.model_validate({"kernel": "k", "user": "u", "checks": [check], "providers": [], "more": 1})
    assert report.checks == [Check(name="x", status="ok", found="y", why="z")]
