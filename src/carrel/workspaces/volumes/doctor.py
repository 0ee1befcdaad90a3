"""What `carrel doctor` says of the volumes of this host."""

from __future__ import annotations

from carrel.models import Check
from carrel.workspaces.volumes.base import VolumeDriver
from carrel.workspaces.volumes.btrfs import BtrfsDriver

_WHY = "a write beyond the cap of a workspace fails at the byte, and a snapshot takes milliseconds"


def disk_quota(driver: VolumeDriver | None = None) -> Check:
    """Who holds the cap of a workspace: the kernel, or a watch. Without a driver, what a server here would have."""
    missing = BtrfsDriver("/").missing()
    if driver.kernel_quota if driver is not None else missing is None:
        return Check(name="disk quota", status="ok", found="btrfs volumes: the kernel holds the cap", why=_WHY)
    found = "plain directories: the cap is watched, and commands of a workspace over it are ended within seconds"
    remedy = (
        f"{missing}: run carrel as root with btrfs-progs" if missing else "set CARREL_VOLUMES=btrfs on a new data_dir"
    )
    return Check(name="disk quota", status="degraded", found=found, why=_WHY, remedy=remedy)
