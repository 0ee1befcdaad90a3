from __future__ import annotations

import json
import subprocess
import sys

import pytest

from carrel.isolation import probe
from carrel.isolation.probe import BRIDGE, Finding, HostFindings, host


def test_the_probe_prints_json_and_leaves_nothing() -> None:
    run = subprocess.run([sys.executable, "-m", "carrel.isolation.probe"], capture_output=True, check=True)
    answer = json.loads(run.stdout)
    assert run.stderr == b""
    assert {finding["status"] for finding in answer["findings"]} <= {"ok", "degraded", "missing"}
    assert set(answer["controllers"]) <= {"memory", "cpu", "cpuacct"}


def test_the_host_is_examined_once() -> None:
    assert host() is host()
    assert all(finding.found and finding.why for finding in host().findings)


def test_only_what_is_missing_stands_in_the_way() -> None:
    fine, less = Finding("a", "ok", "works", "why"), Finding("b", "degraded", "little", "why")
    lacking = Finding("c", "missing", "EPERM", "why", "do this")
    assert HostFindings((fine, less), ()).missing is None
    assert HostFindings((fine, less, lacking), ()).missing == "this host lacks c (EPERM); run `carrel doctor`"


def test_a_bridge_needs_its_finding() -> None:
    assert not HostFindings((), ()).bridges
    assert not HostFindings((Finding(BRIDGE, "degraded", "no slirp4netns", "why", "do this"),), ()).bridges
    assert HostFindings((Finding(BRIDGE, "ok", "slirp4netns", "why"),), ()).bridges
    found = next(finding for finding in host().findings if finding.name == BRIDGE)
    assert (found.remedy is None) is host().bridges


def test_the_remedy_for_a_bridge_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATH", ("/nowhere",))
    found = probe.examine_bridge(root=True)
    assert (found.status, found.found, found.remedy) == ("degraded", "no slirp4netns", "apt install slirp4netns")


@pytest.mark.parametrize("broken", ["raise SystemExit('no')", "print('{}')", "print('[]')", "print('')"])
def test_a_probe_that_fails_means_missing(broken: str) -> None:
    assert probe.findings_of(probe.started([sys.executable, "-c", broken])).missing is not None


FORKED = """
from carrel.isolation import probe

if not {works}:
    probe.examine = None
probe.begin()
found = probe.host()
print(found.findings[0].name, found.missing is not None)
"""


@pytest.mark.parametrize(("works", "said"), [(True, "kernel False"), (False, "probe True")])
def test_a_process_that_begins_forks_the_one_that_finds_out(works: bool, said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORKED.format(works=works)], capture_output=True, text=True, check=True, timeout=60
    )
    assert (run.stdout.strip(), run.stderr) == (said, "")
