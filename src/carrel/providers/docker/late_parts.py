"""Changes the mounts of a container after the daemon has made it: what no sandbox has is taken away, and the workspace
and the secrets of its owner are added. Blocking, but short; raises `OSError`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from carrel.isolation import late_mounts, linux
from carrel.isolation.inside import CONTROL, HOME, SECRETS, WORKSPACE
from carrel.isolation.late_mounts import LateMount, Sandbox
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.providers import control_directory

_WRITABLE = ("/dev/pts", "/proc", CONTROL)
_DEVICES = ("/dev", "/dev/pts")
_OF_THE_AGENT = {"uid": str(SANDBOX_UID), "gid": str(SANDBOX_UID)}
_SECRETS = {"size": "8m", "nr_inodes": "2048", "mode": "0700", **_OF_THE_AGENT}
_EMPTY = {"size": "4k", "nr_inodes": "2", "mode": "0555"}


def confine(sandbox: Sandbox) -> None:
    """Give the mounts of a new container the attributes that they have in every sandbox: read-only where nobody has to
    write, without set-user-ID bits and devices, and apart from mounts that the daemon makes later.
    """
    empty = late_mounts.open_memory(_EMPTY, programs=False)

    def work() -> None:
        _unmount("/sys")  # the host's devices and cgroups are not for agents
        _unmount("/dev/shm")  # the agent gets one of its own
        _unmount("/dev/mqueue")
        with suppress(FileNotFoundError):
            os.rmdir("/dev/mqueue")
        with _opened(sandbox, "/sys") as place:
            linux.move_mount(empty, place)
        attributes = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
        with _opened(sandbox, "/") as root:
            linux.set_mount_attributes(root, attributes, recursive=True, private=True)
        for attribute, paths in ((linux.MOUNT_ATTR_RDONLY, _WRITABLE), (linux.MOUNT_ATTR_NODEV, _DEVICES)):
            for path in paths:
                with _opened(sandbox, path) as place:
                    linux.set_mount_attributes(place, 0, clear=attribute)

    try:
        sandbox.act(work)
    finally:
        os.close(empty)


def attach(sandbox: Sandbox, workspace: str, memory_mb: int | None) -> None:
    """Mount the workspace, a place for secrets and the memory file systems, which have much less than the memory."""
    scratch = max(16, min(512, (memory_mb or 1024) // 4))
    size = {"size": f"{scratch}m", "nr_inodes": "65536", **_OF_THE_AGENT}
    shared = {"size": f"{max(8, scratch // 4)}m", "nr_inodes": "4096", "mode": "1777", **_OF_THE_AGENT}
    with ExitStack() as opened:

        def keep(tree: int) -> int:
            opened.callback(os.close, tree)
            return tree

        secrets = keep(late_mounts.open_memory(_SECRETS, programs=False))
        sandbox.mount(
            [
                LateMount(keep(late_mounts.open_memory({**size, "mode": "1777"})), "/tmp"),
                LateMount(keep(late_mounts.open_memory({**size, "mode": "0755"})), HOME),
                LateMount(keep(late_mounts.open_memory(shared, programs=False)), "/dev/shm"),
                LateMount(secrets, control_directory.SECRETS, shown_at=SECRETS),
                LateMount(keep(late_mounts.open_directory(workspace)), WORKSPACE),
            ]
        )


def seal(sandbox: Sandbox) -> None:
    """Take away what only the supervisor needed, before it was the agent: it has what it needs open."""

    def work() -> None:
        linux.unmount(control_directory.SECRETS, linux.MNT_DETACH)
        with _opened(sandbox, CONTROL) as place:
            linux.set_mount_attributes(place, linux.MOUNT_ATTR_RDONLY)

    sandbox.act(work)


@contextmanager
def _opened(sandbox: Sandbox, path: str) -> Iterator[int]:
    place = sandbox.open(path)
    try:
        yield place
    finally:
        os.close(place)


def _unmount(path: str) -> None:
    try:
        linux.unmount(path, linux.MNT_DETACH)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOENT}:  # not mounted, or not there
            raise
