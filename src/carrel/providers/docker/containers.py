"""The container of a sandbox as a value: the body of the request that creates it. Pure: no I/O.

PID 1 starts as root with three capabilities, listens in the control directory and becomes the agent, for good, before
any code of an agent runs (see `carrel.supervisor.program`). The capabilities are those that this change needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carrel.isolation.inside import BUNDLE, CONTROL, HOME, SECRETS, WORKSPACE
from carrel.isolation.rootfs import PYTHON, SANDBOX_UID
from carrel.providers import bundle, control_directory
from carrel.providers.base import Launch

INSTANCE, SANDBOX = "carrel.instance", "carrel.sandbox"
"""Labels: the server that a container belongs to, by its data directory, and the sandbox that it is."""
PROCESSES_OF_OURS = 1
"""The supervisor, which the kernel counts too."""
_SECRETS_OPTIONS = f"size=8m,nr_inodes=2048,mode=0700,uid={SANDBOX_UID},gid={SANDBOX_UID},noexec,nosuid,nodev"
_LOG = {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}}


@dataclass(frozen=True)
class ContainerRequest:
    """Everything that decides about a container."""

    launch: Launch
    instance: str
    image: str
    bundle: str
    control: str
    volume: str
    """The name of the volume in memory that holds the secrets."""
    mounts: Mapping[str, str]
    """Further mounts, read-only: paths inside, and what is mounted there from the host."""


def body(request: ContainerRequest) -> dict[str, Any]:
    """Return the body of the request."""
    launch = request.launch
    labels = {INSTANCE: request.instance, SANDBOX: launch.id}
    return {
        "Image": request.image,
        "Entrypoint": bundle.command(control_directory.REPORT),
        "Cmd": [],
        "Env": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "carrel",
        "NetworkDisabled": True,
        "Labels": labels,
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": ["SETUID", "SETGID", "SETPCAP"],
            "SecurityOpt": ["no-new-privileges"],
            "IpcMode": "private",
            "Privileged": False,
            "AutoRemove": False,
            "RestartPolicy": {"Name": "no"},
            "LogConfig": _LOG,
            **_limits(launch),
            **_memory_file_systems(launch.memory_mb),
            "Mounts": [
                _bind(request.bundle, BUNDLE, read_only=True),
                _bind(f"{request.bundle}{PYTHON}", PYTHON, read_only=True),
                *(_bind(f"{request.bundle}{path}", path, read_only=True) for path in bundle.NAMES),
                _bind(request.control, CONTROL),
                _bind(launch.workspace, WORKSPACE),
                _secrets(request.volume, SECRETS, labels, read_only=True),
                _secrets(request.volume, control_directory.SECRETS, labels, read_only=False),
                *(_bind(source, target, read_only=True) for target, source in sorted(request.mounts.items())),
            ],
        },
    }


def _limits(launch: Launch) -> dict[str, int]:
    limits: dict[str, int] = {}
    if launch.memory_mb is not None:
        limits["Memory"] = limits["MemorySwap"] = launch.memory_mb << 20
    if launch.cpus is not None:
        limits["NanoCpus"] = round(launch.cpus * 1e9)
    if launch.processes is not None:
        limits["PidsLimit"] = launch.processes + PROCESSES_OF_OURS
    return limits


def _memory_file_systems(memory_mb: int | None) -> dict[str, Any]:
    scratch = max(16, min(512, (memory_mb or 1024) // 4))
    own = f"uid={SANDBOX_UID},gid={SANDBOX_UID}"
    return {
        "ShmSize": max(8, scratch // 4) << 20,
        "Tmpfs": {
            "/tmp": f"rw,exec,nosuid,nodev,size={scratch}m,nr_inodes=65536,mode=1777",
            # The host's devices and cgroups are not for agents.
            "/sys": "rw,noexec,nosuid,nodev,size=64k,nr_inodes=16,mode=0555",
            "/sys/fs/cgroup": "rw,noexec,nosuid,nodev,size=64k,nr_inodes=16,mode=0555",
            HOME: f"rw,exec,nosuid,nodev,size={scratch}m,nr_inodes=65536,mode=0755,{own}",
        },
    }


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def _secrets(volume: str, target: str, labels: Mapping[str, str], *, read_only: bool) -> dict[str, Any]:
    """Return one of two mounts of the volume: the agent sees one read-only, the supervisor has the other."""
    driver = {"Name": "local", "Options": {"type": "tmpfs", "device": "tmpfs", "o": _SECRETS_OPTIONS}}
    options = {"NoCopy": True, "Labels": dict(labels), "DriverConfig": driver}
    return {"Type": "volume", "Source": volume, "Target": target, "ReadOnly": read_only, "VolumeOptions": options}


def host_mounts(directories: Sequence[str], pips: Sequence[str], own_files: str, pip_main: str) -> dict[str, str]:
    """Return the mounts of a sandbox with the host's programs: whole directories, and our `__main__` over its pips."""
    mounts = {path: path for path in directories}
    return mounts | dict.fromkeys(pips, f"{own_files}/{pip_main.removeprefix(f'{PYTHON}/')}")
