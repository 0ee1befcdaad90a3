"""The objects of a cluster, as whole values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from carrel.providers import bundle
from carrel.providers.kubernetes import manifests
from carrel.providers.kubernetes.manifests import PodRequest
from carrel.supervisor import lent_directory

LABELS = {"carrel/instance": "i", "carrel/sandbox": "s"}
REQUEST = PodRequest(
    image="debian:12",
    bundle_image="registry.example/bundle:1",
    claim="workspaces",
    workspace="volumes/ctx-1",
    secret="slot",
    cpus=1.5,
    memory_mb=512,
    probe="10.96.0.1:443",
    labels=LABELS,
    annotations={"carrel/id": "sbx-1"},
)
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
UNPACK = [
    *("/opt/carrel", "/carrel/bundle", "/carrel/secret/slot.json", "/run/carrel/slot.json"),
    *("10.96.0.1:443", ""),
]
POD_SPEC = {
    "restartPolicy": "Never",
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "terminationGracePeriodSeconds": 1,
    "hostname": "carrel",
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "initContainers": [
        {
            "name": "unpack",
            "image": "registry.example/bundle:1",
            "imagePullPolicy": "IfNotPresent",
            "command": bundle.unpack_command(UNPACK),
            "workingDir": "/",
            "securityContext": RESTRICTED,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {
                "limits": {"cpu": "1", "memory": "256Mi"},
                "requests": {"cpu": "10m", "memory": "32Mi"},
            },
            "volumeMounts": [
                {"name": "bundle", "mountPath": "/carrel/bundle"},
                {"name": "control", "mountPath": "/run/carrel"},
                {"name": "credentials", "mountPath": "/carrel/secret", "readOnly": True},
            ],
        }
    ],
    "containers": [
        {
            "name": "sandbox",
            "image": "debian:12",
            "imagePullPolicy": "IfNotPresent",
            "command": bundle.remote_command("0.0.0.0", 7443, "/run/carrel/slot.json", lent=True),
            "workingDir": "/",
            "ports": [{"name": "control", "containerPort": 7443, "protocol": "TCP"}],
            "securityContext": RESTRICTED,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {
                "limits": {"cpu": "1500m", "memory": "512Mi"},
                "requests": {"cpu": "10m", "memory": "64Mi"},
            },
            "volumeMounts": [
                {"name": "bundle", "mountPath": "/opt/carrel", "readOnly": True},
                {"name": "bundle", "mountPath": "/etc/carrel", "subPath": "etc/carrel", "readOnly": True},
                {"name": "bundle", "mountPath": "/etc/hosts", "subPath": "etc/hosts", "readOnly": True},
                {"name": "bundle", "mountPath": "/etc/hostname", "subPath": "etc/hostname", "readOnly": True},
                {"name": "bundle", "mountPath": "/etc/resolv.conf", "subPath": "etc/resolv.conf", "readOnly": True},
                {"name": "control", "mountPath": "/run/carrel"},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "home", "mountPath": "/home/agent"},
                {"name": "shm", "mountPath": "/dev/shm"},
                {"name": "secrets", "mountPath": "/run/secrets", "readOnly": True},
                {"name": "workspace", "mountPath": "/workspace", "subPath": "volumes/ctx-1"},
            ],
        },
        {
            "name": "secrets",
            "image": "registry.example/bundle:1",
            "imagePullPolicy": "IfNotPresent",
            "command": bundle.lend_command("/carrel/secrets"),
            "workingDir": "/",
            "securityContext": RESTRICTED,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {
                "limits": {"cpu": "200m", "memory": "64Mi"},
                "requests": {"cpu": "1m", "memory": "16Mi"},
            },
            "volumeMounts": [{"name": "secrets", "mountPath": "/carrel/secrets"}],
        },
    ],
    "volumes": [
        {"name": "bundle", "emptyDir": {}},
        {"name": "control", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}},
        {"name": "home", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}},
        {"name": "secrets", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "credentials", "secret": {"secretName": "slot", "defaultMode": 0o444}},
        {"name": "workspace", "persistentVolumeClaim": {"claimName": "workspaces"}},
    ],
}
METADATA = {"name": "one", "labels": LABELS, "annotations": {"carrel/id": "sbx-1"}}
POD_TEMPLATE = {"metadata": {"labels": LABELS, "annotations": {"carrel/id": "sbx-1"}}, "spec": POD_SPEC}


def test_pod():
    assert manifests.pod("one", REQUEST) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": METADATA,
        "spec": POD_SPEC,
    }


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
def test_sandbox(version):
    assert manifests.sandbox("one", REQUEST, version) == {
        "apiVersion": f"agents.x-k8s.io/{version}",
        "kind": "Sandbox",
        "metadata": METADATA,
        "spec": {"podTemplate": POD_TEMPLATE},
    }


def test_template_has_our_policy_and_takes_nothing_from_claims():
    spec = {
        "podTemplate": POD_TEMPLATE,
        "networkPolicyManagement": "Unmanaged",
        "envVarsInjectionPolicy": "Disallowed",
    }
    expected = {"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate", "metadata": METADATA}
    older = expected | {"apiVersion": "extensions.agents.x-k8s.io/v1alpha1", "spec": spec}
    assert manifests.template("one", REQUEST, "v1alpha1") == older
    assert manifests.template("one", REQUEST) == expected | {
        "spec": spec | {"volumeClaimTemplatesPolicy": "Disallowed"}
    }


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
def test_warm_pool(version):
    assert manifests.warm_pool("pool", LABELS, 3, version) == {
        "apiVersion": f"extensions.agents.x-k8s.io/{version}",
        "kind": "SandboxWarmPool",
        "metadata": {"name": "pool", "labels": LABELS},
        "spec": {
            "replicas": 3,
            "sandboxTemplateRef": {"name": "pool"},
            "updateStrategy": {"type": "Recreate"},
        },
    }


@pytest.mark.parametrize(
    ("version", "reference"),
    [
        ("v1beta1", {"warmPoolRef": {"name": "pool"}}),
        ("v1alpha1", {"sandboxTemplateRef": {"name": "pool"}, "warmpool": "pool"}),
    ],
)
def test_claim(version, reference):
    annotations = {"carrel/id": "sbx-1"}
    assert manifests.claim("one", "pool", LABELS, annotations, version) == {
        "apiVersion": f"extensions.agents.x-k8s.io/{version}",
        "kind": "SandboxClaim",
        "metadata": METADATA,
        "spec": {
            "lifecycle": {"shutdownPolicy": "Delete"},
            **reference,
        },
    }


def test_secret():
    assert manifests.secret("slot", {"carrel/instance": "i"}, "text") == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "slot", "labels": {"carrel/instance": "i"}},
        "type": "Opaque",
        "stringData": {"slot.json": "text"},
    }


def test_policy_lets_nothing_out_and_only_servers_in():
    assert manifests.network_policy("sandboxes", {"app": "carrel"}) == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "sandboxes"},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": "carrel/instance", "operator": "Exists"}]},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "carrel"}}}],
                    "ports": [{"protocol": "TCP", "port": 7443}],
                }
            ],
            "egress": [],
        },
    }


def test_without_limits_a_pod_has_none():
    found = manifests.pod_spec(replace(REQUEST, cpus=None, memory_mb=None))["containers"][0]["resources"]
    assert found == {"requests": {"cpu": "10m", "memory": "64Mi"}}


def test_what_a_pod_may_have_besides():
    expected = POD_SPEC | {"runtimeClassName": "gvisor", "hostUsers": False}
    assert manifests.pod_spec(replace(REQUEST, runtime_class="gvisor", user_namespaces=True)) == expected


def test_a_pod_of_a_pool_makes_a_directory_of_its_own():
    found = manifests.pod_spec(replace(REQUEST, slots=".slots/one", workspace=""))
    unpack, sandbox = found["initContainers"][0], found["containers"][0]
    name = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    assert unpack["env"] == sandbox["env"] == name
    assert unpack["command"][-1] == "/carrel/slots/$(POD_NAME)"
    assert unpack["volumeMounts"][-1] == {"name": "workspace", "mountPath": "/carrel/slots", "subPath": ".slots/one"}
    place = {"name": "workspace", "mountPath": "/workspace", "subPathExpr": ".slots/one/$(POD_NAME)"}
    assert sandbox["volumeMounts"][-1] == place


def test_the_lent_directory_has_one_name():
    assert manifests.LENT_SECRETS == lent_directory.PATH
