"""Builds the programs of the test cluster from pinned Go modules and Debian packages, once, into the cache of the user.

The versions and checksums of Go modules are in the folders beside this file; what is built is kept below a name made of
them. Several may build at once: one does, the others wait. Knows nothing of running the cluster.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FORMAT = 1
"""Changes when the same sources would be built in another way."""
VERSION = "v1.34.4"
NETWORK_POLICIES = "sigs.k8s.io/kube-network-policies@v1.1.0"
PACKAGES = ("containernetworking-plugins", "busybox-static", "conntrack", "libnetfilter-conntrack3", "libnfnetlink0")
"""Debian packages that are unpacked privately: nothing of them is installed."""
INSTALLED = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "iptables-legacy", "unshare", "nsenter", "ip")
_SET_SCORE = "SetOOMScore("
_GO = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false", "CGO_ENABLED": "0"}


@dataclass(frozen=True)
class Programs:
    """Where each program is."""

    folder: Path
    kubernetes: Path
    agent_sandbox: Path
    agent_sandbox_manifests: Path
    network_policies: Path
    gvisor_shim: Path
    runsc: Path
    debian: Path

    @classmethod
    def of(cls, folder: Path) -> Programs:
        runsc = subprocess.run([HERE.parent / "build-runsc"], check=True, stdout=subprocess.PIPE, text=True)
        return cls(
            folder,
            folder / "kubernetes",
            folder / "agent-sandbox-controller",
            folder / "agent-sandbox.yaml",
            folder / "kube-network-policies",
            folder / "containerd-shim-runsc-v1",
            Path(runsc.stdout.strip()),
            folder / "debian",
        )


def missing() -> str | None:
    """Return why this machine cannot run the cluster; None if it can."""
    if os.geteuid() != 0:
        return "only root can start a cluster: it makes namespaces, cgroups and network devices"
    lacking = [name for name in INSTALLED if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed: run `make setup`, which installs them on Debian"
    if not _is_built(_folder()) and shutil.which("go") is None:
        return "Go is missing, which builds Kubernetes; install it"
    return None


def provide() -> Path:
    """Return the folder of the programs, and build those that are missing (eight minutes of two cores, once)."""
    folder = _folder()
    if _is_built(folder):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, build in _BUILDS.items():
            if not (folder / name).exists():
                _make(folder, name, build)
    return folder


def _make(folder: Path, name: str, build: Callable[[Path, Path], None]) -> None:
    print(f"cluster: building {name}", file=sys.stderr)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="draft-", dir=folder) as draft:
        build(Path(draft), Path(draft, "result"))
        Path(draft, "result").rename(folder / name)
    print(f"cluster:   {time.monotonic() - began:.0f} s", file=sys.stderr)


def _folder() -> Path:
    """Return the folder of what these sources make. Its name changes with each of them."""
    whole = hashlib.sha256(repr((FORMAT, VERSION, NETWORK_POLICIES, PACKAGES)).encode())
    for path in sorted((*HERE.glob("*/main.go"), *HERE.glob("*/go.*"))):
        whole.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "carrel" / "kubernetes" / whole.hexdigest()[:16]


def _is_built(folder: Path) -> bool:
    return all((folder / name).exists() for name in _BUILDS)


# how each is built: a draft folder, which is removed, and where the result belongs


def _kubernetes(draft: Path, result: Path) -> None:
    facts = {"gitVersion": VERSION, "gitMajor": "1", "gitMinor": "34", "gitCommit": "module", "gitTreeState": "clean"}
    places = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    flags = [f"-X {place}.{key}={value}" for place in places for key, value in facts.items()]
    _go(draft, HERE / "base", ".", result, *flags, f"-X {places[0]}.buildDate=2026-01-01T00:00:00Z")


def _agent_sandbox(draft: Path, result: Path) -> None:
    _go(draft, HERE / "agent-sandbox", "sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller", result)


def _agent_sandbox_manifests(draft: Path, result: Path) -> None:
    """Copy the manifests of the module; the cluster renders them. Its controller is an image of ours there."""
    module = _module(HERE / "agent-sandbox", "sigs.k8s.io/agent-sandbox")
    kubectl = _folder() / "kubernetes"
    made = subprocess.run(
        [kubectl, "kubectl", "kustomize", module / "k8s"], check=True, stdout=subprocess.PIPE, text=True
    )
    lines = []
    for line in made.stdout.splitlines():
        if "ko://sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller" in line:
            line = line.partition("image:")[0] + "image: localhost/agent-sandbox-controller:test"  # noqa: PLW2901
        lines.append(line.replace("--leader-elect=true", "--leader-elect=false"))
    result.write_text("\n".join(lines) + "\n")


def _network_policies(draft: Path, result: Path) -> None:
    """Build in a copy of the module, so that its own checksums hold: the database does not answer for all of them."""
    words = ["go", "mod", "download", "-json", NETWORK_POLICIES]
    variables = {**os.environ, **_GO, "GOFLAGS": ""}
    found = subprocess.run(words, cwd=draft, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    source = draft / "source"
    shutil.copytree(json.loads(found.stdout)["Dir"], source, copy_function=shutil.copyfile)
    _go(draft, source, "./cmd/kube-network-policies/standard", result)


def _gvisor_shim(draft: Path, result: Path) -> None:
    """Build the shim so that it goes on where a machine does not let it lower its OOM score (no CAP_SYS_RESOURCE)."""
    module = "gvisor.dev/gvisor"
    source = draft / "source"
    shutil.copytree(_module(HERE / "gvisor", module), source, copy_function=shutil.copyfile)
    changed = source / "pkg/shim/v1/manager.go"
    changed.chmod(0o644)
    lines = changed.read_text().splitlines(keepends=True)
    tolerant = [
        line.replace("err != nil {", "err != nil && !os.IsPermission(err) {") if _SET_SCORE in line else line
        for line in lines
    ]
    if tolerant == lines:
        raise SystemExit(f"cluster: gVisor's shim has no `{_SET_SCORE}` any more")
    changed.write_text("".join(tolerant))
    modules = draft / "modules"
    shutil.copytree(HERE / "gvisor", modules)
    subprocess.run(["go", "mod", "edit", f"-replace={module}={source}"], cwd=modules, check=True)
    _go(draft, modules, f"{module}/shim", result)


def _debian(draft: Path, result: Path) -> None:
    subprocess.run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *PACKAGES], cwd=draft, check=True)
    result.mkdir()
    for package in sorted(draft.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, result], check=True)


_BUILDS: Mapping[str, Callable[[Path, Path], None]] = {
    "debian": _debian,
    "kubernetes": _kubernetes,
    "agent-sandbox-controller": _agent_sandbox,
    "agent-sandbox.yaml": _agent_sandbox_manifests,
    "kube-network-policies": _network_policies,
    "containerd-shim-runsc-v1": _gvisor_shim,
}


def _go(draft: Path, folder: Path, package: str, result: Path, *linker: str) -> None:
    """Build with a build cache of its own, which is removed: it is ten times as large as the program."""
    command = ["nice", "-n", "10", "go", "build", "-trimpath", "-ldflags", " ".join(("-s -w", *linker))]
    variables = {**os.environ, **_GO, "GOCACHE": str(draft / "cache")}
    subprocess.run([*command, "-o", result, package], cwd=folder, env=variables, check=True, stdout=sys.stderr)


def _module(folder: Path, name: str) -> Path:
    """Return the folder of a required module, after its checksum was verified."""
    environment = {**os.environ, **_GO}
    subprocess.run(["go", "mod", "download", name], cwd=folder, env=environment, check=True, stdout=sys.stderr)
    words = ["go", "list", "-m", "-f", "{{.Dir}}", name]
    found = subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Path(found.stdout.strip())
