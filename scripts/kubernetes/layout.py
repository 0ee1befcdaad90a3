"""Names and addresses of the test cluster. They exist in its own namespaces only."""

from __future__ import annotations

NODE = "node1"
ADDRESS = "10.99.0.1"
SERVICES, API_SERVICE, DNS_SERVICE = "10.96.0.0/16", "10.96.0.1", "10.96.0.10"
PODS, PODS_HERE = "10.244.0.0/16", "10.244.0.0/24"
CONTAINERD = "/run/containerd/containerd.sock"
IMPORT = ("ctr", "-a", CONTAINERD, "-n", "k8s.io", "images", "import")
PAUSE = "localhost/pause:test"
CONTROLLER = "localhost/agent-sandbox-controller:test"
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
"""The hierarchies of cgroup v1 that the kubelet and containerd use."""
