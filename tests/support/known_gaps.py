"""The known gaps of each provider, each with its reason. The tests and `docs/reference/providers.md` read them here.

Users read the reasons: write plain English. A gap that is closed is deleted here, or the tests fail.
"""

from __future__ import annotations

from carrel.providers.base import Capability

_ON_KUBERNETES = {
    Capability.ENVIRONMENTS: "the environments of a server are not shared with the nodes of a cluster yet",
    Capability.FOLDERS: "a folder of the host is not on the nodes of a cluster",
    Capability.IMAGES: "the images of carrel's own storage are not on the nodes; all pods have the image of a setting",
    Capability.IMAGE_BUILDS: "images are built with the provider `namespace`",
    Capability.LIMIT_PROCESSES: "Kubernetes has no such limit for a pod; the kubelet has one for all (`podPidsLimit`)",
    Capability.MASKS: "a pod that keeps to `restricted` cannot mount anything over its programs",
    Capability.NETWORK_BRIDGE: "network policies let nothing out of a pod",
    Capability.NETWORK_HOST: "network policies let nothing out of a pod",
}
NEVER: dict[str, dict[Capability, str]] = {
    "kubernetes": _ON_KUBERNETES,
    "kubernetes-gvisor": _ON_KUBERNETES,
    "namespace": {},
    "docker": {
        Capability.FOLDERS: "the identity of a folder cannot be given to the daemon, only its path",
        Capability.IMAGE_BUILDS: "images are built with the provider `namespace`",
        Capability.NETWORK_BRIDGE: "a container has no network but the egress proxy",
        Capability.NETWORK_HOST: "a container has no network but the egress proxy",
    },
    "gvisor": {
        Capability.FOLDERS: "a folder of the host cannot be served in place",
        Capability.IMAGE_BUILDS: "images are built with the provider `namespace`",
        Capability.NETWORK_BRIDGE: "a sandbox has no network but the egress proxy",
        Capability.NETWORK_HOST: "a sandbox has no network but the egress proxy",
    },
    "microvm": {
        Capability.FOLDERS: "a folder of the host cannot be served in place",
        Capability.IMAGE_BUILDS: "images are built with the provider `namespace`",
        Capability.NETWORK_BRIDGE: "a machine has no network device",
        Capability.NETWORK_HOST: "a machine has no network device",
    },
    "process": {
        **dict.fromkeys(
            (
                Capability.FILE_ISOLATION,
                Capability.PROCESS_ISOLATION,
                Capability.LIMIT_CPUS,
                Capability.LIMIT_MEMORY,
                Capability.LIMIT_PROCESSES,
                Capability.LIMIT_DISK,
                Capability.NETWORK_NONE,
                Capability.NETWORK_ALLOWLIST,
                Capability.NETWORK_BRIDGE,
                Capability.MASKS,
            ),
            "nothing isolates or limits a plain process",
        ),
        Capability.SECRETS: "every process of the same user could read them",
        Capability.ENVIRONMENTS: "nothing is mounted for a plain process",
        Capability.FOLDERS: "nothing protects the folder",
        Capability.IMAGES: "a plain process runs on the root of the host",
        Capability.IMAGE_BUILDS: "a plain process runs on the root of the host",
    },
}
"""Capabilities that a provider does not promise on any host. Requests that need them are refused."""

_NO_ENVIRONMENTS = "only on a server, which shares its environments with sandboxes"
_NO_DIRECTORY = "only on a server, which has a directory for images"
_NO_CPU = "only with a cgroup that has the controller `cpu`"
SOMETIMES: dict[str, dict[Capability, str]] = {
    "namespace": {
        Capability.ENVIRONMENTS: _NO_ENVIRONMENTS,
        Capability.FOLDERS: "only below the roots that the operator lists",
        Capability.IMAGES: "only on a server, which has a directory for images, where the kernel has overlay mounts",
        Capability.IMAGE_BUILDS: "as for images",
        Capability.LIMIT_CPUS: _NO_CPU,
        Capability.NETWORK_BRIDGE: "only where `slirp4netns` is installed and /dev/net/tun can be opened",
    },
    "docker": {
        Capability.ENVIRONMENTS: _NO_ENVIRONMENTS,
        Capability.IMAGES: _NO_DIRECTORY,
        Capability.LIMIT_CPUS: "only where the daemon can limit them",
        Capability.LIMIT_MEMORY: "only where the daemon can limit it",
        Capability.LIMIT_PROCESSES: "only where the daemon can limit them",
    },
    "gvisor": {
        Capability.ENVIRONMENTS: _NO_ENVIRONMENTS,
        Capability.IMAGES: "only on a server, which has a directory for images, where the kernel has overlay mounts",
        Capability.LIMIT_CPUS: _NO_CPU,
    },
    "microvm": {
        Capability.ENVIRONMENTS: _NO_ENVIRONMENTS,
        Capability.IMAGES: "only on a server, which has a directory for images, where the kernel has overlay mounts",
        Capability.LIMIT_CPUS: _NO_CPU,
    },
    "kubernetes": {},
    "kubernetes-gvisor": {},
    "process": {},
}
"""Capabilities that a provider promises only where the host, or the server, has what they need."""

ATTACKED: dict[str, tuple[str, ...]] = {
    "docker": (
        *("test_host_files", "test_mounts", "test_network", "test_privileges", "test_processes", "test_secrets"),
    ),
    "gvisor": ("test_host_files", "test_secrets"),
    "microvm": (),
    "kubernetes": (),
    "kubernetes-gvisor": (),
}
"""Modules of `tests/security` whose attacks are made in a provider in every run of the tests. In `namespace` all are;
in gVisor all are with `--on-gvisor`, in virtual machines with `--on-microvm`, in Docker with `--on-docker`, in pods with
`--on-kubernetes` and `--on-kubernetes-gvisor`, but for `MASKED` and what `NEEDED` says.
"""
MASKED = ("test_masks", "test_masks_stay", "test_readonly")
"""Modules that hold masked sandboxes of `namespace` and Docker themselves. In gVisor and virtual machines masks are
those of the same code, and judged by the conformance suite and the tests of the providers.
"""

ON_IMAGE = {
    "test_host_files": "user on an image",
    "test_mounts": "user on an image",
    "test_privileges": "root on an image",
    "test_processes": "root on an image",
    "test_secrets": "root on an image",
    "test_termination": "user on an image",
}
"""Modules whose attacks are also made from a sandbox that runs from an image; with `--on-image` those of all are. Else
they share one sandbox, as far as they need none of their own.
"""

NEEDED: dict[str, Capability] = {"test_folders": Capability.FOLDERS}
"""Modules whose attacks are made only where a provider has a capability at all."""

_OWN_KERNEL = "what it reaches belongs to gVisor's kernel, which only this sandbox has"
_NOT_SHOWN = "gVisor does not show these options of mounts; it enforces them"
_NO_FILTER = "there is no filter inside; gVisor's kernel has one of its own on the host"
_POLICIES = "a pod has an interface; network policies drop what leaves by it, which only `tests/cluster` can see"
_PORT = "the port of the supervisor is found; it answers nobody but servers, by mutual TLS"
_NO_SOCKET = (
    "these tests give secrets over a socket of the host, which a pod has not; the conformance suite judges them"
)
_IN_PODS = {
    "test_bound_sockets": _PORT,
    "test_change_it": _NO_SOCKET,
    "test_devices_in_sight": "the runtime adds `/dev/mqueue` and the file of the last words of a container",
    "test_gone_with_the_sandbox": _NO_SOCKET,
    "test_interfaces": _POLICIES,
    "test_mount_propagation": "volumes follow the mounts of the node; nothing inside can mount, so nothing goes back",
    "test_mounts_are_confined": "volumes of a pod have no `nosuid` and `nodev`; no agent gains anything by such files",
    "test_of_another_sandbox": _NO_SOCKET,
    "test_on_no_disk_of_the_host": _NO_SOCKET,
    "test_only_in_its_file": _NO_SOCKET,
    "test_open_ports": _PORT,
    "test_raise_limits": "the number of processes of a pod is limited by the kubelet",
    "test_release_agent": "the runtime shows cgroups, read-only",
    "test_replaced_live": _NO_SOCKET,
    "test_routes": _POLICIES,
    "test_run_from_there": _NO_SOCKET,
    "test_same_user_on_the_host": "all agents have one user id on a node, unless pods have users of their own",
    "test_sys": "the runtime shows `/sys`, read-only",
    "test_the_descriptor_that_writes": _NO_SOCKET,
    "test_without_isolation_there_is_no_place": "it is about the process provider",
    "test_world_by_tcp": _POLICIES,
    "test_world_by_udp": _POLICIES,
}
_BOMB = "the supervisor does not know the limit of processes there: a bomb that was left behind starves its sandbox"
NOT_JUDGED: dict[str, dict[str, str]] = {
    "namespace": {},
    "kubernetes": _IN_PODS,
    "docker": {
        "test_mounts_show_no_data_directory": "the list of mounts shows the path of the sandbox's own control directory",
        "test_same_user_on_the_host": "all agents have one user id on the host",
    },
    "microvm": {
        "test_a_bomb_left_by_an_ended_command_does_not_starve_the_next": _BOMB,
        "test_inodes_in_tmp": "files of /tmp are memory of the machine, and count towards the limit of the sandbox",
        "test_many_files": "the machine was lost in the one run that was made; the cause is not known yet",
        "test_mounts_are_confined": "the control directory can be written by root, whom no agent can become",
        "test_python_runs_beside_a_bomb_left_by_an_ended_command": _BOMB,
        "test_without_isolation_there_is_no_place": "it is about the process provider",
    },
    "gvisor": {
        "test_budgets_that_nothing_divides_are_refused": _OWN_KERNEL,
        "test_control_socket_in_sight": "the path of the socket is shown; the agent cannot reach it",
        "test_descriptors_of_runners": "the numbers of descriptors are shown; none can be opened",
        "test_devices_in_sight": _OWN_KERNEL,
        "test_filter_can_be_lifted": _NO_FILTER,
        "test_inodes_in_tmp": "files of /tmp are memory of gVisor's kernel, and count towards the limit of the sandbox",
        "test_kernel_log": _OWN_KERNEL,
        "test_keyrings": _OWN_KERNEL,
        "test_limits_of_the_supervisor": (
            "an agent can lower the limits of its supervisor, and so end its own sandbox: gVisor protects other users only"
        ),
        "test_mounts_are_confined": _NOT_SHOWN,
        "test_netlink_families": _OWN_KERNEL,
        "test_new_namespaces": _OWN_KERNEL,
        "test_new_namespaces_by_clone": _OWN_KERNEL,
        "test_new_privileges": _NO_FILTER,
        "test_priority": _OWN_KERNEL,
        "test_raise_limits": "processes are limited by a cgroup of gVisor's kernel, not by this limit",
        "test_release_agent": _OWN_KERNEL,
        "test_run_from_there": _NOT_SHOWN,
        "test_same_user_on_the_host": "agents have no process of their own on the host",
        "test_shared_memory_counts_towards_the_limit": (
            "it does count, and the sandbox ends: no process of the sandbox can be found that has it"
        ),
        "test_signals_to_pid_1": "an agent can end its own sandbox: gVisor delivers signals to PID 1",
        "test_sys": _OWN_KERNEL,
        "test_tunnel_device": _OWN_KERNEL,
        "test_unshare_program": _OWN_KERNEL,
        "test_without_isolation_there_is_no_place": "it is about the process provider",
    },
}
NOT_JUDGED["kubernetes-gvisor"] = {
    **NOT_JUDGED["gvisor"],
    **_IN_PODS,
    "test_descriptors_of_pid_1": NOT_JUDGED["gvisor"]["test_descriptors_of_runners"],
}
"""Attacks of `tests/security` that are not judged in a provider: they bring something, and it is no breach.
`SECURITY.md` names what matters of them.
"""
