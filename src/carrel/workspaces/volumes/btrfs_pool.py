"""A btrfs file system in a sparse file on the host's own file system. Needs root.

Touches only the loop device and the mount of its own file.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import subprocess
import threading
from contextlib import suppress

from carrel.errors import PlatformError
from carrel.primitives import libc

PROGRAMS = ("btrfs", "mkfs.btrfs", "losetup", "mount", "umount")
SMALLEST = 128 << 20
_FULL = 0.8
_HOST_RESERVE = 64 << 20
_STEP = 1 << 20
_FITRIM = 0xC0185879
# No compression: it would slow down copying in, and make the cap mean something else than the size of files. Discarded
# blocks go back to the host.
_OPTIONS = "noatime,discard=async,flushoncommit,nosuid,nodev"
_ESCAPED = re.compile(r"\\([0-7]{3})")


def run(*argv: str, stdin: bytes | None = None) -> bytes:
    """Run a program; `PlatformError` with the last line of its output when it fails."""
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
    """Return why a pool does not work here, or None."""
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
    """Return the file system type and source of the topmost mount at exactly this path."""
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
        """Mount the pool. Creates it if it is missing, and takes over the mount of a killed process."""
        os.makedirs(self._mount, 0o700, exist_ok=True)
        there = mounted_at(self._mount)
        if there is not None:
            if there[0] != "btrfs" or there[1] not in self._devices():
                raise PlatformError(f"another file system is mounted at {self._mount}")
            self._device = there[1]
            if os.statvfs(self._mount).f_flag & os.ST_RDONLY:
                raise PlatformError(
                    "the pool became read-only, most likely because the disk that holds it was full",
                    hint="make room, end the processes that use the pool, and unmount it",
                )
            return
        for stale in self._devices():
            run("losetup", "--detach", stale)
        made = not os.path.exists(self._file)
        if made:
            self._make()
        try:
            self._attach()
        except PlatformError:
            if made:  # or the next start would think that it holds workspaces
                os.unlink(self._file)
            raise

    def _attach(self) -> None:
        self._device = run("losetup", "--find", "--show", "--nooverlap", self._file).decode().strip()
        with suppress(PlatformError):  # where the host's disk allows it, this saves a second copy in the page cache
            run("losetup", "--direct-io=on", self._device)
        try:
            run("mount", "-t", "btrfs", "-o", _OPTIONS, self._device, self._mount)
        except PlatformError:
            run("losetup", "--detach", self._device)
            self._device = ""
            raise

    def _make(self) -> None:
        aside = self._file + ".new"
        with suppress(FileNotFoundError):
            os.unlink(aside)
        with open(aside, "xb") as file:
            os.chmod(aside, 0o600)
            file.truncate(max(min(self._size, self._room(0)), SMALLEST))
        run("mkfs.btrfs", "--quiet", "--metadata", "single", "--data", "single", aside)
        os.rename(aside, self._file)

    def _room(self, allocated: int) -> int:
        """Return the largest pool that the host can hold: a write beyond it would make the pool read-only."""
        facts = os.statvfs(os.path.dirname(self._file))
        return allocated + max(facts.f_bavail * facts.f_frsize - _HOST_RESERVE, 0)

    def require_room(self) -> None:
        """Raise `PlatformError` when the host's disk is full."""
        if self._room(0) == 0:
            raise PlatformError(
                f"the disk that holds {self._file} is full",
                hint=f"free at least {_HOST_RESERVE >> 20} MiB there",
                errno=errno.ENOSPC,
            )

    def trim(self) -> None:
        """Return unused blocks to the host at once."""
        fd = os.open(self._mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            libc.ioctl(fd, _FITRIM, bytearray(struct.pack("<3Q", 0, (1 << 64) - 1, 0)))
        finally:
            os.close(fd)

    def _devices(self) -> list[str]:
        """Return the loop devices of the pool's file."""
        found = []
        for name in os.listdir("/sys/block"):
            with suppress(OSError), open(f"/sys/block/{name}/loop/backing_file") as file:
                if file.read().rstrip("\n") == self._file:
                    found.append(f"/dev/{name}")
        return found

    def close(self) -> None:
        """Unmount the pool and detach its device, if it is open."""
        if not self._device:
            return
        if mounted_at(self._mount) is not None:
            run("umount", self._mount)
        # The kernel detaches the device with its last user; a mount elsewhere keeps it.
        for device in self._devices():
            with suppress(PlatformError):
                run("losetup", "--detach", device)
        self._device = ""

    def grow_when_full(self, needed: int = 0) -> bool:
        """Double the pool when it is over 80 % full, as far as the host has room; return whether it grew."""
        with self._guard:
            facts = os.statvfs(self._mount)
            total = facts.f_blocks * facts.f_frsize
            used = total - facts.f_bavail * facts.f_frsize + needed
            if used <= total * _FULL or not self._device:
                return False
            info = os.stat(self._file)
            most = min(self._largest, self._room(info.st_blocks * 512))
            wanted = info.st_size
            while wanted < most and used > wanted * _FULL:
                wanted *= 2
            wanted = min(wanted, most) // _STEP * _STEP
            if wanted <= info.st_size:
                return False
            os.truncate(self._file, wanted)
            run("losetup", "--set-capacity", self._device)
            run("btrfs", "filesystem", "resize", "max", self._mount)
            return True
