"""What the tests on Kubernetes stand on: the cluster, and namespaces with a volume that this host shares."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.images import archive, debian
from tests.support.remote_provider import identities

from carrel.providers import bundle, bundle_image
from carrel.providers.kubernetes.options import KubernetesOptions
from carrel.providers.kubernetes.provider import KubernetesProvider
from carrel.providers.kubernetes.rights import RIGHTS, rules

IMAGE, BUNDLE_IMAGE = "localhost/carrel-sandbox:test", "localhost/carrel-bundle:test"
_SCRIPT = str(Path(__file__).parents[2] / "scripts/cluster")
_GI = "1Gi"


class Cluster:
    """The cluster that these tests run below."""

    def kubectl(self, *arguments: str, stdin: object = None, fails: bool = False) -> str:
        """Run kubectl, and return what it prints. `stdin` is sent as JSON."""
        given = None if stdin is None else json.dumps(stdin)
        done = subprocess.run(
            [_SCRIPT, "kubectl", *arguments], input=given, capture_output=True, text=True, timeout=120
        )
        assert fails or done.returncode == 0, done.stderr
        return done.stdout

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def audited(self) -> list[Any]:
        """The requests of service accounts to the API, in their order."""
        lines = Path(os.environ["CARREL_CLUSTER"], "audit.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def freeze(self, component: str) -> None:
        """Stop a component of the cluster in such a way that its connections stay open."""
        subprocess.run([_SCRIPT, "freeze", component], check=True, timeout=30)

    def thaw(self, component: str) -> None:
        subprocess.run([_SCRIPT, "thaw", component], check=True, timeout=30)

    def add_image(self, file: Path) -> None:
        subprocess.run([_SCRIPT, "import", str(file)], check=True, capture_output=True, timeout=120)


def add_images(cluster: Cluster, place: Path) -> None:
    """Give the cluster the image of the tests' sandboxes, and the one of the bundle."""
    debian(place / "sandbox")
    archive(place / "sandbox", place / "sandbox.tar", IMAGE)
    made = bundle.provide(str(place / "bundles"), remote=True)
    bundle_image.write(made, str(place / "bundle.tar"), BUNDLE_IMAGE)
    for name in ("sandbox.tar", "bundle.tar"):
        cluster.add_image(place / name)
        (place / name).unlink()


class Ground:
    """A namespace, and a volume in a directory of this host that its pods can mount."""

    def __init__(self, cluster: Cluster, place: Path, *, storage_class: str = "", **options: object):
        self.cluster = cluster
        self.place = place
        self.name = f"carrel-{secrets.token_hex(4)}"
        self.volume = place / "volume"
        self.volume.mkdir(mode=0o755)
        (place / "run").mkdir(mode=0o700)
        self.options = KubernetesOptions(
            namespace=self.name,
            image=IMAGE,
            bundle_image=BUNDLE_IMAGE,
            volume_claim="workspaces",
            volume_directory=str(self.volume),
            kubeconfig="",
            pull_policy="Never",
            **options,  # type: ignore[arg-type]
        )
        labels = {f"pod-security.kubernetes.io/{kind}": "restricted" for kind in ("enforce", "warn")}
        self._apply("Namespace", self.name, labels=labels)
        common = {"accessModes": ["ReadWriteMany"], "storageClassName": storage_class}
        host = {"hostPath": {"path": str(self.volume), "type": "Directory"}, "capacity": {"storage": _GI}}
        self._apply("PersistentVolume", self.name, spec={**common, **host})
        claim = {**common, "volumeName": self.name, "resources": {"requests": {"storage": _GI}}}
        self._apply("PersistentVolumeClaim", "workspaces", self.name, spec=claim)
        self._add_account()
        self.options = dataclasses.replace(self.options, kubeconfig=self.kubeconfig())

    def _add_account(self) -> None:
        """Make a service account for the server. It has the rights of the table, and no more."""
        self._apply("ServiceAccount", "carrel", self.name)
        for namespace, named in ((self.name, False), ("default", True)):
            name = f"carrel-{self.name}"
            self._apply(
                "Role", name, namespace, rules=rules(tuple(each for each in RIGHTS if bool(each.name) is named))
            )
            role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
            subject = {"kind": "ServiceAccount", "name": "carrel", "namespace": self.name}
            self._apply("RoleBinding", name, namespace, roleRef=role, subjects=[subject])

    def kubeconfig(self, server: str = "") -> str:
        """Write a kubeconfig file of that account, and return its path. `server` is another address of the API."""
        document = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
        token = self.cluster.kubectl("create", "token", "carrel", "-n", self.name, "--duration=2h").strip()
        document["users"][0]["user"] = {"token": token}
        if server:
            document["clusters"][0]["cluster"]["server"] = server
        path = self.place / f"kubeconfig-{secrets.token_hex(4)}"
        path.write_text(json.dumps(document))
        return str(path)

    def _apply(
        self, kind: str, name: str, namespace: str = "", *, labels: dict[str, str] | None = None, **more: object
    ) -> None:
        metadata = {"name": name, "labels": labels or {}} | ({"namespace": namespace} if namespace else {})
        version = "rbac.authorization.k8s.io/v1" if kind.startswith("Role") else "v1"
        body = {"apiVersion": version, "kind": kind, "metadata": metadata, **more}
        self.cluster.kubectl("apply", "-f", "-", stdin=body)

    def provider(self, server: str = "one") -> KubernetesProvider:
        """Return a provider of a server. All of them have one authority."""
        own = identities(name=server).sandboxes
        return KubernetesProvider(str(self.place / "run"), self.options, own, gvisor=bool(self.options.gvisor_class))

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a server whose sandboxes are pods in this namespace."""
        own = {
            "enabled": "true",
            "kubeconfig": self.options.kubeconfig,
            "namespace": self.name,
            "image": IMAGE,
            "bundle_image": BUNDLE_IMAGE,
            "pull_policy": "Never",
            "volume_claim": "workspaces",
            "volume_directory": str(self.volume),
            "gvisor_class": self.options.gvisor_class,
        }
        provider = "kubernetes-gvisor" if self.options.gvisor_class else "kubernetes"
        common = {"volumes": "directory", "sandbox.provider": provider, "spiffe.source": "carrel"}
        return common | {f"kubernetes.{name}": value for name, value in own.items()}

    def with_options(self, **options: object) -> Ground:
        """Return the same namespace, used in another way."""
        other = copy.copy(self)
        other.options = dataclasses.replace(self.options, **options)  # type: ignore[arg-type]
        return other

    def left(self) -> list[str]:
        """The pods and sandboxes in the namespace."""
        found = self.cluster.get("pods,sandboxes.agents.x-k8s.io", "-n", self.name)
        return [f"{each['kind']}/{each['metadata']['name']}" for each in found["items"]]

    def remove(self) -> None:
        self.cluster.kubectl("delete", "namespace", self.name, "--wait=true")
        self.cluster.kubectl("delete", "persistentvolume", self.name)
        self.cluster.kubectl("delete", "role,rolebinding", f"carrel-{self.name}", "-n", "default")
        shutil.rmtree(self.place)


def variables(settings: dict[str, str]) -> dict[str, str]:
    """Settings as environment variables."""
    return {f"CARREL_{name.replace('.', '_').upper()}": value for name, value in settings.items()}
