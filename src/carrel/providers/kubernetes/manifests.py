"""The objects of a cluster as values: pods of sandboxes, the resources of agent-sandbox, policies. Pure: no I/O.

Every pod keeps to the Pod Security Standard `restricted`. Its init container is of the image with the bundle: it copies
the bundle and the credentials of a slot into volumes of the pod. So the image of the sandbox needs nothing. Its own
container starts as the agent's user, without a token, without capabilities and with a read-only root. Another container
lends the supervisor the place of secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carrel.isolation.inside import BUNDLE, CONTROL, HOME, SECRETS, WORKSPACE
from carrel.isolation.rootfs import PYTHON, SANDBOX_UID
from carrel.providers import bundle

Manifest = dict[str, Any]

INSTANCE, SANDBOX = "carrel/instance", "carrel/sandbox"
"""Labels: the server that owns an object, and a hash of the sandbox's id."""
ID = "carrel/id"
"""An annotation: the id of a sandbox."""
CREDENTIALS = "carrel/credentials"
"""An annotation: when the credentials end that a pod of a pool has started with."""
CONTAINER = "sandbox"
PORT = 7443
"""Where supervisors listen for servers, with mutual TLS."""
CORE, EXTENSIONS = "agents.x-k8s.io", "extensions.agents.x-k8s.io"
"""The API groups of agent-sandbox."""
VERSIONS = ("v1beta1", "v1alpha1")
"""Those that are understood, the preferred one first."""
LENT_SECRETS = "/proc/self/fd/100"
"""Where the supervisor finds the borrowed place of secrets; see `carrel.supervisor.lent_directory`."""
CREDENTIALS_FILE = f"{CONTROL}/slot.json"
_UNPACKED, _SECRET, _SLOTS = "/carrel/bundle", "/carrel/secret", "/carrel/slots"
_POD_NAME = "$(POD_NAME)"
_CREDENTIALS_KEY = "slot.json"
_MOUNTED_NAMES = {f"{PYTHON}": PYTHON.lstrip("/"), **{path: path.lstrip("/") for path in bundle.NAMES}}
"""What of the bundle belongs elsewhere in a sandbox: paths there, and paths in the bundle."""
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_UNPACKING = {"cpu": "1", "memory": "256Mi"}
_LENDING = {"cpu": "200m", "memory": "64Mi"}
_LENT = "/carrel/secrets"


@dataclass(frozen=True)
class PodRequest:
    """Everything that decides about the pod of a sandbox.

    `workspace` is a path in the volume of `claim`. With `slots`, the path of a folder there, the pod makes a directory
    in that folder instead, with its own name. `secret` has the credentials of a slot. `probe` is an address that no
    sandbox may reach: the init container tries.
    """

    image: str
    bundle_image: str
    claim: str
    workspace: str
    secret: str
    slots: str = ""
    cpus: float | None = None
    memory_mb: int | None = None
    runtime_class: str = ""
    pull_policy: str = "IfNotPresent"
    user_namespaces: bool = False
    probe: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def pod_spec(request: PodRequest) -> Manifest:
    """Return the specification of a pod."""
    scratch = max(16, min(512, (request.memory_mb or 1024) // 4))
    memory = {"/tmp": ("tmp", scratch), HOME: ("home", scratch), "/dev/shm": ("shm", max(8, scratch // 4))}
    spec: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "hostname": "carrel",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": SANDBOX_UID,
            "runAsGroup": SANDBOX_UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_unpacking(request)],
        "containers": [
            {
                "name": CONTAINER,
                "image": request.image,
                "imagePullPolicy": request.pull_policy,
                "command": bundle.remote_command("0.0.0.0", PORT, CREDENTIALS_FILE, lent=True),
                "workingDir": "/",
                "ports": [{"name": "control", "containerPort": PORT, "protocol": "TCP"}],
                "securityContext": _RESTRICTED,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "resources": _resources(request),
                "volumeMounts": [
                    {"name": "bundle", "mountPath": BUNDLE, "readOnly": True},
                    *(
                        {"name": "bundle", "mountPath": path, "subPath": inside, "readOnly": True}
                        for path, inside in _MOUNTED_NAMES.items()
                    ),
                    {"name": "control", "mountPath": CONTROL},
                    *({"name": name, "mountPath": path} for path, (name, _) in memory.items()),
                    {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
                    _workspace(request),
                ],
            },
            {
                "name": "secrets",
                "image": request.bundle_image,
                "imagePullPolicy": request.pull_policy,
                "command": bundle.lend_command(_LENT),
                "workingDir": "/",
                "securityContext": _RESTRICTED,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "resources": {"limits": _LENDING, "requests": {"cpu": "1m", "memory": "16Mi"}},
                "volumeMounts": [{"name": "secrets", "mountPath": _LENT}],
            },
        ],
        "volumes": [
            {"name": "bundle", "emptyDir": {}},
            {"name": "control", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            *(
                {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}
                for name, size in memory.values()
            ),
            {"name": "secrets", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
            {"name": "credentials", "secret": {"secretName": request.secret, "defaultMode": 0o444}},
            {"name": "workspace", "persistentVolumeClaim": {"claimName": request.claim}},
        ],
    }
    if request.runtime_class:
        spec["runtimeClassName"] = request.runtime_class
    if request.user_namespaces:
        spec["hostUsers"] = False
    if request.slots:
        name = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
        for container in (spec["initContainers"][0], spec["containers"][0]):
            container["env"] = name
        spec["initContainers"][0]["volumeMounts"].append(
            {"name": "workspace", "mountPath": _SLOTS, "subPath": request.slots}
        )
    return spec


def _unpacking(request: PodRequest) -> Manifest:
    copies = [BUNDLE, _UNPACKED, f"{_SECRET}/{_CREDENTIALS_KEY}", CREDENTIALS_FILE]
    own = f"{_SLOTS}/{_POD_NAME}" if request.slots else ""
    return {
        "name": "unpack",
        "image": request.bundle_image,
        "imagePullPolicy": request.pull_policy,
        "command": bundle.unpack_command([*copies, request.probe, own]),
        "workingDir": "/",
        "securityContext": _RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"limits": _UNPACKING, "requests": {"cpu": "10m", "memory": "32Mi"}},
        "volumeMounts": [
            {"name": "bundle", "mountPath": _UNPACKED},
            {"name": "control", "mountPath": CONTROL},
            {"name": "credentials", "mountPath": _SECRET, "readOnly": True},
        ],
    }


def _resources(request: PodRequest) -> Manifest:
    limits: dict[str, str] = {}
    requests = {"cpu": "10m", "memory": "64Mi"}
    if request.cpus is not None:
        limits["cpu"] = f"{max(1, round(request.cpus * 1000))}m"
    if request.memory_mb is not None:
        limits["memory"] = f"{request.memory_mb}Mi"
        requests["memory"] = f"{min(64, request.memory_mb)}Mi"
    return {"limits": limits, "requests": requests} if limits else {"requests": requests}


def _workspace(request: PodRequest) -> Manifest:
    place = {"subPathExpr": f"{request.slots}/{_POD_NAME}"} if request.slots else {"subPath": request.workspace}
    return {"name": "workspace", "mountPath": WORKSPACE, **place}


def pod(name: str, request: PodRequest) -> Manifest:
    """Return a pod of its own, for clusters without agent-sandbox."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(name, request), "spec": pod_spec(request)}


def sandbox(name: str, request: PodRequest, version: str = "v1beta1") -> Manifest:
    """Return a Sandbox: agent-sandbox makes its pod. Nobody looks it up by a service."""
    return {
        "apiVersion": f"{CORE}/{version}",
        "kind": "Sandbox",
        "metadata": _metadata(name, request),
        "spec": {"podTemplate": _pod_template(request)},
    }


def template(name: str, request: PodRequest, version: str = "v1beta1") -> Manifest:
    """Return the template of the sandboxes of a pool. Its policy is ours (`network_policy`), and a claim can change
    neither variables nor volumes.
    """
    spec: Manifest = {
        "podTemplate": _pod_template(request),
        "networkPolicyManagement": "Unmanaged",
        "envVarsInjectionPolicy": "Disallowed",
    }
    if version == "v1beta1":
        spec["volumeClaimTemplatesPolicy"] = "Disallowed"
    return {
        "apiVersion": f"{EXTENSIONS}/{version}",
        "kind": "SandboxTemplate",
        "metadata": _metadata(name, request),
        "spec": spec,
    }


def warm_pool(name: str, labels: Mapping[str, str], size: int, version: str = "v1beta1") -> Manifest:
    """Return a pool of sandboxes of the template with the same name."""
    return {
        "apiVersion": f"{EXTENSIONS}/{version}",
        "kind": "SandboxWarmPool",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "replicas": size,
            "sandboxTemplateRef": {"name": name},
            "updateStrategy": {"type": "Recreate"},
        },
    }


def claim(
    name: str, pool: str, labels: Mapping[str, str], annotations: Mapping[str, str], version: str = "v1beta1"
) -> Manifest:
    """Return a claim of a sandbox from a pool. The sandbox goes with its claim. It gets no labels: agent-sandbox takes
    those of a claim from domains only that its operator has listed.
    """
    spec: Manifest = {"lifecycle": {"shutdownPolicy": "Delete"}}
    if version == "v1beta1":
        spec["warmPoolRef"] = {"name": pool}
    else:  # it names the template, and says by `warmpool` where sandboxes of it may come from
        spec |= {"sandboxTemplateRef": {"name": pool}, "warmpool": pool}
    return {
        "apiVersion": f"{EXTENSIONS}/{version}",
        "kind": "SandboxClaim",
        "metadata": {"name": name, "labels": dict(labels), "annotations": dict(annotations)},
        "spec": spec,
    }


def secret(name: str, labels: Mapping[str, str], credentials: str) -> Manifest:
    """Return the secret with the credentials of slots."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": dict(labels)},
        "type": "Opaque",
        "stringData": {_CREDENTIALS_KEY: credentials},
    }


def network_policy(name: str, servers: Mapping[str, str]) -> Manifest:
    """Return the policy of every sandbox in a namespace: nothing goes out, and in only what comes from pods with the
    labels `servers`, in any namespace, to the port of the supervisor. Mutual TLS decides which of them are servers.
    """
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": INSTANCE, "operator": "Exists"}]},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": dict(servers)}}],
                    "ports": [{"protocol": "TCP", "port": PORT}],
                }
            ],
            "egress": [],
        },
    }


def _metadata(name: str, request: PodRequest) -> Manifest:
    return {"name": name, "labels": dict(request.labels), "annotations": dict(request.annotations)}


def _pod_template(request: PodRequest) -> Manifest:
    metadata = {"labels": dict(request.labels), "annotations": dict(request.annotations)}
    return {"metadata": metadata, "spec": pod_spec(request)}
