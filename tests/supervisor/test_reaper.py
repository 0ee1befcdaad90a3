"""Whole process trees: what a deadline, a DELETE or a killed runner ends, and what they must leave alone."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.leaks import below
from tests.support.sandboxes import KINDS, Box, House, Supervisor, parent, status, until

from carrel.supervisor import commands, reaper
from carrel.supervisor.reaper import Reaper, Runner, descendants, is_ending

isolated = pytest.mark.parametrize("house", [kind for kind in KINDS if kind != "process"], indirect=True)

# Each leaves processes that hold the command's output open and that a plain kill of the first process would miss.
STUBBORN = {
    "plain": "exec sleep 7777",
    "ignores TERM": "trap '' TERM INT HUP; while :; do sleep 7777; done",
    "double fork": "(sh -c 'sleep 7777 & exit' & exit) ; sleep 7777",
    "own session": "setsid sh -c 'trap \"\" TERM; sleep 7777' & setsid setsid sleep 7777 & sleep 7777",
    "nohup": "nohup sleep 7777 >/dev/null 2>&1 & nohup sleep 7777 & wait",
    "orphans of orphans": "for i in 1 2 3; do (setsid sh -c '(sleep 7777 &) ; (sleep 7777 &)' &) ; done; sleep 7777",
    "respawns": "f() { trap '' TERM; while :; do sleep 7777 & wait; done; }; f & f & wait",
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind", STUBBORN)
async def test_a_deadline_ends_the_whole_tree_and_nothing_else(box: Box, kind: str, beside: bool) -> None:
    supervisor = box.supervisor
    other = await supervisor.start("sleep 8888") if beside else None
    for deadline in (0.3, 5):  # on a machine that stood still, the short one may come before the first word
        result = await supervisor.run(f"echo partial; {STUBBORN[kind]}", timeout=deadline)
        assert (result["timed_out"], result["signal"], result["exit_code"]) == (True, "SIGKILL", None)
        assert result["duration_ms"] > deadline * 1000 - 50
        if result["stdout"]:
            break
    assert result["stdout"].startswith("partial\n")
    await until(lambda: box.count("sleep 7777") == 0, what="the end of the tree")
    if other:
        assert (await supervisor.info(other))["running"]
    assert (await supervisor.run("echo on"))["stdout"] == "on\n"


@pytest.mark.parametrize("first", [True, False])
async def test_deadlines_of_concurrent_commands_do_not_touch_the_others(box: Box, first: bool) -> None:
    supervisor = box.supervisor
    stay = [await supervisor.start("(setsid sleep 8888 &); sleep 8888") for _ in range(2)]
    doomed = await supervisor.start("(setsid sleep 7777 &); sleep 7777", timeout=0.5)
    if first:  # the one that has no runner
        await supervisor.ask("DELETE", f"/commands/{stay.pop(0)}")
    await until(lambda: box.count("sleep 8888") == 2 * len(stay), what="those who stay")
    assert (await supervisor.result(doomed))["timed_out"]
    await until(lambda: box.count("sleep 7777") == 0, what="the end of the tree")
    assert box.count("sleep 8888") == 2 * len(stay)
    assert [(await supervisor.info(name))["running"] for name in stay] == [True] * len(stay)


@pytest.mark.parametrize("beside", [False, True])
async def test_leftovers_live_until_their_command_is_deleted(box: Box, beside: bool) -> None:
    supervisor = box.supervisor
    if beside:
        await supervisor.start("sleep 8888")
    name = await supervisor.start("nohup setsid sleep 7777 & echo started")
    result = await supervisor.result(name)
    assert (result["exit_code"], "started" in result["stdout"]) == (0, True)
    second = await supervisor.start("(setsid sleep 6666 &)")
    await supervisor.result(second)
    await until(lambda: box.count("sleep 6666") == 1, what="the second leftover")
    for _ in range(3):
        assert (await supervisor.run("true", timeout=0.2))["exit_code"] in {0, None}
    await until(lambda: box.count("sleep 7777") == 1, what="the first leftover")
    await supervisor.ask("DELETE", f"/commands/{name}")
    await until(lambda: box.count("sleep 7777") == 0, what="the end of the leftover")
    assert box.count("sleep 6666") == 1
    assert box.count("sleep 8888") == int(beside)


async def test_a_leftover_does_not_hold_up_the_result(supervisor: Supervisor) -> None:
    result = await supervisor.run("sleep 7777 & echo done")
    assert (result["stdout"], result["timed_out"]) == ("done\n", False)


async def test_a_fork_bomb_is_bounded_and_ended(houses: dict[str, House]) -> None:
    if "namespace" not in houses:
        pytest.skip("needs a limit on processes")
    house = House("namespace", houses["namespace"].directory)
    try:
        async with house.box(processes=64, memory_mb=512) as box:
            supervisor = box.supervisor
            other = await supervisor.start("exec sleep 8888")
            await supervisor.run("true")  # a runner is ready
            bomb = await supervisor.start("b() { b | b & }; b & exec sleep 7777", timeout=1)
            most = 0

            async def over() -> bool:
                nonlocal most
                most = max(most, box.count(""))
                return not (await supervisor.info(bomb))["running"]

            await until(over, 20, "the end of the bomb")
            assert most <= 70
            assert (await supervisor.result(bomb))["timed_out"]
            await until(lambda: box.count("/bin/sh") == 0, 20, "the end of its processes")
            await until(lambda: box.count("") < 16, 20, "room for others")
            # Each may be two processes for a moment: with those that are there already, fewer than the limit.
            left = await supervisor.start("for i in $(seq 20); do (setsid sleep 6543 &); done")
            await supervisor.result(left)
            await until(lambda: box.count("sleep 6543") == 20, 20, "twenty leftovers")
            await supervisor.ask("DELETE", f"/commands/{left}")
            await until(lambda: box.count("sleep 6543") == 0, 20, "the end of them")
            assert (await supervisor.info(other))["running"]
            assert (await supervisor.run("echo on"))["stdout"] == "on\n"
    finally:
        await house.provider.close()


@isolated  # elsewhere it would reach the host
async def test_killing_everything_leaves_the_sandbox_working(box: Box) -> None:
    supervisor = box.supervisor
    names = [await supervisor.start("sleep 8888") for _ in range(3)]
    await until(lambda: box.count("sleep 8888") == 3, what="three sleepers")
    killer = await supervisor.run(["/bin/sh", "-c", "kill -9 -1"])
    assert killer["exit_code"] == 0 or killer["signal"] == "SIGKILL"
    results = await asyncio.gather(*(supervisor.result(name) for name in names))
    assert [result["signal"] for result in results] == ["SIGKILL"] * 3
    more = await asyncio.gather(*(supervisor.run(f"echo {number}") for number in range(5)))
    assert [result["stdout"] for result in more] == [f"{number}\n" for number in range(5)]


async def test_a_killed_runner_takes_its_command_along(box: Box) -> None:
    supervisor = box.supervisor
    await supervisor.start("sleep 60", interactive=True)
    name = await supervisor.start("trap '' TERM; (setsid sleep 7777 &); sleep 7777")
    await until(lambda: box.count("sleep 7777") == 2, what="two sleepers")
    pid = next(p for p in _pids_of(box, "sleep 7777") if parent(parent(p)) != box.pid and parent(p) != box.pid)
    runner = pid
    while parent(runner) != box.pid:
        runner = parent(runner)
    os.kill(runner, 9)
    assert (await supervisor.result(name))["signal"] == "SIGKILL"
    await until(lambda: box.count("sleep 7777") == 0, what="the end of the tree")
    assert (await supervisor.run("echo on"))["stdout"] == "on\n"


@pytest.mark.parametrize("name", ["TERM", "KILL", "CHLD", "INT", "HUP", "STOP", "USR1", "SEGV"])
@isolated
async def test_the_first_process_ignores_signals_from_inside(box: Box, name: str) -> None:
    assert box.isolated()
    await box.supervisor.run(f"kill -{name} 1; kill -{name} 1; true")
    assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"


async def test_zombies_are_reaped(box: Box) -> None:
    supervisor = box.supervisor
    for _ in range(5):
        await supervisor.run("for i in 1 2 3; do (sh -c 'sleep 0.01 &' &); done")
    other = await supervisor.start("for i in 1 2 3; do (sh -c 'sleep 0.01 &' &); done; sleep 8888")

    def zombies() -> int:
        return sum(_state(pid).startswith("Z") for pid in _all(box))

    await until(lambda: box.count("sleep 8888") == 1 and box.count("sleep 0.01") == 0, what="quiet")
    await until(lambda: zombies() == 0, what="no zombies")
    assert (await supervisor.info(other))["running"]


async def test_the_kernel_ends_commands_before_the_supervisor(box: Box) -> None:
    supervisor = box.supervisor
    await supervisor.start("sleep 60")
    for _ in range(2):
        assert (await supervisor.run("cat /proc/self/oom_score_adj"))["stdout"] == "500\n"
    assert Path(f"/proc/{box.pid}/oom_score_adj").read_text() == "0\n"


def _all(box: Box) -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_of(box, pid)]


def _is_of(box: Box, pid: int) -> bool:
    try:
        while pid > 1:
            pid = parent(pid)
            if pid == box.pid:
                return True
    except (OSError, KeyError):
        pass
    return False


def _state(pid: int) -> str:
    """As the kernel names it; nothing for one that has gone meanwhile."""
    try:
        return status(pid)["State"]
    except (OSError, KeyError):
        return ""


def _pids_of(box: Box, words: str) -> list[int]:
    return [pid for pid, _started in (each for each, line in below(box.pid).items() if line.startswith(words))]


@given(st.dictionaries(st.integers(2, 40), st.integers(1, 40)), st.sets(st.integers(2, 40)))
def test_descendants_are_what_leads_up_to_the_root(parents: dict[int, int], stop: set[int]) -> None:
    tree = {pid: up for pid, up in parents.items() if up < pid}  # a parent is older: no loops
    found = descendants(1, tree, tuple(stop))
    assert len(found) == len(set(found))

    def belongs(pid: int) -> bool:
        while pid != 1:
            if pid in stop or pid not in tree:
                return False
            pid = tree[pid]
        return True

    assert set(found) == {pid for pid in tree if belongs(pid)}


def test_who_is_doomed() -> None:
    assert not is_ending(os.getpid())
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    try:
        assert not is_ending(pid)
        os.kill(pid, signal.SIGKILL)
        assert is_ending(pid), "whether it has come to its end or not"
    finally:
        os.waitpid(pid, 0)
    assert is_ending(pid)


async def test_what_a_lost_reaper_had_is_looked_for_once_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end, and hand over what it had, between any two looks."""
    lost = Reaper()
    lost.pid = 4242
    looks: list[str] = []

    def processes() -> dict[int, int]:
        looks.append("gone" if len(looks) > 2 else "there")
        return {} if looks[-1] == "gone" else {lost.pid: 1}

    def kill_below(root: int, stop: object = ()) -> int:
        looks.append("killed")
        return 0

    monkeypatch.setattr(commands, "processes", processes)
    monkeypatch.setattr(commands, "kill_below", kill_below)
    those = commands.Commands()
    those._loop = asyncio.get_running_loop()
    those.sweep(lost)
    await until(lambda: not those._sweeps)
    assert looks[-2:] == ["gone", "killed"]


def test_new_runner_leaves_garbage_of_the_supervisor_collectable() -> None:
    """Objects that are alive when a runner is forked are collected once they are garbage: else each runner leaks some."""

    class Node:
        pass

    frozen = gc.get_freeze_count()
    score = os.open("/dev/null", os.O_WRONLY)
    dropped = []
    try:
        for _ in range(3):
            node = Node()
            node.itself = node  # type: ignore[attr-defined]
            runner = Runner(lambda *_: None, score)
            runner.close()
            os.waitpid(runner.pid, 0)
            dropped.append(weakref.ref(node))
            del node
    finally:
        os.close(score)
    gc.collect()
    assert gc.get_freeze_count() <= frozen  # an object that was frozen before may have died meanwhile
    assert [alive for alive in dropped if alive() is not None] == []


def test_a_parent_is_signalled_before_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that lives longer than its killed child ends with an exit code of 137 instead of by the signal."""
    tree = {15: 1, 16: 15, 24: 16, 32: 16, 8: 32}
    sent: list[int] = []
    monkeypatch.setattr(reaper, "_listed", lambda: list(tree))
    monkeypatch.setattr(reaper, "_parent", tree.get)
    monkeypatch.setattr(os, "kill", lambda pid, _number: sent.append(pid))
    assert reaper.signal_below(1, signal.SIGKILL) == 5
    assert sorted(sent) == sorted(tree)
    for pid, parent_of in tree.items():
        assert parent_of == 1 or sent.index(parent_of) < sent.index(pid)
