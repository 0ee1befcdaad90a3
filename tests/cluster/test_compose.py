"""The image of the server in a container of Docker, as the compose file runs it. It stands here because the image does."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.dockerd import DockerDaemon, missing

ROOT = Path(__file__).parents[2]
SERVER = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]["server"]
READY_S = 90


@pytest.fixture
def daemon() -> Iterator[DockerDaemon]:
    if why := missing():
        pytest.skip(why)
    made = DockerDaemon()
    yield made
    made.close()


def docker(daemon: DockerDaemon, *words: str) -> str:
    command = ["docker", "--host", f"unix://{daemon.socket}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_command_runs_in_a_sandbox_of_the_container(daemon: DockerDaemon) -> None:
    docker(daemon, "load", "-i", str(Path(os.environ["CARREL_IMAGES"], "carrel-server.tar")))
    options = [f"--security-opt={each}" for each in SERVER["security_opt"]]
    options += [f"--env={name}={value}" for name, value in SERVER["environment"].items() if "$" not in value]
    options += [
        "--user",
        SERVER["user"],
        "--read-only",
        "--cap-drop=ALL",
        "--network=none",
        f"--tmpfs={SERVER['tmpfs'][0]}",
    ]
    docker(daemon, "run", "--detach", "--name=server", *options, "--volume=carrel:/var/lib/carrel", SERVER["image"])
    try:
        until = time.monotonic() + READY_S
        probe = SERVER["healthcheck"]["test"][1:]
        while not _healthy(daemon, probe):
            assert time.monotonic() < until, docker(daemon, "logs", "server")
            time.sleep(0.2)
        run = ("exec", "server", "carrel", "exec", "first", "--")
        assert docker(daemon, *run, "sh", "-c", "echo kept > file; id -u; cat file").split()[-1] == "kept"
        assert docker(daemon, *run, "cat", "file") == "kept\n"
        assert docker(daemon, *run, "sh", "-c", "ls /var/lib/carrel 2>/dev/null | wc -l") == "0\n"
    finally:
        docker(daemon, "rm", "--force", "--volumes", "server")


def _healthy(daemon: DockerDaemon, probe: list[str]) -> bool:
    command = ["docker", "--host", f"unix://{daemon.socket}", "exec", "server", *probe]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
