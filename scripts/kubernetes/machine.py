"""The private machine that the cluster runs on: namespaces and cgroups of its own, and a folder for what it writes.

When its first process ends, the kernel ends all others and removes mounts and network devices with their namespaces.
What a killed run has left, the next one removes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import credentials
import layout
from programs import Programs

PREFIX = "carrel-cluster-"
START_S = 180.0
END_S = 30.0
CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1


class Machine:
    """One machine, from `start` to the end of the `with` block."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0
        self.took_s = 0.0
        _remove_strays()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _locked(self.folder)

    def __enter__(self) -> Machine:
        return self

    @property
    def kubeconfig(self) -> str:
        """The path of the administrator's kubeconfig file."""
        return str(self.folder / "pki/admin.kubeconfig")

    def start(self) -> None:
        """Start the machine; return when it can run pods."""
        began = time.monotonic()
        credentials.write(self.folder / "pki", layout.NODE, ["127.0.0.1", layout.ADDRESS, layout.API_SERVICE])
        described = {key: str(value) for key, value in asdict(self._programs).items()}
        (self.folder / "programs.json").write_text(json.dumps(described))
        groups = _make_groups(self.folder.name)
        flags = ["--mount", "--propagation=private", "--net", "--pid", "--uts", "--ipc", "--cgroup", "--fork"]
        node = str(Path(__file__).with_name("node.py"))
        with (self.folder / "node.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *flags, "--kill-child", sys.executable, node, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _enter(groups),  # noqa: PLW1509 - this program has no threads
            )
        while not (self.folder / "ready").exists():
            if self._process.poll() is not None or time.monotonic() - began > START_S:
                raise SystemExit(f"cluster: it did not start:\n{self._said()}")
            time.sleep(0.05)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._first = int(children[0])
        (self.folder / "pid").write_text(children[0])
        self.took_s = time.monotonic() - began

    def _said(self) -> str:
        said = [(path.name, path.read_text(errors="replace")) for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(f"{name}: {line}" for name, text in said for line in text.splitlines()[-12:])

    def in_network(self, command: list[str]) -> list[str]:
        """Return a command that runs another in the network of the machine."""
        return ["nsenter", "-t", str(self._first), "-n", "--", *command]

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # its child, the first process of the machine, is killed with it
            self._process.wait()
        _remove(self.folder)
        os.close(self._lock)


class Started:
    """The machine of a folder, as programs below `run` find it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.programs = Programs(**{k: Path(v) for k, v in json.loads((folder / "programs.json").read_text()).items()})
        self._first = (folder / "pid").read_text()

    def in_mounts(self, command: list[str]) -> list[str]:
        """Return a command that runs another where the machine's files are."""
        return ["nsenter", "-t", self._first, "-m", "--", *command]

    def signal(self, component: str, number: signal.Signals) -> None:
        """Send a signal to a component of the cluster, for example `kube-apiserver`."""
        process = (self.folder / f"{component}.pid").read_text()
        kill = ["kill", "-s", str(int(number)), process]
        subprocess.run(["nsenter", "-t", self._first, "-p", "-m", "--", *kill], check=True)


def _make_groups(name: str) -> list[Path]:
    """Make a cgroup in every hierarchy of this host."""
    groups = []
    for controller in layout.CONTROLLERS:
        group = CGROUPS / controller / name
        group.mkdir()
        groups.append(group)
        for file in ("cpuset.cpus", "cpuset.mems") if controller == "cpuset" else ():
            (group / file).write_text((group.parent / file).read_text())
        if controller == "memory":
            with suppress(OSError):  # it is so already
                (group / "memory.use_hierarchy").write_text("1")
    return groups


def _enter(groups: list[Path]) -> None:
    """Move this process into the groups. It is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for group in groups:
        (group / "cgroup.procs").write_text("0")


def _locked(folder: Path) -> int:
    """Lock a folder. The lock is lost when this process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_strays() -> None:
    """Remove what killed runs have left. The folder of one that still runs is locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = _locked(folder)
        except OSError:
            continue
        _remove(folder)
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove the groups and the folder of a machine that has ended. Its last processes may be ending still."""
    until = time.monotonic() + END_S
    for controller in layout.CONTROLLERS:
        group = CGROUPS / controller / folder.name
        while group.exists():
            try:
                for place, _, _ in os.walk(group, topdown=False):
                    os.rmdir(place)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
    shutil.rmtree(folder)
