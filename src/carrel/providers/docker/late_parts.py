"""Changes the mounts of a container after the daemon has made it: what no sandbox has is taken away, and the workspace
and the secrets of its owner are added. Blocking, but short; raises `OSError`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from carrel.isolation import late_mounts, linux
from carrel.isolation.inside import CONTROL, HOME, SECRETS, WORKSPACE
from carrel.isolation.late_mounts import LateMount, Sandbox
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.providers import control_directory
from carrel.providers.docker import containers

_WRITABLE = ("/tmp", "/dev/shm", "/dev/pts", "/proc", HOME, CONTROL)
_DEVICES = ("/dev", "/dev/pts")
_NOT_OURS = ("/dev/mqueue", "/sys/fs/cgroup", "/sys/fs")
_SECRETS = {
    "size": "8m",
    "nr_inodes": "2048",
    "mode": "0700",
    "uid": str(SANDBOX_UID),
    "gid": str(SANDBOX_UID),
}


def confine(sandbox: Sandbox) -> None:
    """Give the mounts of a new container the attributes that they have in every sandbox: read-only where nobody has to
    write, without set-user-ID bits and devices, and apart from mounts that the daemon makes later.
    """

    def work() -> None:
        for path in _NOT_OURS:
            _remove_mount(path)
        attributes = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
        with _opened(sandbox, "/") as root:
            linux.set_mount_attributes(root, attributes, recursive=True, private=True)
        for attribute, paths in ((linux.MOUNT_ATTR_RDONLY, _WRITABLE), (linux.MOUNT_ATTR_NODEV, _DEVICES)):
            for path in paths:
                with _opened(sandbox, path) as place:
                    linux.set_mount_attributes(place, 0, clear=attribute)

    sandbox.act(work)


def attach(sandbox: Sandbox, workspace: str, memory_mb: int | None) -> None:
    """Mount the workspace and a new place for secrets, and size the memory file systems."""
    opened = late_mounts.open_directory(workspace)
    try:
        secrets = late_mounts.open_memory(_SECRETS, programs=False)
        try:
            mounts = LateMount(opened, WORKSPACE), LateMount(secrets, control_directory.SECRETS, shown_at=SECRETS)
            sandbox.mount(mounts)
        finally:
            os.close(secrets)
    finally:
        os.close(opened)
    for path, megabytes in containers.memory_sizes(memory_mb).items():
        with _opened(sandbox, path) as place:
            linux.change_file_system(place, {"size": f"{megabytes}m"})


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


def _remove_mount(path: str) -> None:
    try:
        linux.unmount(path, linux.MNT_DETACH)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOENT}:  # not mounted, or not there
            raise
    with suppress(FileNotFoundError):
        os.rmdir(path)
