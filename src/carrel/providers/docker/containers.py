"""The container of a sandbox as a value: the body of the request that creates it. Pure: no I/O.

It has nothing of its owner, who comes later: no workspace, no secrets, no variables. PID 1 starts as root with three
capabilities, listens in the control directory and becomes the agent, for good, before any code of an agent runs (see
`carrel.supervisor.program`). The capabilities are those that this change needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carrel.isolation.inside import BUNDLE, CONTROL
from carrel.isolation.rootfs import PYTHON
from carrel.providers import bundle, control_directory
from carrel.providers.base import Launch

INSTANCE, SANDBOX = "carrel.instance", "carrel.sandbox"
"""Labels: the server that a container belongs to, by its data directory, and the sandbox that it is."""
PROCESSES_OF_OURS = 1
"""The supervisor, which the kernel counts too."""
_LOG = {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}}


@dataclass(frozen=True)
class ContainerRequest:
    """Everything that decides about a container."""

    launch: Launch
    instance: str
    image: str
    bundle: str
    control: str
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
            **limits(launch),
            "Mounts": [
                _bind(request.bundle, BUNDLE, read_only=True),
                _bind(f"{request.bundle}{PYTHON}", PYTHON, read_only=True),
                *(_bind(f"{request.bundle}{path}", path, read_only=True) for path in bundle.NAMES),
                _bind(request.control, CONTROL),
                *(_bind(source, target, read_only=True) for target, source in sorted(request.mounts.items())),
            ],
        },
    }


def limits(launch: Launch) -> dict[str, int]:
    """Return the limits of a container, as the daemon names them."""
    found: dict[str, int] = {}
    if launch.memory_mb is not None:
        found["Memory"] = found["MemorySwap"] = launch.memory_mb << 20
    if launch.cpus is not None:
        found["NanoCpus"] = round(launch.cpus * 1e9)
    if launch.processes is not None:
        found["PidsLimit"] = launch.processes + PROCESSES_OF_OURS
    return found


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def host_mounts(directories: Sequence[str], pips: Sequence[str], own_files: str, pip_main: str) -> dict[str, str]:
    """Return the mounts of a sandbox with the host's programs: whole directories, and our `__main__` over its pips."""
    mounts = {path: path for path in directories}
    return mounts | dict.fromkeys(pips, f"{own_files}/{pip_main.removeprefix(f'{PYTHON}/')}")
