"""Sandboxes are forked in a process of its own, because a forker that isolates leaves the host's file system for good."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS

PREPARE = """
import json, os, socket, sys, time
from carrel.isolation.forker import SandboxForker, kill
from carrel.isolation.sandbox import NETWORK, PROXY_PORT, PROXY_LISTENER, Spec

isolate, workspaces = sys.argv[1] == "namespace", sys.argv[2]
told, tell = os.pipe()

class Supervisor:
    # Stands for the program a child becomes: it tells through a pipe what it was born with.
    def prepare(self): return "prepared"
    def take_over(self, prepared, *, rehearse): return {tell}
    def main(self, born, prepared):
        assert prepared == "prepared"
        if born.id == "broken":
            raise OSError("no luck")
        seen = {"id": born.id, "env": born.env, "workspace": sorted(os.listdir(born.workspace)), "pid": os.getpid(),
                "uid": os.getuid(), "isolated": born.isolated, "fds": len(os.listdir("/proc/self/fd")),
                "proxy_port": born.proxy_port, "trust": born.trust, "refusing": born.refusing is not None}
        wanted, until = born.proxy_port is not None, time.monotonic() + 20
        while True:
            with socket.socket() as one:
                seen["listens"] = one.connect_ex(("127.0.0.1", PROXY_PORT)) == 0
            # What is not wanted goes once its maker has heard of it, where one does.
            if "GOES" not in born.env or seen["listens"] == wanted or time.monotonic() > until:
                break
        os.write(tell, json.dumps(seen).encode())
        os._exit(0)

forker = SandboxForker(Supervisor(), isolate=isolate)
forker.prepare(workspaces)
listener = socket.socketpair()[0]

def heard(child):
    child.orders.settimeout(20)
    word, fds, _, _ = socket.recv_fds(child.orders, 4096, 1)
    if word == PROXY_LISTENER:
        child.take_proxy_listener(*fds)
        return heard(child)
    if word == NETWORK:
        child.network_fd, = fds
        return heard(child)
    return word

def bury(child):
    child.orders.close()
    child.close()
    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    deadline = time.monotonic() + 10
    while forker.cgroups.remove(child.group) is False and time.monotonic() < deadline:
        time.sleep(0.01)
    return code
"""


@pytest.fixture
def workspaces(tmp_path: Path) -> Path:
    (tmp_path / "w1" / "inside").mkdir(parents=True)
    return tmp_path


def run(kind: str, workspaces: Path, body: str) -> None:
    code = PREPARE + textwrap.dedent(body) + "\nforker.close()\n"
    command = [sys.executable, "-c", code, kind, str(workspaces)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_becomes_what_was_asked_for(kind: str, workspaces: Path) -> None:
    run(
        kind,
        workspaces,
        """
        assert forker.describe()["isolate"] is isolate
        for rehearse in (False, True):
            child = forker.fork(rehearse=rehearse)
            assert child.name == "" and child.started > 0
            forker.configure(child, Spec("s", "w1", env={"A": "b"}), listener.fileno())
            assert heard(child) == b"ready"
            seen = json.loads(os.read(told, 4096))
            assert (seen["id"], seen["env"], seen["workspace"]) == ("s", {"A": "b"}, ["inside"])
            assert seen["isolated"] is isolate
            assert not isolate or (seen["pid"], seen["uid"]) == (1, 1000)
            assert seen["fds"] < 12, "it inherited what is not its own"
            assert bury(child) == 0
        """,
    )


@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
def test_a_way_out_is_kept_where_it_was_asked_for(workspaces: Path) -> None:
    run(
        "namespace",
        workspaces,
        """
        for network, kept, listens in (("allowlist", True, True), ("none", False, True), ("bridge", False, False)):
            for early in (False, True):
                child = forker.fork(rehearse=False)
                if early:  # a spare's has arrived before anybody asks
                    word, fds, _, _ = socket.recv_fds(child.orders, 4096, 1)
                    assert word == PROXY_LISTENER
                    child.take_proxy_listener(*fds)
                    assert child.proxy_listener.getsockname() == ("127.0.0.1", PROXY_PORT)
                child.set_network(network)
                forker.configure(child, Spec("s", "w1", network=network, trust=kept, env={"GOES": ""}), listener.fileno())
                assert heard(child) == b"ready"
                assert (child.proxy_listener is not None) is kept
                seen = json.loads(os.read(told, 4096))
                assert seen["listens"] is listens and seen["trust"] is kept
                assert seen["proxy_port"] == (PROXY_PORT if listens else None)
                assert seen["refusing"] is (network == "none")
                assert bury(child) == 0 and child.proxy_listener is None
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_refused_where_nothing_is_isolated(kind: str, workspaces: Path) -> None:
    run(
        kind,
        workspaces,
        """
        from carrel.errors import PlatformError
        from carrel.isolation.masks import Masks, pack
        child = forker.fork(rehearse=False)
        before = len(os.listdir("/proc/self/fd"))
        masks = pack(Masks(("base64",)))
        try:
            forker.configure(child, Spec("s", "w1", masked=True), listener.fileno(), masks)
        except PlatformError:
            assert not isolate
            kill(child.pid)
        else:
            assert isolate and heard(child) == b"ready"
            assert json.loads(os.read(told, 4096))["fds"] < 12, "what masks are made from was left open"
        os.close(masks)
        bury(child)
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_supervisor_that_fails_ends_its_child(kind: str, workspaces: Path) -> None:
    run(
        kind,
        workspaces,
        """
        child = forker.fork(rehearse=False)
        forker.configure(child, Spec("broken", "w1"), listener.fileno())
        assert heard(child) == b"ready"
        assert bury(child) == 1
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_spare_ends_with_whoever_made_it_and_descriptors_are_not_left(kind: str, workspaces: Path) -> None:
    run(
        kind,
        workspaces,
        """
        assert bury(forker.fork(rehearse=True)) == 0  # the first starts the forker
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            assert bury(forker.fork(rehearse=True)) == 0
        child = forker.fork(rehearse=False)
        try:
            forker.configure(child, Spec("s", "absent"), listener.fileno())
        except OSError:
            assert isolate
        else:
            assert heard(child).startswith(b"failed: ")
        kill(child.pid)
        bury(child)
        assert len(os.listdir("/proc/self/fd")) == before
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_forker_that_was_killed_is_replaced(kind: str, workspaces: Path) -> None:
    run(
        kind,
        workspaces,
        """
        import signal
        assert bury(forker.fork(rehearse=False)) == 0
        pid = forker._forker_pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            forker.fork(rehearse=False)
        except OSError as error:
            assert "has died" in str(error)
        else:
            raise AssertionError("a dead process forked")
        child = forker.fork(rehearse=False)
        assert forker._forker_pid != pid
        forker.configure(child, Spec("s", "w1"), listener.fileno())
        assert heard(child) == b"ready"
        assert bury(child) == 0
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_forker_has_no_descriptor_of_a_sandbox_and_ends_with_the_zygote(kind: str, workspaces: Path) -> None:
    run(
        kind,
        workspaces,
        """
        assert bury(forker.fork(rehearse=False)) == 0
        opened = set(os.listdir(f"/proc/{forker._forker_pid}/fd"))
        spares = [forker.fork(rehearse=True) for _ in range(3)]
        assert set(os.listdir(f"/proc/{forker._forker_pid}/fd")) == opened
        with open(f"/proc/{spares[0].pid}/stat") as file:
            assert int(file.read().rpartition(")")[2].split()[1]) == os.getpid(), "it is no child of the zygote"
        for spare in spares:
            assert bury(spare) == 0
        forker.close()
        assert not os.path.exists(f"/proc/{forker._forker_pid}")
        """,
    )
