"""How a cluster is used. Apart from the provider, which takes longer to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KubernetesOptions:
    """How the operator wants a cluster to be used; see `KubernetesSettings` in `carrel.config`."""

    namespace: str
    image: str
    bundle_image: str
    volume_claim: str
    volume_directory: str
    kubeconfig: str = ""
    pull_policy: str = "IfNotPresent"
    gvisor_class: str = ""
    """The runtime class of the provider `kubernetes-gvisor`."""
    user_namespaces: bool = False
    agent_sandbox: bool = True
    """Whether agent-sandbox is used where it is installed. Otherwise sandboxes are plain pods."""
    warm_pool: int = 0
    """How many pods agent-sandbox keeps ready for each kind of sandbox; 0 for none."""
    volume_max_gb: int = 0
    """How large the claim of the shared volume may become when it fills up; 0 leaves its size to the operator."""
    identified: bool = True
    """Whether servers have SPIFFE IDs. Without them no pod can be reached."""
