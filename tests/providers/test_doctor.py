from __future__ import annotations

from tests.support.sandboxes import House

from carrel.providers import open_providers
from carrel.providers.doctor import host_report


def test_the_report_covers_primitives_and_providers(houses: dict[str, House]) -> None:
    report = host_report(open_providers("/run", "/ws", allow_process=False))
    assert {"kernel", "user namespaces", "seccomp", "cgroup memory"} <= {check.name for check in report.checks}
    process = next(status for status in report.providers if status.name == "process")
    assert (process.available, process.unsafe) == (False, True)
    assert "CARREL_SANDBOX_ALLOW_PROCESS" in (process.reason or "")
    assert report.kernel.startswith("Linux ")
    assert all(check.remedy for check in report.checks if check.status == "missing")


def test_what_is_allowed_is_shown_as_available() -> None:
    report = host_report(open_providers("/run", "/ws", allow_process=True))
    assert [status.name for status in report.providers] == ["namespace", "process"]
    assert report.providers[1].available
