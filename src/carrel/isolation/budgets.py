"""Kernel budgets that a sandbox would share with the machine or with the server's user: each sandbox is held to a part.

The kernel counts inotify, pending signals, message queues and locked memory for the owner of a user namespace too, up
to the host's own namespace. As root every sandbox gets an owner of its own (`ids.owner`): nobody shares these counts.
An ordinary user has one id for everything: there all sandboxes together get three quarters of what the user may have,
so that the user's other programs go on, and each sandbox gets an eighth.

What neither limits nor namespaces can hold is refused by the system call filter. The whole table is in
`docs/explanation/isolation.md`.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

from carrel.isolation import linux
from carrel.primitives.kernel_files import write

LIMITS: Mapping[int, int] = {
    resource.RLIMIT_SIGPENDING: 1024,  # queued signals and POSIX timers
    resource.RLIMIT_MSGQUEUE: 204_800,  # bytes: two POSIX message queues of the default size
    resource.RLIMIT_MEMLOCK: 1024 * 1024,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_NICE: 0,
    resource.RLIMIT_CORE: 0,
}
"""Resource limits of every sandbox, whatever was asked for. Those of other budgets are counted per user namespace."""

_OF_NAMESPACES = (resource.RLIMIT_NPROC, *list(LIMITS)[:3])
_NOTIFICATIONS = ("max_inotify_instances", "max_inotify_watches")
_FEWEST = 8


def limit_process() -> None:
    """Hold this process, and all it will start, to the limits that are the same for every sandbox."""
    for which, most in LIMITS.items():
        linux.lower_limit(which, most)


def enter_user_namespace(namespaces: int) -> None:
    """Unshare a user namespace (and others) that may use three quarters of each budget of this ordinary user.

    The kernel takes the limits that hold for a namespace from the process that makes it.
    """
    before = {which: resource.getrlimit(which) for which in _OF_NAMESPACES}
    notifications = {name: _read(name) * 3 // 4 for name in _NOTIFICATIONS}
    for which, (soft, hard) in before.items():
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(which, (soft * 3 // 4, hard))
    try:
        linux.unshare(namespaces)
    finally:
        for which, limits in before.items():
            resource.setrlimit(which, limits)
    hold_notifications(notifications)


def sandbox_notifications() -> dict[str, int]:
    """What one of an ordinary user's sandboxes may have: an eighth of the host's limit. Called in the zygote."""
    return {name: max(_FEWEST, _read(name) // 6) for name in _NOTIFICATIONS}


def limit_tcp_buffers() -> None:
    """Hold the buffers of TCP sockets of this network namespace to what other sockets have: no cgroup counts them."""
    write("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 212992")
    write("/proc/sys/net/ipv4/tcp_wmem", "4096 16384 212992")


def hold_notifications(most: Mapping[str, int]) -> None:
    """Set the inotify limits of this process's user namespace, over which it has every capability."""
    for name, value in most.items():
        write(f"/proc/sys/user/{name}", str(value))


def _read(name: str) -> int:
    with open(f"/proc/sys/user/{name}", encoding="ascii") as file:
        return int(file.read())
