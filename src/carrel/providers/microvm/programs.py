"""Finds the programs of a virtual machine and KVM, and checks that they can be used. Answers are kept. Blocking."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache

from carrel.errors import PlatformError
from carrel.providers.microvm import commands
from carrel.providers.microvm.kernel import GuestKernel

KVM = "/dev/kvm"
_SERVERS = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd", "/usr/lib/virtiofsd")
_DEADLINE_S = 20
_STARTED = b"Linux version"


@dataclass(frozen=True)
class FileServer:
    """A `virtiofsd`. The one that comes with QEMU before 8.0 has other options than its successor."""

    path: str
    of_qemu: bool


def qemu(configured: str) -> str | None:
    """Return the real path of QEMU: the configured one, or the one on PATH."""
    return _program(configured or "qemu-system-x86_64", bool(configured))


def file_server(configured: str) -> FileServer | None:
    """Return the file server: the configured one, the one on PATH, or that of the distribution."""
    found = _program(configured or "virtiofsd", bool(configured))
    for path in () if configured else _SERVERS:
        found = found or _program(path, configured=True)
    if found is None or (said := _say(found, "--version")) is None:
        return None
    return FileServer(found, of_qemu="QEMU" in said)


def _program(name: str, configured: bool) -> str | None:
    path = name if configured else shutil.which(name)
    if path is None or not os.path.isfile(path) or not os.access(path, os.X_OK):
        return None
    return os.path.realpath(path)


def package(path: str) -> str | None:
    """Return the directory that must be shown to a program besides the public ones: that of its own installation."""
    if path.startswith("/usr/") and not path.startswith("/usr/local/"):
        return None
    return None if path.startswith("/usr/") else os.path.dirname(path)


@cache
def problem(program: str) -> str | None:
    """Return why QEMU cannot be used, or None."""
    devices = _say(program, "-device", "help")
    if devices is None:
        return f"{program} does not run; install QEMU again"
    for device in commands.DEVICES:
        if f'"{device}"' not in devices:
            return f"{program} has no device {device}; install a newer QEMU"
    return None


@cache
def kvm_problem(program: str, kernel: GuestKernel) -> str | None:
    """Return why KVM does not work here, or None: the kernel of the machines is started with it for a moment.

    That the device is there says too little. Under some hypervisors it is, and no machine starts.
    """
    if not os.access(KVM, os.R_OK | os.W_OK):
        return f"{KVM} is not there or cannot be opened"
    with tempfile.TemporaryFile() as console:
        try:
            with subprocess.Popen(
                commands.probe(program, kernel.path), stdin=subprocess.DEVNULL, stdout=console, stderr=console
            ) as machine:
                try:
                    machine.wait(_DEADLINE_S)
                except subprocess.TimeoutExpired:
                    machine.kill()
        except OSError as error:
            raise PlatformError(f"QEMU cannot be started: {error}") from error
        console.seek(0)
        said = console.read(1 << 20)
    if machine.returncode == 0 and _STARTED in said:
        return None
    lines = [line for line in said.decode(errors="replace").splitlines() if "qemu" in line]
    return f"no machine starts with KVM: {lines[0][:200] if lines else f'status {machine.returncode}'}"


def _say(*words: str) -> str | None:
    """Return what a command prints; None if it fails."""
    try:
        run = subprocess.run(words, capture_output=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (run.stdout + run.stderr).decode(errors="replace")
