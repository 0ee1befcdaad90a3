"""The first process of the machine: makes its mounts and network, starts Kubernetes and reaps what ends.

Its argument is the folder of the machine. It writes the file `ready` there when pods can run. When a component ends, it
ends too, and so does everything.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import archives
import layout

START_S = 120.0
_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet writes. It belongs to the whole machine below, so the kubelet gets files of its own."""
_AUDITED = [
    {"level": "None", "userGroups": ["system:nodes", "system:masters", "system:serviceaccounts:kube-system"]},
    {"level": "None", "userGroups": ["system:serviceaccounts:agent-sandbox-system"]},
    {"level": "Metadata", "userGroups": ["system:serviceaccounts"], "omitStages": ["RequestReceived"]},
    {"level": "None"},
]
"""The requests of service accounts are written down, so that tests see which rights a program uses."""


class Node:
    """One node with its control plane."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._pki = folder / "pki"
        self._programs = {key: Path(value) for key, value in json.loads((folder / "programs.json").read_text()).items()}
        self._components: dict[str, subprocess.Popen[bytes]] = {}
        self._path = folder / "bin"
        context = ssl.create_default_context(cafile=str(self._pki / "ca.crt"))
        context.load_cert_chain(self._pki / "admin.crt", self._pki / "admin.key")
        self._tls = context

    def run(self) -> None:
        """Start everything, then reap."""
        self._mount()
        self._connect()
        self._link_programs()
        self._start_store()
        self._start_containerd()
        self._wait_for("API server", self._serves_api)
        self._start_controllers()
        self._wait_for("containerd", lambda: self._ctr("version") == 0)
        self._import_images()
        self._start_kubelet()
        self._start_network_policies()
        self._wait_for("node", self._is_ready)
        self._wait_for("service account", lambda: self._kubectl("get", "serviceaccount", "default") == 0)
        self._install()
        (self._folder / "ready").touch()
        while True:
            ended, status = os.wait()
            for name, process in self._components.items():
                if process.pid == ended:
                    raise SystemExit(f"{name} ended with status {status}")

    # the machine

    def _mount(self) -> None:
        _do("mount", "--make-rshared", "/")
        _do("mount", "-t", "proc", "proc", "/proc")
        _do("umount", "-l", "/sys/fs/cgroup")
        _do("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys/fs/cgroup")
        for controller in layout.CONTROLLERS:
            place = Path("/sys/fs/cgroup", controller)
            place.mkdir()
            what = "none,name=systemd" if controller == "systemd" else controller
            _do("mount", "-t", "cgroup", "-o", what, "cgroup", str(place))
        _do("mount", "-t", "tmpfs", "tmpfs", "/run")
        # The kernel asks for one proc with nothing mounted over it before a user namespace may mount its own.
        Path("/run/proc").mkdir()
        _do("mount", "-t", "proc", "proc", "/run/proc")
        for name in ("var", "etc", "opt"):  # what is written there stays in the folder
            upper, work = self._folder / "files" / name, self._folder / "files" / f".{name}"
            upper.mkdir(parents=True)
            work.mkdir()
            options = f"lowerdir=/{name},upperdir={upper},workdir={work}"
            _do("mount", "-t", "overlay", "-o", options, "overlay", f"/{name}")
        _do("mount", "--make-rshared", "/")
        for number, (name, text) in enumerate(_SYSCTLS.items()):
            file = self._folder / f"sysctl-{number}"
            file.write_text(text)
            _do("mount", "--bind", str(file), f"/proc/sys/{name}")

    def _connect(self) -> None:
        """Give the machine a network without a way out, and no name server."""
        _do("hostname", layout.NODE)
        Path("/etc/resolv.conf").unlink(missing_ok=True)
        Path("/etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
        Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{layout.ADDRESS} {layout.NODE}\n")
        _do("ip", "link", "set", "lo", "up")
        _do("ip", "link", "add", "node0", "type", "bridge")
        _do("ip", "address", "add", f"{layout.ADDRESS}/24", "dev", "node0")
        _do("ip", "link", "set", "node0", "up")
        _do("ip", "route", "add", "default", "dev", "node0")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _link_programs(self) -> None:
        """Make the folder of programs that have to be found by their names."""
        self._path.mkdir()
        shim = self._path / "containerd-shim-runsc-v1"
        shim.write_text(_SHIM.format(self._programs["gvisor_shim"]))
        shim.chmod(0o755)
        legacy = Path("/usr/sbin/xtables-legacy-multi")
        for name in ("iptables", "ip6tables"):
            for kind in ("", "-save", "-restore"):
                (self._path / f"{name}{kind}").symlink_to(legacy)
        debian = self._programs["debian"]
        (self._path / "conntrack").symlink_to(debian / "usr/sbin/conntrack")
        libraries = ":".join(str(path) for path in (debian / "usr/lib").glob("*-linux-gnu"))
        os.environ["PATH"] = f"{self._path}:{os.environ['PATH']}"
        os.environ["LD_LIBRARY_PATH"] = libraries

    # components

    def _start(self, name: str, *command: object) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            words = [str(word) for word in command]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._components[name] = process
        (self._folder / f"{name}.pid").write_text(str(process.pid))

    def _kubernetes(self, name: str, *arguments: object) -> None:
        self._start(name, self._programs["kubernetes"], name, *arguments)

    def _start_store(self) -> None:
        """Start etcd and the API server."""
        data = self._folder / "etcd"
        data.mkdir(mode=0o700)
        clients, peers = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        settings = {
            "name": "default",
            "data-dir": str(data),
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
            "log-level": "error",
            "warning-unary-request-duration": 1_000_000_000,
            "unsafe-no-fsync": True,
        }
        self._kubernetes("etcd", self._settings("etcd", settings))
        pki = self._pki
        audit = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": _AUDITED}
        self._kubernetes(
            "kube-apiserver",
            f"--audit-policy-file={self._settings('audit', audit)}",
            f"--audit-log-path={self._folder}/audit.jsonl",
            f"--etcd-servers={clients}",
            "--bind-address=0.0.0.0",
            "--secure-port=6443",
            f"--advertise-address={layout.ADDRESS}",
            f"--service-cluster-ip-range={layout.SERVICES}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--service-account-key-file={pki}/accounts.pub",
            f"--service-account-signing-key-file={pki}/accounts.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
        )

    def _start_controllers(self) -> None:
        pki = self._pki
        for name in ("controller-manager", "scheduler"):
            own = f"{pki}/{name}.kubeconfig"
            more: list[str] = []
            if name == "controller-manager":
                more = [
                    "--use-service-account-credentials=true",
                    f"--root-ca-file={pki}/ca.crt",
                    f"--service-account-private-key-file={pki}/accounts.key",
                    f"--cluster-signing-cert-file={pki}/ca.crt",
                    f"--cluster-signing-key-file={pki}/ca.key",
                    "--allocate-node-cidrs=true",
                    f"--cluster-cidr={layout.PODS}",
                    f"--service-cluster-ip-range={layout.SERVICES}",
                ]
            self._kubernetes(
                f"kube-{name}",
                f"--kubeconfig={own}",
                f"--authentication-kubeconfig={own}",
                f"--authorization-kubeconfig={own}",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                *more,
            )

    def _start_containerd(self) -> None:
        config = Path("/etc/cni/net.d")
        config.mkdir(parents=True, exist_ok=True)
        # Not a bridge: pods on one bridge reach each other below the policies.
        ipam = {
            "type": "host-local",
            "dataDir": "/run/cni-ipam",
            "ranges": [[{"subnet": layout.PODS_HERE}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugins = [{"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": ipam}]
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
        (config / "10-pods.conflist").write_text(json.dumps(network))
        runsc = self._folder / "runsc.toml"
        runsc.write_text(_RUNSC.format(self._programs["runsc"]))
        settings = self._folder / "containerd.toml"
        settings.write_text(
            _CONTAINERD.format(
                root=self._folder / "containerd",
                socket=layout.CONTAINERD,
                pause=layout.PAUSE,
                plugins=self._programs["debian"] / "usr/lib/cni",
                runsc=runsc,
            )
        )
        self._start("containerd", "containerd", "--config", settings)

    def _import_images(self) -> None:
        pause, controller = self._folder / "pause.tar", self._folder / "controller.tar"
        busybox = {"/bin/busybox": self._programs["debian"] / "bin/busybox"}
        archives.write(pause, layout.PAUSE, ["/bin/busybox", "sleep", "1000000000"], busybox)
        program = {"/controller": self._programs["agent_sandbox"]}
        archives.write(controller, layout.CONTROLLER, ["/controller"], program)
        for archive in (pause, controller):
            if self._quietly(*layout.IMPORT, str(archive)) != 0:
                raise SystemExit(f"containerd did not import {archive.name}")
            archive.unlink()

    def _start_kubelet(self) -> None:
        pki = self._pki
        resolver = self._folder / "resolv.conf"
        resolver.write_text(f"nameserver {layout.DNS_SERVICE}\n")
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{layout.CONTAINERD}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{pki}/kubelet.crt",
            "tlsPrivateKeyFile": f"{pki}/kubelet.key",
            "clusterDNS": [layout.DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "resolvConf": str(resolver),
            "enforceNodeAllocatable": ["pods"],
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "maxPods": 250,
            "podPidsLimit": 4096,
            "nodeStatusUpdateFrequency": "4s",
        }
        self._kubernetes(
            "kubelet",
            f"--config={self._settings('kubelet', kubelet)}",
            f"--kubeconfig={pki}/kubelet.kubeconfig",
            f"--root-dir={self._folder}/kubelet",
            f"--hostname-override={layout.NODE}",
            f"--node-ip={layout.ADDRESS}",
        )
        proxy = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": f"{pki}/proxy.kubeconfig"},
            "clusterCIDR": layout.PODS,
            "hostnameOverride": layout.NODE,
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
        self._kubernetes("kube-proxy", f"--config={self._settings('kube-proxy', proxy)}")

    def _start_network_policies(self) -> None:
        """Start the controller that judges packets, and hand it those of pods. It makes an nftables table for that by
        itself; a kernel without CONFIG_NFT_QUEUE refuses that one, and has the target NFQUEUE of iptables.
        """
        self._start(
            "kube-network-policies",
            self._programs["network_policies"],
            f"--kubeconfig={self._pki}/admin.kubeconfig",
            f"--hostname-override={layout.NODE}",
            "--metrics-bind-address=127.0.0.1:19080",
        )
        queue = ("-j", "NFQUEUE", "--queue-num", "100")
        known = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "RETURN")
        rules = (
            ("-N", "PODS"),
            ("-A", "PODS", "-m", "owner", "--uid-owner", "0", "-j", "RETURN"),  # the node's own: probes, control
            ("-A", "PODS", *known),
            ("-A", "PODS", "-s", layout.PODS, *queue),
            ("-A", "PODS", "-d", layout.PODS, *queue),
            ("-A", "POSTROUTING", "-j", "PODS"),
            # From a pod to the node itself, which runs the API server: such packets are not routed on.
            ("-N", "PODS-IN"),
            ("-A", "PODS-IN", "-i", "lo", "-j", "RETURN"),
            ("-A", "PODS-IN", *known),
            ("-A", "PODS-IN", "-s", layout.PODS, *queue),
            ("-A", "INPUT", "-j", "PODS-IN"),
        )
        for rule in rules:
            _do("iptables", "-w", "-t", "mangle", *rule)

    def _install(self) -> None:
        """Install agent-sandbox and the runtime class of gVisor; return when claims are accepted."""
        runtime = {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": "gvisor"},
            "handler": "runsc",
        }
        class_file = self._settings("runtime-class", runtime)
        manifests = self._programs["agent_sandbox_manifests"]
        for file in (class_file, manifests):
            if self._kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file)) != 0:
                raise SystemExit(f"{file} was not accepted")
        rollout = ("rollout", "status", "deployment/agent-sandbox-controller", f"--timeout={START_S:.0f}s")
        if self._kubectl("-n", "agent-sandbox-system", *rollout) != 0:
            raise SystemExit("the controller of agent-sandbox did not start")
        metadata = {"name": "probe", "namespace": "default"}
        spec = {"podTemplate": {"spec": {"containers": [{"name": "none", "image": "none"}]}}}
        probe = {"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": metadata, "spec": spec}
        trial = self._settings("probe", probe)
        # The first one is refused while the conversion webhook does not serve yet.
        self._wait_for("agent-sandbox", lambda: self._kubectl("create", "--dry-run=server", "-f", str(trial)) == 0)

    # small things

    def _settings(self, name: str, content: object) -> Path:
        """Write a file of settings: JSON, which is YAML too."""
        file = self._folder / f"{name}.json"
        file.write_text(json.dumps(content))
        return file

    def _wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not holds():
            for name, process in self._components.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended with status {process.returncode}")
            if time.monotonic() > until:
                raise SystemExit(f"the {what} is not ready after {START_S:.0f} s")
            time.sleep(0.1)

    def _serves_api(self) -> bool:
        try:
            with urllib.request.urlopen("https://127.0.0.1:6443/readyz", timeout=5, context=self._tls):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _is_ready(self) -> bool:
        try:
            url = f"https://127.0.0.1:6443/api/v1/nodes/{layout.NODE}"
            with urllib.request.urlopen(url, timeout=5, context=self._tls) as answer:
                conditions = json.load(answer)["status"].get("conditions", ())
        except (urllib.error.URLError, OSError):
            return False
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def _ctr(self, *arguments: str) -> int:
        return self._quietly("ctr", "-a", layout.CONTAINERD, *arguments)

    def _kubectl(self, *arguments: str) -> int:
        program = str(self._programs["kubernetes"])
        return self._quietly(program, "kubectl", f"--kubeconfig={self._pki}/admin.kubeconfig", *arguments)

    def _quietly(self, *command: str) -> int:
        """Run a program; what it says goes to a log of its own."""
        with (self._folder / "commands.log").open("ab") as log:
            return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode


def _do(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


_SHIM = """#!/bin/sh
# containerd 1.6 wants a bare address from `shim start`; a newer shim answers with JSON.
case " $* " in
*" start "*)
    answer=$({0} "$@") || exit
    printf %s "$answer" | sed -n 's/.*"address":"\\([^"]*\\)".*/\\1/p' | tr -d '\\n' ;;
*) exec {0} "$@" ;;
esac
"""

_RUNSC = """binary_name = "{}"
[runsc_config]
  platform = "systrap"
"""

# restrict_oom_score_adj: without CAP_SYS_RESOURCE runc cannot lower the score of the pause container.
_CONTAINERD = """version = 2
root = "{root}"
state = "/run/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "runc"
        SystemdCgroup = false
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runsc]
      runtime_type = "io.containerd.runsc.v1"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runsc.options]
        TypeUrl = "io.containerd.runsc.v1.options"
        ConfigPath = "{runsc}"
"""

if __name__ == "__main__":
    Node(Path(sys.argv[1])).run()
