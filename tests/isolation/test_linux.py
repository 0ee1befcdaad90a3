"""The kernel calls, in children of their own."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from carrel.isolation import linux, probe
from carrel.primitives import libc

namespaces = pytest.mark.skipif(probe.host().missing is not None, reason="this host cannot make namespaces")


def test_attempt_tells_what_went_wrong() -> None:
    assert linux.attempt(lambda: None) is None
    assert linux.attempt(lambda: os.stat("/no/such")) == "No such file or directory"
    assert linux.attempt(lambda: 1 // 0) == "ZeroDivisionError('integer division or modulo by zero')"
    assert linux.attempt(lambda: os.kill(os.getpid(), 9)) == "the probe died with status 9"
    assert linux.attempt(signal_pause, timeout_s=1) == "the probe died with status 14"


def signal_pause() -> None:
    import signal

    signal.pause()


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (lambda: linux.unshare(1), errno.EINVAL, "unshare: "),
        (lambda: linux.mount("a", "/no/such", "tmpfs", 0), None, "mount tmpfs on /no/such: "),
        (lambda: linux.unmount("/no/such"), None, "unmount /no/such: "),
        (lambda: linux.open_tree("/no/such"), None, "open_tree /no/such: "),
        (lambda: linux.move_mount(-1, "/no/such"), None, "move_mount to /no/such: "),
        (lambda: linux.set_mount_attributes(-1, 1), None, "mount_setattr: "),
        (lambda: libc.prctl(9999, 0), errno.EINVAL, "prctl 9999: "),
        (lambda: linux.fork_into(1 << 40), errno.EINVAL, "clone3: "),
    ],
)
def test_failures_name_the_call(call: object, code: int | None, words: str) -> None:
    assert callable(call)
    with pytest.raises(OSError) as caught:
        call()
    assert str(caught.value.strerror).startswith(words)
    assert caught.value.errno == code or (code is None and caught.value.errno)


@namespaces
def test_fork_into_gives_the_child_its_own_world() -> None:
    read_end, write_end = os.pipe()
    pid = linux.fork_into(linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNET)
    if pid == 0:
        linux.bring_up_loopback()
        os.write(write_end, f"{os.getpid()} {os.getppid()}".encode())
        os._exit(7)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert pipe.read() == "1 0"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@namespaces
def test_capabilities_are_gone_for_good() -> None:
    def drop() -> None:
        linux.unshare(linux.CLONE_NEWUSER)
        linux.drop_bounding_set()
        linux.drop_capabilities()
        lines = Path("/proc/self/status").read_text().splitlines()
        held = {line.split()[0]: int(line.split()[1], 16) for line in lines if line.startswith("Cap")}
        assert set(held.values()) == {0}, held

    assert linux.attempt(drop) is None


def test_limits_are_raised_to_the_hard_one() -> None:
    def lift() -> None:
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        linux.raise_limit(resource.RLIMIT_NOFILE)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)

    assert linux.attempt(lift) is None


def test_limits_are_only_lowered() -> None:
    def lower() -> None:
        linux.lower_limit(resource.RLIMIT_NOFILE, 100)
        linux.lower_limit(resource.RLIMIT_NOFILE, 200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 100)

    assert linux.attempt(lower) is None


@pytest.mark.parametrize("extra", [(), (0,), (5, 6), (-1, 9)])
def test_close_all_but(extra: tuple[int, ...]) -> None:
    script = """
import os, sys
from carrel.isolation import linux
for n in range(3, 12): os.dup2(0, n)
keep = {0, 1, 2, *map(int, sys.argv[1:])}
linux.close_all_but(keep)
def there(n):
    try: os.fstat(n)
    except OSError: return False
    return True
print([n for n in range(64) if there(n)])
"""
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, extra)], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    assert run.stdout.decode().strip() == str(sorted({0, 1, 2, *(n for n in extra if n >= 0)}))


def test_arguments_are_hidden() -> None:
    script = "from carrel.primitives import libc; libc.hide_arguments(); print(open('/proc/self/cmdline').read())"
    run = subprocess.run([sys.executable, "-c", script, "secret-path"], capture_output=True, check=True)
    assert run.stdout.strip(b"\0\n ") == b"carrel"
