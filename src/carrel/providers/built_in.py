"""The providers that come with carrel: name, isolation level, and how a server gets each. Loads none of them."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = {
    0: "no isolation",
    1: "namespaces or a container",
    2: "a user-space kernel (gVisor)",
    3: "a microVM",
}


@dataclass(frozen=True)
class BuiltIn:
    """A provider of carrel. `off` is what `carrel doctor` says where a server does not open it."""

    name: str
    level: int
    off: str


_SEE = "set CARREL_KUBERNETES_ENABLED=true on a server that has a cluster"
BUILT_IN = {
    each.name: each
    for each in (
        BuiltIn("microvm", 3, "switched off; set CARREL_MICROVM_ENABLED=true on a server with QEMU and KVM"),
        BuiltIn("gvisor", 2, "switched off here; a server as root uses it when `runsc` is installed"),
        BuiltIn("kubernetes-gvisor", 2, f"switched off; {_SEE}, and CARREL_KUBERNETES_GVISOR_CLASS"),
        BuiltIn("namespace", 1, "switched off here"),
        BuiltIn("docker", 1, "switched off; set CARREL_DOCKER_SOCKET to the socket of a Docker or podman daemon"),
        BuiltIn("kubernetes", 1, f"switched off; {_SEE}"),
        BuiltIn("process", 0, "unsafe; CARREL_SANDBOX_ALLOW_PROCESS is not set"),
    )
}
"""By name, strongest first. `open_providers` opens them."""
