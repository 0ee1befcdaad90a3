"""The loop as the zygote uses it: made in one process, taken over in two forks of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# In a process of its own: the loop changes the signal handling of a whole process, and pytest has threads.
PREPARE = """
import asyncio, json, os, signal, socket, sys, threading, time
from carrel.supervisor.loop import InheritedLoop

loop = InheritedLoop()
heard = []
loop.add_signal_handler(signal.SIGUSR1, heard.append, "USR1")

def sockets(descriptors):
    return {os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors}

def forked(main):
    # Runs main in a fork and gives what it answers.
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        code = 1
        try:
            theirs.settimeout(20)
            main(theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    ours.settimeout(20)
    return pid, ours

def say(line, **values):
    line.sendall(json.dumps(values).encode() + b"\\n")

def ask(line):
    data = b""
    while not data.endswith(b"\\n"):
        part = line.recv(4096)
        assert part, "the fork went away"
        data += part
    return json.loads(data)

def ended(*children):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, line in children]
"""


def run(body: str) -> None:
    code = PREPARE + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_signals_and_wake_ups_of_one_fork_never_reach_the_other() -> None:
    run("""
    turns = []

    async def serve(line):
        # A line says what was heard and how often the loop turned; the end of input ends it.
        line.setblocking(False)
        say(line, ready=True)
        while await asyncio.get_running_loop().sock_recv(line, 1):
            say(line, heard=heard, turns=len(turns))

    def child(line):
        loop.take_over()
        once = loop._run_once
        loop._run_once = lambda: (turns.append(1), once())
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve(line))

    one, other = forked(child), forked(child)
    assert ask(one[1]) == ask(other[1]) == {"ready": True}

    def state(which):
        which[1].sendall(b"?")
        return ask(which[1])

    state(other)
    rest = state(other)["turns"]
    for _ in range(20):
        os.kill(one[0], signal.SIGUSR1)
        state(one)
    while not state(one)["heard"]:
        pass
    after = state(other)
    assert after["heard"] == []
    assert after["turns"] - rest <= 4, "the other loop was woken by signals that were not for it"
    os.kill(other[0], signal.SIGUSR1)
    while state(other)["heard"] != ["USR1"]:
        pass
    for which in (one, other):
        which[1].close()
    assert ended(one, other) == [0, 0]
    assert heard == [], "the process that made the loop hears nothing"
    """)


def test_descriptors_are_not_shared() -> None:
    run("""
    def child(line):
        line.setblocking(False)
        own = loop.take_over()
        assert all(not os.get_inheritable(descriptor) for descriptor in own)
        say(line, own=sorted(sockets(own) - {"anon_inode:[eventpoll]"}), count=len(own),
            open=len(os.listdir("/proc/self/fd")))

    made = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in (loop._ssock, loop._csock)}
    one, other = forked(child), forked(child)
    first, second = ask(one[1]), ask(other[1])
    assert first["count"] == second["count"] == 3
    assert len(first["own"]) == len(second["own"]) == 2
    assert not set(first["own"]) & set(second["own"])
    assert not (set(first["own"]) | set(second["own"])) & made
    assert second["open"] <= first["open"] + 1, "the old ones are closed"
    assert ended(one, other) == [0, 0]
    """)


def test_threads_and_timers_work_after_the_fork_and_the_first_loop_still_does() -> None:
    run("""
    async def work():
        assert await asyncio.to_thread(lambda: 7) == 7
        process = await asyncio.wait_for(asyncio.sleep(0.01, "slept"), 5)
        assert process == "slept"
        done = asyncio.get_running_loop().create_future()
        threading.Timer(0.01, loop.call_soon_threadsafe, (done.set_result, "woken")).start()
        assert await asyncio.wait_for(done, 5) == "woken"

    def child(line):
        loop.take_over()
        loop.run_until_complete(work())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    one = forked(child)
    assert ended(one) == [0]
    loop.run_until_complete(work())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    """)


def test_taking_over_leaves_no_descriptor_behind() -> None:
    run("""
    def child(line):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            loop.take_over()
        assert len(os.listdir("/proc/self/fd")) == before
        os.kill(os.getpid(), signal.SIGUSR1)
        loop.run_until_complete(asyncio.sleep(0.05))
        assert heard == ["USR1"]

    assert ended(forked(child)) == [0]
    """)
