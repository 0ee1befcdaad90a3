"""Limits for kernel resources that a sandbox would otherwise share with the machine or with the server's user.

The kernel counts inotify, pending signals, message queues and locked memory also for the owner of a user namespace, up
to the host's own namespace. As root, every sandbox gets its own owner (`ids.owner`), so no two share these counts. An
ordinary user has only one id: there, all sandboxes together get three quarters of the user's limit, so that the user's
other programs keep working, and each sandbox gets an eighth.

The system call filter refuses what neither limits nor namespaces can restrict. The whole table is in
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
"""Resource limits of every sandbox. The kernel counts the other resources per user namespace."""

_OF_NAMESPACES = (resource.RLIMIT_NPROC, *list(LIMITS)[:3])
_NOTIFICATIONS = ("max_inotify_instances", "max_inotify_watches")
_FEWEST = 8


def limit_process() -> None:
    """Apply the limits that are the same for every sandbox to this process and all it will start."""
    for which, most in LIMITS.items():
        linux.lower_limit(which, most)


def enter_user_namespace(namespaces: int) -> None:
    """Unshare a user namespace (and others) that may use three quarters of each limit of this ordinary user.

    The kernel takes the limits of a namespace from the process that creates it.
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
    """Return the inotify limits of one sandbox of an ordinary user: an eighth of the host's. Called in the zygote."""
    return {name: max(_FEWEST, _read(name) // 6) for name in _NOTIFICATIONS}


def limit_tcp_buffers() -> None:
    """Limit the TCP buffers of this network namespace to the size of other sockets' buffers: no cgroup counts them."""
    write("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 212992")
    write("/proc/sys/net/ipv4/tcp_wmem", "4096 16384 212992")


def hold_notifications(most: Mapping[str, int]) -> None:
    """Set the inotify limits of this process's user namespace, over which it has every capability."""
    for name, value in most.items():
        write(f"/proc/sys/user/{name}", str(value))


def _read(name: str) -> int:
    with open(f"/proc/sys/user/{name}", encoding="ascii") as file:
        return int(file.read())
