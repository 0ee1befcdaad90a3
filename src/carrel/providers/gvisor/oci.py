"""The OCI configuration of a gVisor sandbox, and the command that starts it. Pure: values in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from carrel.isolation import inside
from carrel.isolation.rootfs import SANDBOX_UID

VERSION = "1.0.2"
CGROUPS = "/sys/fs/cgroup"
LATE = f"{inside.CONTROL}/private/late"
"""Where the workspace is mounted, at its usual path below, when the owner of a sandbox is known.

The agent cannot enter the directory above it. That matters even when it is unmounted: the process that serves files
still has it there, and shows it as part of that directory.
"""
_CAPABILITIES = ["CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN"]
_ALLOCATOR = ["MALLOC_MMAP_THRESHOLD_=4194304", "MALLOC_TRIM_THRESHOLD_=4194304"]
"""Keeps the supervisor from mapping and unmapping a buffer for each read, which is dear in gVisor."""
_PRIVATE = ["nosuid", "nodev"]
FLAGS = (
    *("--network=none", "--ignore-cgroups", "--directfs=false", "--overlay2=none", "--host-uds=all"),
    *("--gofer-network-namespace=new", "--in-sandbox-cgroup=v2", "--host-settings=ignore"),
)
"""What `runsc` is told for every sandbox.

Files are served by another process than the kernel of the sandbox (`directfs`), so a kernel that was taken over can
open no file of the host. That process also keeps the names that masks cover.
"""


@dataclass(frozen=True)
class GvisorSpec:
    """What the configuration depends on: directories of the host, the command of PID 1, and the memory of the sandbox.

    `control` is the directory that the supervisor shares with the server, `late` the one that the workspace is mounted
    in later, `secrets` the memory file system for secrets. `environments` is empty if the server shares none.
    """

    id: str
    root: str
    control: str
    late: str
    secrets: str
    command: tuple[str, ...]
    environments: str = ""
    memory_mb: int | None = None


def configuration(spec: GvisorSpec) -> dict[str, Any]:
    """Return `config.json` of the bundle.

    PID 1 starts as root of the sandbox with the capabilities that it needs to mount the workspace at its place and to
    become the agent. It keeps none.
    """
    scratch = max(16, min(512, (spec.memory_mb or 1024) // 4))
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": [*_PRIVATE, "noexec"]},
        _memory("/dev/shm", max(8, scratch // 4), 0o1777, "noexec"),
        _memory("/tmp", scratch, 0o1777),
        _memory(inside.HOME, scratch, 0o755),
        {"destination": CGROUPS, "type": "cgroup", "source": "cgroup", "options": [*_PRIVATE, "noexec"]},
        _bind(spec.control, inside.CONTROL, "rw", "noexec"),
        _bind(spec.secrets, inside.SECRETS, "ro", "noexec"),
        _bind(spec.late, LATE, "rw"),
    ]
    if spec.environments:
        mounts.append(_bind(spec.environments, inside.ENVIRONMENTS, "ro"))
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": VERSION,
        "hostname": "carrel",
        "root": {"path": spec.root, "readonly": True},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(spec.command),
            "env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8", *_ALLOCATOR],
            "cwd": "/",
            "noNewPrivileges": True,
            "rlimits": [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
            "capabilities": dict.fromkeys(sets, _CAPABILITIES),
        },
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }


def _memory(target: str, megabytes: int, mode: int, *more: str) -> dict[str, Any]:
    owner = [f"uid={SANDBOX_UID}", f"gid={SANDBOX_UID}"]
    options = [*_PRIVATE, f"mode={mode:o}", f"size={megabytes}m", *owner, *more]
    return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": options}


def _bind(source: str, target: str, access: str, *more: str) -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": source, "options": ["rbind", access, *_PRIVATE, *more]}


def command(runsc: str, state: str, platform: str, bundle: str, pid_file: str, id: str) -> tuple[str, ...]:
    """Return the command that starts a sandbox and returns when its PID 1 runs."""
    return (
        *(runsc, f"--root={state}", f"--platform={platform}", *FLAGS),
        *("run", "--detach", f"--bundle={bundle}", f"--pid-file={pid_file}", id),
    )


def tasks_file(id: str) -> str:
    """Return the file in the sandbox that limits the number of its processes and threads."""
    return f"{CGROUPS}/{id}/pids.max"
