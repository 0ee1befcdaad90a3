from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_doctor_needs_no_server(alone: Carrel) -> None:
    done = alone("doctor", "--json")
    report = json.loads(done.stdout)
    isolating = [each for each in report["providers"] if each["available"] and not each["unsafe"]]
    assert done.returncode == (0 if isolating else 1)
    for check in report["checks"]:
        assert check["why"]
        assert check["status"] != "missing" or check["remedy"]
    text = alone("doctor").stdout.decode()
    assert "PRIMITIVE" in text
    assert "process UNSAFE" in text
    for check in report["checks"]:
        assert check["name"] in text


def test_doctor_can_ask_the_server(carrel: Carrel) -> None:
    assert "providers" in json.loads(carrel("doctor", "--server", "--json").stdout)


def test_doctor_says_when_no_cluster_is_known(alone: Carrel, tmp_path: Path) -> None:
    done = alone("doctor", "--kubernetes", env={"HOME": str(tmp_path), "KUBECONFIG": ""})
    assert done.returncode == 1
    assert b"no cluster is known here" in done.stderr and b"CARREL_KUBERNETES_KUBECONFIG" in done.stderr
