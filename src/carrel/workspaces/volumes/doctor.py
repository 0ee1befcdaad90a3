"""The checks of `carrel doctor` on volumes."""

from __future__ import annotations

from carrel.models import Check
from carrel.workspaces.volumes.base import VolumeDriver
from carrel.workspaces.volumes.btrfs import BtrfsDriver

_WHY = "a write beyond the cap of a workspace fails at the byte, and a snapshot takes milliseconds"


def retention(ttl_days: float | None) -> Check:
    """Report how long workspaces are kept."""
    found = "kept for ever" if ttl_days is None else f"deleted after {ttl_days:g} days without use"
    why = "files that nobody uses fill the disk; snapshots that were asked for are never deleted for their age. Set "
    return Check(
        name="workspaces", status="ok", found=found, why=why + "CARREL_SANDBOX_WORKSPACE_TTL_DAYS to change it"
    )


def disk_quota(driver: VolumeDriver | None = None) -> Check:
    """Report whether the kernel or a watch enforces the cap of a workspace; without a driver, for a new server here."""
    missing = BtrfsDriver("/").missing()
    if driver.kernel_quota if driver is not None else missing is None:
        return Check(name="disk quota", status="ok", found="btrfs volumes: the kernel holds the cap", why=_WHY)
    found = "plain directories: the cap is watched, and commands of a workspace over it are ended within seconds"
    remedy = (
        f"{missing}: run carrel as root with btrfs-progs" if missing else "set CARREL_VOLUMES=btrfs on a new data_dir"
    )
    return Check(name="disk quota", status="degraded", found=found, why=_WHY, remedy=remedy)
