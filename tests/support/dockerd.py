"""A Docker daemon of the tests: own data, own socket, no network, and nothing left when it has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from carrel.providers.docker.engine import probe

START_S = 60.0


def missing() -> str | None:
    """Return why this host cannot have a daemon; None if it can."""
    if os.geteuid() != 0:
        return "only root can start a Docker daemon"
    lacking = [name for name in ("dockerd", "containerd", "runc") if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed" if lacking else None


class DockerDaemon:
    """One daemon and the containerd that it starts."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="dockerd"))
        self._group = f"carrel-tests-{os.getpid()}"
        self.socket = str(self.place / "docker.sock")
        self._log = (self.place / "log").open("wb")
        self.process = subprocess.Popen(
            [
                "dockerd",
                *("--host", f"unix://{self.socket}", "--pidfile", str(self.place / "pid")),
                *("--data-root", str(self.place / "data"), "--exec-root", str(self.place / "exec")),
                *("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=overlay2"),
                *("--cgroup-parent", f"/{self._group}"),
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "TMPDIR": str(self.place)},  # where containerd writes when dockerd finds it too slow
        )
        until = time.monotonic() + START_S
        while True:
            try:
                probe(self.socket)
                return
            except (OSError, ValueError):
                if self.process.poll() is not None or time.monotonic() > until:
                    said = (self.place / "log").read_text(errors="replace")[-2000:]
                    self.close()
                    raise AssertionError(f"dockerd did not start: {said}") from None
                time.sleep(0.05)

    def close(self) -> None:
        """End the daemon. It ends its containerd, and unmounts what it has mounted."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        for mount in self._mounts():
            subprocess.run(["umount", mount], check=False)
        shutil.rmtree(self.place)
        with suppress(OSError):  # where the shims of containerd have their sockets; another daemon may use it too
            os.rmdir("/run/containerd/s")
            os.rmdir("/run/containerd")
        for group in Path("/sys/fs/cgroup").glob(f"**/{self._group}"):
            group.rmdir()

    def _mounts(self) -> list[str]:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return sorted((point for point in points if point.startswith(str(self.place))), reverse=True)

    def objects(self) -> list[str]:
        """The containers and volumes of this daemon, by their ids and names."""
        found = []
        for kind in ("container", "volume"):
            words = ["docker", "--host", f"unix://{self.socket}", kind, "ls", "-q", *(["-a"] * (kind == "container"))]
            found += subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        return found
