"""A btrfs file system in a sparse file of the host's own file system: made, mounted, grown, found again, closed.

Touches only the loop device and the mount it made for its own file. Needs root. Knows nothing of volumes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from contextlib import suppress

from carrel.errors import PlatformError, Unsupported

PROGRAMS = ("btrfs", "mkfs.btrfs", "losetup", "mount", "umount")
SMALLEST = 128 << 20
_FULL = 0.8
_ESCAPED = re.compile(r"\\([0-7]{3})")


def run(*argv: str, stdin: bytes | None = None) -> bytes:
    """Run one of the programs; `PlatformError` with its own words when it fails."""
    environment = {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", "LC_ALL": "C"}
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, check=False, env=environment)
    except OSError as error:
        raise PlatformError(f"cannot run {argv[0]}: {error.strerror}") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise PlatformError(f"{argv[0]} {argv[1]} failed: {said[-1] if said else done.returncode}")
    return done.stdout


def missing_programs() -> str | None:
    """Why no pool can be had here."""
    if os.geteuid() != 0:
        return "btrfs volumes need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for program in PROGRAMS:
        if shutil.which(program, path=path) is None:
            return f"the program {program} is not installed"
    with open("/proc/filesystems") as file:
        if not any(line.split()[-1] == "btrfs" for line in file) and not os.path.isdir("/sys/module/btrfs"):
            with suppress(PlatformError):
                run("modprobe", "btrfs")
                return None
            return "the kernel has no btrfs"
    return None


def mounted_at(path: str) -> tuple[str, str] | None:
    """File system and source of the topmost mount at exactly this path."""
    found = None
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            where = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), left.split()[4])
            if where == path:
                kind, source, _ = right.split(maxsplit=2)
                found = kind, source
    return found


class Pool:
    """The pool file, its loop device and its mount."""

    def __init__(self, file: str, mount: str, size: int, largest: int):
        self._file = os.path.realpath(file)
        self._mount = os.path.realpath(mount)
        self._size = max(size, SMALLEST)
        self._largest = max(largest, self._size)
        self._device = ""
        self._guard = threading.Lock()

    def open(self) -> None:
        """Mount the pool; make it when there is none, take over what a killed process left mounted."""
        os.makedirs(self._mount, 0o700, exist_ok=True)
        there = mounted_at(self._mount)
        if there is not None:
            if there[0] != "btrfs" or there[1] not in self._devices():
                raise PlatformError(f"something that is not carrel's is mounted at {self._mount}")
            self._device = there[1]
            return
        for stale in self._devices():
            run("losetup", "--detach", stale)
        if not os.path.exists(self._file):
            self._make()
        self._device = run("losetup", "--find", "--show", "--nooverlap", self._file).decode().strip()
        try:
            run("mount", "-t", "btrfs", "-o", "noatime,compress=zstd:1,nosuid,nodev", self._device, self._mount)
        except PlatformError:
            run("losetup", "--detach", self._device)
            raise

    def _make(self) -> None:
        aside = self._file + ".new"
        with suppress(FileNotFoundError):
            os.unlink(aside)
        with open(aside, "xb") as file:
            os.chmod(aside, 0o600)
            file.truncate(self._size)
        run("mkfs.btrfs", "--quiet", "--metadata", "single", "--data", "single", aside)
        os.rename(aside, self._file)

    def _devices(self) -> list[str]:
        """The loop devices whose file is ours, as the kernel tells it."""
        found = []
        for name in os.listdir("/sys/block"):
            with suppress(OSError), open(f"/sys/block/{name}/loop/backing_file") as file:
                if file.read().rstrip("\n") == self._file:
                    found.append(f"/dev/{name}")
        return found

    def close(self) -> None:
        """Unmount and let go of the device. Nothing happens when it is not open."""
        if not self._device:
            return
        if mounted_at(self._mount) is not None:
            run("umount", self._mount)
        # The kernel lets go of the device with the last user; one that was mounted elsewhere is still there.
        for device in self._devices():
            with suppress(PlatformError):
                run("losetup", "--detach", device)
        self._device = ""

    def grow_when_full(self, needed: int = 0) -> bool:
        """Double the pool when it is over 80 % full; False when it may not grow or has no need to."""
        with self._guard:
            facts = os.statvfs(self._mount)
            total = facts.f_blocks * facts.f_frsize
            used = total - facts.f_bavail * facts.f_frsize + needed
            size = os.stat(self._file).st_size
            if used <= total * _FULL or size >= self._largest or not self._device:
                return False
            wanted = size
            while wanted < self._largest and used > wanted * _FULL:
                wanted *= 2
            os.truncate(self._file, min(wanted, self._largest))
            run("losetup", "--set-capacity", self._device)
            run("btrfs", "filesystem", "resize", "max", self._mount)
            return True


def require_programs() -> None:
    """Refuse to go on without what a pool needs."""
    reason = missing_programs()
    if reason is not None:
        raise Unsupported(reason, hint="use the directory driver, or install btrfs-progs and run as root")
