"""The Helm chart: its values are documented and checked, and what it makes is what a server needs and no more."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import carrel
from carrel import config
from carrel.providers.kubernetes.provider import SERVERS
from carrel.providers.kubernetes.rights import RIGHTS, Right, rules

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy/helm/carrel"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
pytestmark = pytest.mark.skipif(
    shutil.which("go") is None or os.geteuid() != 0, reason="Helm is built with Go, once, as root"
)


@functools.cache
def helm() -> str:
    return subprocess.run([ROOT / "scripts/build-helm"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@functools.cache
def rendered(*settings: str) -> dict[tuple[str, str], Any]:
    """The objects that the chart makes, by kind and name."""
    words = [helm(), "template", "carrel", str(CHART), "-n", "agents", "--kube-version", "1.34.4"]
    flags = [f"--set{'-string' * each.startswith('settings.')}={each}" for each in settings]
    done = subprocess.run([*words, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def server(*settings: str) -> Any:
    """The pod of a server."""
    return rendered(*settings)["StatefulSet", "carrel"]["spec"]["template"]["spec"]


def variables(*settings: str) -> dict[str, Any]:
    """Its variables; of those that do not come from the values, where they come from."""
    (container,) = server(*settings)["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_lint() -> None:
    done = subprocess.run([helm(), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_chart_has_the_version_of_carrel() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == carrel.__version__


def _paths(value: Any, path: str = "") -> set[str]:
    if not isinstance(value, dict) or not value:
        return {path}
    return {found for key, each in value.items() for found in _paths(each, f"{path}.{key}".lstrip("."))}


def _described(schema: Any, path: str = "") -> set[str]:
    properties = schema.get("properties")
    if not properties:
        return {path}
    assert schema["additionalProperties"] is False, path
    return {found for key, each in properties.items() for found in _described(each, f"{path}.{key}".lstrip("."))}


def test_the_schema_knows_every_value_and_no_other() -> None:
    left_free = {"settings", "resources", "global"}
    known = {path for path in _paths(VALUES) if path.partition(".")[0] not in left_free}
    assert known == {path for path in _described(SCHEMA) if path not in left_free}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replicas=0", "replicas"),
        ("sandboxes.isolation=chroot", "isolation"),
        ("sandboxes.isolation=gvisor", "sandboxes.gvisorClass"),
        ("sandbox.image=debian", "sandbox"),
        ("settings.memory=1", "memory"),
        ("workspaces.size=much", "size"),
    ],
)
def test_what_cannot_work_is_refused(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        rendered(setting)


def test_every_variable_is_a_setting() -> None:
    known = {each.env for each in config.declarations()}
    used = {name for name in variables("ingress.enabled=true") if name.startswith("CARREL_")}
    assert used <= known, used - known


def test_values_become_settings() -> None:
    made = variables(
        "sandboxes.isolation=gvisor",
        "sandboxes.gvisorClass=g",
        "sandboxes.warmPool=4",
        "settings.SANDBOX_MEMORY_MB=512",
    )
    expected = {
        "CARREL_SANDBOX_PROVIDER": "kubernetes-gvisor",
        "CARREL_KUBERNETES_GVISOR_CLASS": "g",
        "CARREL_KUBERNETES_WARM_POOL": "4",
        "CARREL_SANDBOX_MEMORY_MB": "512",
        "CARREL_LEASE_S": "120",
        "CARREL_DATABASE": {"secretKeyRef": {"name": "carrel-connections", "key": "CARREL_DATABASE"}},
    }
    assert {name: made[name] for name in expected} == expected
    assert variables()["CARREL_SANDBOX_PROVIDER"] == "kubernetes"


def test_servers_are_restricted_and_known_to_the_policy_of_sandboxes() -> None:
    pod = server()
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    labels = rendered()["StatefulSet", "carrel"]["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= SERVERS.items()


def _rights(needs: set[str], *, named: bool) -> list[dict[str, list[str]]]:
    def wanted(right: Right) -> bool:
        return right.need in needs and bool(right.name) is named

    return rules(tuple(filter(wanted, RIGHTS)))


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        (("sandboxes.warmPool=1",), {"always", "agent-sandbox", "warm pools"}),
        ((), {"always", "agent-sandbox"}),
        (("sandboxes.agentSandbox=false", "sandboxes.warmPool=1"), {"always"}),
        (("workspaces.maxGb=10",), {"always", "agent-sandbox", "growing volume"}),
    ],
)
def test_a_server_has_the_rights_that_it_needs_and_no_others(settings: tuple[str, ...], needs: set[str]) -> None:
    made = rendered(*settings)
    assert made["Role", "carrel"]["rules"] == _rights(needs, named=False)
    assert made["Role", "agents-carrel"]["rules"] == _rights(needs, named=True)
    assert made["Role", "agents-carrel"]["metadata"]["namespace"] == "default"
    assert not [kind for kind, _ in made if kind.startswith("Cluster")]


def test_the_page_lists_the_same_rights() -> None:
    page = (ROOT / "docs/how-to/run-on-kubernetes.md").read_text()
    listed = set()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[3].startswith("`"):
            kinds = re.findall(r"`([^`]+)`", cells[2])
            listed |= {(kind, verb) for kind in kinds[:2] for verb in re.findall(r"`(\w+)`", cells[3])}
    known = {(kind, verb) for each in RIGHTS for kind in each.resources for verb in each.verbs}
    assert listed - {("kubernetes", "get")} == known


def test_the_ingress_has_the_host_and_every_name_below_it() -> None:
    spec = rendered("ingress.enabled=true", "ingress.host=box.example")["Ingress", "carrel"]["spec"]
    assert spec["tls"] == [{"secretName": "carrel-tls", "hosts": ["box.example", "*.box.example"]}]
    assert [rule["host"] for rule in spec["rules"]] == ["box.example", "*.box.example"]
    one = rendered("ingress.enabled=true", "ingress.wildcard=false")["Ingress", "carrel"]["spec"]
    assert [rule["host"] for rule in one["rules"]] == ["carrel.example"]
    assert ("Ingress", "carrel") not in rendered()
    assert variables("ingress.enabled=true")["CARREL_PORTS_DOMAIN"] == "carrel.example"
    assert variables("ingress.enabled=true", "ingress.tlsSecret=")["CARREL_PORTS_DOMAIN"] == "http://carrel.example"
    assert "CARREL_PORTS_DOMAIN" not in variables()


def test_the_claim_is_kept_or_not_as_the_values_say() -> None:
    claim = "PersistentVolumeClaim", "carrel-workspaces"
    assert rendered()[claim]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert rendered()[claim]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "annotations" not in rendered("workspaces.keep=false")[claim]["metadata"]
    own = rendered("workspaces.existingClaim=mine")
    assert claim not in own
    assert {"name": "workspaces", "persistentVolumeClaim": {"claimName": "mine"}} in server(
        "workspaces.existingClaim=mine"
    )["volumes"]


def test_only_servers_reach_the_port_of_servers() -> None:
    spec = rendered("networkPolicy.from[0].podSelector.matchLabels.app=web")["NetworkPolicy", "carrel"]["spec"]
    selector = rendered()["StatefulSet", "carrel"]["spec"]["selector"]
    assert spec["ingress"] == [
        {"ports": [{"protocol": "TCP", "port": "http"}], "from": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
        {"ports": [{"protocol": "TCP", "port": "servers"}], "from": [{"podSelector": selector}]},
    ]


def test_a_monitor_reads_the_metrics_with_a_token() -> None:
    spec = rendered("serviceMonitor.enabled=true")["ServiceMonitor", "carrel"]["spec"]
    (endpoint,) = spec["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert endpoint["authorization"] == {"credentials": {"name": "carrel-connections", "key": "CARREL_TOKEN"}}
