"""The command that starts a sandbox. Pure: values in, words out."""

from __future__ import annotations

import os

from carrel.isolation.inside import BUNDLE, CONTROL, HOME, WORKSPACE
from carrel.providers.bundle import NAMES, SupervisorBundle
from carrel.providers.bundle import command as supervisor
from carrel.providers.control_directory import REPORT

NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
OF_HOST = ("/etc/passwd", "/etc/group", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs")
"""Public files that programs of the host need."""
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
"""What the supervisor needs to become the agent. It keeps none of them."""


def bwrap_command(program: str, bundle: SupervisorBundle, control: str, workspace: str) -> list[str]:
    """Return the command. The supervisor is PID 1 of the sandbox; its root is read-only but for what is listed here."""
    words = [program, *NAMESPACES, "--as-pid-1", "--hostname", "carrel", "--clearenv", "--chdir", "/"]
    for capability in CAPABILITIES:
        words += ["--cap-add", capability]
    for path in ("/etc", "/etc/ssl", "/home", "/opt", "/run"):  # bwrap would make them for root alone
        words += ["--perms", "0755", "--dir", path]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    for path in OF_HOST:
        words += ["--ro-bind-try", path, path]
    for path in NAMES:
        words += ["--ro-bind", f"{bundle.path}{path}", path]
    words += ["--ro-bind", bundle.own_files, "/etc/carrel", "--ro-bind", bundle.path, BUNDLE]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/tmp", "/dev/shm", HOME):
        words += ["--perms", "1777", "--tmpfs", path]
    words += ["--bind", control, CONTROL, "--bind", workspace, WORKSPACE]
    return [*words, "--remount-ro", "/", "--", *supervisor(REPORT)]
