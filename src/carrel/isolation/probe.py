"""Finds out which kernel features this host has for sandboxes, by using each of them in a separate process.

`python -m carrel.isolation.probe` prints the findings as JSON. `host()` runs that once and keeps the answer, so a
server that runs never forks itself for it. Only one that has just begun to start may (`begin`).
"""

from __future__ import annotations

import json
import math
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Protocol

from carrel.isolation import landlock, linux, seccomp
from carrel.isolation.cgroups import Cgroups

OLDEST_KERNEL = (5, 12)
BRIDGE = "user-mode network"
OVERLAY = "overlay mounts"
_TUN = "/dev/net/tun"
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_lock = threading.Lock()
_begun: Examiner | None = None


@dataclass(frozen=True)
class Finding:
    """One feature: `ok`, `degraded` (carrel works without it) or `missing` (the namespace provider cannot work)."""

    name: str
    status: str
    found: str
    why: str
    remedy: str | None = None


@dataclass(frozen=True)
class HostFindings:
    """All findings, and the cgroup controllers that can be used."""

    findings: tuple[Finding, ...]
    controllers: tuple[str, ...]

    @property
    def missing(self) -> str | None:
        """Why the namespace provider cannot work here, or None."""
        lacking = [f"{f.name} ({f.found})" for f in self.findings if f.status == "missing"]
        return f"this host lacks {', '.join(lacking)}; run `carrel doctor`" if lacking else None

    @property
    def overlays(self) -> bool:
        """Whether a sandbox can run from an image."""
        return any(finding.name == OVERLAY and finding.status == "ok" for finding in self.findings)

    @property
    def bridges(self) -> bool:
        """Whether a sandbox can have a bridged network."""
        return any(finding.name == BRIDGE and finding.status == "ok" for finding in self.findings)


def host() -> HostFindings:
    """Return the findings; the first call waits for the process that finds out."""
    with _lock:
        return _found()


class Examiner(Protocol):
    """A process that finds out. `subprocess.Popen` is one."""

    def communicate(self, *, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Wait for its end; return what it says, and its errors."""

    def kill(self) -> None:
        """End it at once."""


class _Fork:
    """A fork of this process that finds out. It imports nothing again, which would take twice as long as the rest."""

    def __init__(self) -> None:
        self._pipe, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            signal.set_wakeup_fd(-1)  # it belongs to the loop of the process that was forked
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            try:
                linux.close_all_but({0, 1, 2, write_end})
                os.write(write_end, _said())
            except BaseException as error:
                os.write(write_end, repr(error)[:400].encode())
            finally:
                os._exit(0)
        os.close(write_end)

    def communicate(self, *, timeout: float | None = None) -> tuple[bytes, bytes]:
        until = time.monotonic() + (math.inf if timeout is None else timeout)
        said = bytearray()
        while True:
            left = until - time.monotonic()
            if not select.select([self._pipe], [], [], None if left == math.inf else max(0.0, left))[0]:
                raise subprocess.TimeoutExpired("probe", timeout or 0)
            if not (chunk := os.read(self._pipe, 65536)):
                break
            said += chunk
        os.close(self._pipe)
        os.waitpid(self._pid, 0)
        return bytes(said), bytes(said)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def begin() -> None:
    """Fork a process that finds out, for a caller that needs the findings later. A process with several threads cannot
    do that safely: there `host` starts a program.
    """
    global _begun
    with _lock:
        if _begun is None and threading.active_count() == 1:
            _begun = _Fork()


@cache
def _found() -> HostFindings:
    return findings_of(_begun or started([sys.executable, "-m", "carrel.isolation.probe"]))


def started(command: Sequence[str]) -> Examiner:
    """Start a program whose output `findings_of` reads."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def findings_of(process: Examiner) -> HostFindings:
    """Wait for the program and read its findings. One that fails means that a feature is missing."""
    try:
        said, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        said, errors = process.communicate()
    try:
        answer = json.loads(said)
        return HostFindings(tuple(Finding(**finding) for finding in answer["findings"]), tuple(answer["controllers"]))
    except (ValueError, KeyError, TypeError):
        words = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no answer"]
        return HostFindings((Finding("probe", "missing", words[0], "the host could not be examined"),), ())


def _said() -> bytes:
    found = examine()
    findings = [asdict(finding) for finding in found.findings]
    return json.dumps({"findings": findings, "controllers": found.controllers}).encode()


def examine() -> HostFindings:
    """Try every feature. This forks, so it must run in a separate process."""
    root = os.geteuid() == 0
    groups = Cgroups.open()
    controllers, version, reason = tuple(sorted(groups.controllers)), groups.version, groups.reason
    groups.close()
    release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    findings = [
        Finding(
            "kernel",
            "ok" if release >= OLDEST_KERNEL else "missing",
            platform.release(),
            "mounts that are set up detached, openat2, pidfd",
            None if release >= OLDEST_KERNEL else f"run Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer",
        ),
        Finding(
            "architecture",
            "ok" if linux.ARCH in {"x86_64", "aarch64"} else "missing",
            linux.ARCH,
            "the seccomp filter is written for x86_64 and aarch64",
            None if linux.ARCH in {"x86_64", "aarch64"} else "use one of these",
        ),
        _tried(
            "user namespaces",
            linux.attempt(lambda: linux.unshare(linux.CLONE_NEWUSER)),
            "a sandbox is root over nothing but itself; an ordinary user can make one",
            "sysctl user.max_user_namespaces above 0 and, on Debian or Ubuntu, kernel.unprivileged_userns_clone=1 and "
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        _tried(
            "other namespaces",
            linux.attempt(lambda: linux.unshare(linux.ALL_NAMESPACES & ~linux.CLONE_NEWPID)),
            "own mounts, network, IPC, host name and cgroup view",
            "a kernel with NET_NS, IPC_NS, UTS_NS and CGROUPS; in a container: allow unshare in its seccomp profile",
        ),
        _tried(
            "private /proc",
            linux.attempt(_mount_proc),
            "a sandbox sees its own processes only",
            "in a container /proc must not be masked: run it with --security-opt systempaths=unconfined",
        ),
        _tried(
            "seccomp",
            linux.attempt(lambda: seccomp.install(seccomp.build())),
            "keeps the kernel calls that break sandboxes out of reach",
            "a kernel with CONFIG_SECCOMP_FILTER",
        ),
        _overlay(),
        _optional(
            "Landlock",
            landlock.abi() > 0,
            f"ABI {landlock.abi()}" if landlock.abi() > 0 else "not in this kernel",
            "a second wall behind the mounts: what is not writable stays so even if a mount were wrong",
            "a kernel with CONFIG_SECURITY_LANDLOCK and landlock among lsm=",
        ),
        _optional(
            "cgroup memory",
            "memory" in controllers,
            version if "memory" in controllers else f"watched from outside ({reason or 'no writable hierarchy'})",
            "the kernel holds a sandbox to its memory; without it each process is held, and their sum is watched",
            "run carrel as root, or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes carrel serve",
        ),
        _optional(
            "cgroup cpu",
            "cpu" in controllers,
            version if "cpu" in controllers else reason or "no writable hierarchy",
            "without it a CPU limit cannot be enforced, and asking for one is refused",
            "as for memory",
        ),
        _optional(
            "own user ids",
            root,
            "each sandbox has a range of host user ids to itself" if root else "all sandboxes run as this user",
            "a process that escaped would still be a stranger to the other sandboxes",
            "run carrel as root",
        ),
        examine_bridge(root=root),
        Finding(
            "KVM",
            "ok" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "degraded",
            "/dev/kvm can be opened" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "/dev/kvm cannot be opened",
            "only the provider microvm needs it, for QEMU, and tries whether a machine starts; none is required",
        ),
    ]
    return HostFindings(tuple(findings), controllers)


def _tried(name: str, reason: str | None, why: str, remedy: str) -> Finding:
    return Finding(name, "missing", reason, why, remedy) if reason else Finding(name, "ok", "works", why)


def _optional(name: str, there: bool, found: str, why: str, remedy: str | None) -> Finding:
    return Finding(name, "ok" if there else "degraded", found, why, None if there else remedy)


def _overlay() -> Finding:
    reason = linux.attempt(_mount_overlay)
    return _optional(
        OVERLAY,
        reason is None,
        reason or "works",
        "only for sandboxes that run from an image; none is required",
        "a kernel with CONFIG_OVERLAY_FS (modprobe overlay); data on a file system that can be a layer of an overlay",
    )


def _mount_overlay() -> None:
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
    linux.mount("overlay", "/tmp", "overlay", linux.MS_RDONLY, "lowerdir=/usr:/etc")


def examine_bridge(*, root: bool) -> Finding:
    """Check for the programs and the device that a bridged network needs."""
    needed = ("slirp4netns",) if root else ("slirp4netns", "nsenter")
    lacking = [name for name in needed if shutil.which(name, path=os.pathsep.join(PATH)) is None]
    usable = os.access(_TUN, os.R_OK | os.W_OK)
    return _optional(
        BRIDGE,
        not lacking and usable,
        f"no {' and no '.join(lacking)}" if lacking else "slirp4netns" if usable else f"{_TUN} cannot be opened",
        "only for sandboxes with the network 'bridge', which an operator has to allow; none is required",
        f"apt install {'slirp4netns' if 'slirp4netns' in lacking else 'util-linux'}"
        if lacking
        else f"modprobe tun; chmod 0666 {_TUN}",
    )


def _mount_proc() -> None:
    pid = linux.fork_into(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID)
    if pid == 0:
        code = 0
        try:
            linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
            linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        except OSError as error:
            code = error.errno or 1
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise OSError(code, os.strerror(code))


if __name__ == "__main__":
    sys.stdout.buffer.write(_said())
