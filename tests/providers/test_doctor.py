from __future__ import annotations

from tests.support.records import Promising
from tests.support.sandboxes import House

from carrel.models import ProviderStatus, Trust
from carrel.providers import open_providers
from carrel.providers.built_in import BUILT_IN
from carrel.providers.doctor import NO_PROVIDER, host_report
from carrel.providers.trust import RULES


def test_the_report_covers_primitives_and_providers(houses: dict[str, House]) -> None:
    report = host_report(open_providers("/run", "/ws", allow_process=False), ())
    assert {"kernel", "user namespaces", "seccomp", "cgroup memory"} <= {check.name for check in report.checks}
    process = next(status for status in report.providers if status.name == "process")
    assert (process.available, process.unsafe) == (False, True)
    assert "CARREL_SANDBOX_ALLOW_PROCESS" in (process.reason or "")
    assert report.kernel.startswith("Linux ")
    assert all(check.remedy for check in report.checks if check.status == "missing")


def test_what_is_allowed_is_shown_as_available() -> None:
    report = host_report(open_providers("/run", "/ws", allow_process=True), ())
    assert [each.name for each in report.providers if each.available] == ["namespace", "process"]
    assert report.levels[-1].providers == ["process"]


def test_every_level_is_named_with_its_providers_or_what_is_missing() -> None:
    report = host_report(open_providers("/run", "/ws", allow_process=False, docker="/nowhere.sock", bundles="/b"), ())
    assert {each.name for each in report.providers} == BUILT_IN.keys(), "also those that are switched off"
    assert [each.level for each in report.levels] == [3, 2, 1, 0]
    for level in report.levels:
        known = [each.name for each in BUILT_IN.values() if each.level == level.level]
        assert level.available == bool(level.providers)
        assert {*level.providers, *(text.partition(":")[0] for text in level.missing)} >= set(known)
        assert known or level.missing == [NO_PROVIDER]
        assert level.enough_for == [trust for trust in Trust if RULES[trust].least_level <= level.level]
    reasons = {each.name: each.reason or "" for each in report.providers}
    assert "CARREL_DOCKER_SOCKET" in reasons["docker"] and "runsc" in reasons["gvisor"]


def test_a_third_party_provider_is_shown_with_the_level_that_counts() -> None:
    class Jail(Promising):
        name, isolation_level = "jail", 2

    def shown(*listed: str) -> ProviderStatus:
        return next(each for each in host_report({"jail": Jail()}, listed).providers if each.name == "jail")

    assert (shown().isolation_level, shown().package) == (0, "")
    assert "it claims level 2" in (shown().reason or "") and "CARREL_SANDBOX_THIRD_PARTY" in (shown().reason or "")
    assert (shown("jail").isolation_level, shown("jail").reason) == (2, None)
