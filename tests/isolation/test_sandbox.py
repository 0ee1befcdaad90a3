"""The two halves of becoming a sandbox are seen from inside one."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import AsyncIterator

import pytest
from tests.support.sandboxes import KINDS, Box, House

from carrel.isolation import linux, sandbox
from carrel.isolation.masks import Masks

needs_namespaces = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")


@pytest.fixture
async def inside(houses: dict[str, House]) -> AsyncIterator[Box]:
    house = House("namespace", houses["namespace"].directory)
    async with house.box(memory_mb=256, processes=64, disk_mb=10) as box:
        yield box
    await house.provider.close()


@needs_namespaces
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("hostname", "carrel\n"),
        ("id -un", "agent\n"),
        ("ulimit -c; ulimit -Hc", "0\n0\n"),
        ("ulimit -Hn", f"{min(sandbox.OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])}\n"),
        ("ulimit -p 2>/dev/null || bash -c 'ulimit -u'", "64\n"),
        ("bash -c 'ulimit -f'", "10240\n"),
        (
            "cat /sys/class/net/lo/operstate 2>/dev/null; ls /proc/sys/net/ipv4/conf | sort | tr '\\n' ' '",
            "all default lo ",
        ),
        ("touch /x /usr/x /etc/x 2>&1 | grep -c -E 'Read-only|Permission'", "3\n"),
        ("for d in /tmp /home/agent /workspace /dev/shm; do touch $d/x && echo ok; done", "ok\n" * 4),
        ("stat -c %u:%g /workspace /home/agent", "1000:1000\n" * 2),
        ("ls /proc | grep -c '^[0-9]'", None),
    ],
)
async def test_what_is_seen_inside(inside: Box, command: str, expected: str | None) -> None:
    result = await inside.supervisor.run(command)
    if expected is None:
        assert int(result["stdout"]) < 10
    else:
        assert result["stdout"] == expected, result


@needs_namespaces
async def test_the_supervisor_is_out_of_reach(inside: Box) -> None:
    script = "ls /proc/1/fd; cat /proc/1/environ /proc/1/maps /proc/1/mem; ls /proc/1/root/ /proc/1/cwd/; echo 1000 > /proc/1/oom_score_adj"
    result = await inside.supervisor.run(script)
    assert result["exit_code"] != 0
    assert result["stdout"].replace("total 0", "").strip() == ""
    assert result["stderr"].count("ermission denied") >= 6


@needs_namespaces
async def test_masks_are_on_before_anything_runs_and_nothing_of_their_making_is_left(houses: dict[str, House]) -> None:
    house = House("namespace", houses["namespace"].directory)
    async with house.box() as plain, house.box(masks=Masks(("base64",), ("/etc/hosts",))) as worn:
        mounts = [
            (await box.supervisor.run("cat /proc/self/mountinfo"))["stdout"].splitlines() for box in (plain, worn)
        ]
        added = [line.split() for line in mounts[1][len(mounts[0]) :]]
        assert sorted(line[4] for line in added) == ["/etc/hosts", "/usr/bin/base64"]
        assert all({"ro", "nosuid", "nodev"} <= set(line[5].split(",")) for line in added)
        assert (await worn.supervisor.run("ls / | sort"))["stdout"] == (await plain.supervisor.run("ls / | sort"))[
            "stdout"
        ]
        assert (await worn.supervisor.run("base64 --version"))["exit_code"] == 126
    await house.provider.close()


def test_a_zygote_that_gives_up_before_the_ids_are_mapped() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"no")
    try:
        reason = linux.attempt(
            lambda: (
                linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNET | linux.CLONE_NEWUTS),
                sandbox.prepare(theirs, root=False),
            )
        )
        assert reason is not None
        assert "gave up" in reason
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("told", [b"", b"what nobody reads any more"])
@pytest.mark.parametrize("half", ["prepare", "receive"])
def test_who_waits_for_a_zygote_that_has_gone_ends_in_peace(half: str, told: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if told:
        theirs.send(told)
    ours.close()
    pid = os.fork()
    if pid == 0:
        try:
            if half == "prepare":
                linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWUTS)
                sandbox.prepare(theirs, root=False, own_network=False)
            sandbox.receive(theirs)
        finally:
            os._exit(9)
    theirs.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_request_travels_with_its_descriptors() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_end, write_end = os.pipe()
    try:
        socket.send_fds(
            ours, [b'{"id": "a", "workspace": "w", "memory_mb": 5, "env": {"A": "b"}}'], [read_end, write_end]
        )
        spec, fds = sandbox.receive(theirs)
        assert spec == sandbox.Spec("a", "w", memory_mb=5, env={"A": "b"})
        assert len(fds) == 2
        for descriptor in fds:
            os.close(descriptor)
    finally:
        for end in (read_end, write_end):
            os.close(end)
        ours.close()
        theirs.close()
