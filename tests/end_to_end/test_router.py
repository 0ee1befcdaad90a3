"""Calls without a context as a caller has them: the same sandbox again, as new; also as an ordinary user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.egress_ground import Carrel, Outside, until

LEAVE = """
import ctypes, os, subprocess
for place in ('/workspace', '/workspace/data', '/tmp', '/dev/shm', os.path.expanduser('~')):
    os.makedirs(place + '/left/deep', exist_ok=True)
    open(place + '/left/file', 'w').write('secret')
    os.chmod(place + '/left', 0)
subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=subprocess.DEVNULL)
ctypes.CDLL(None).shmget(7, 4096, 0o1600)
"""
LOOK = """
import os
found = [len(open('/proc/sysvipc/shm').readlines())]
for top in ('/workspace', '/tmp', '/dev/shm', os.path.expanduser('~')):
    found += sorted(os.path.join(place, name) for place, dirs, files in os.walk(top) for name in dirs + files)
for pid in filter(str.isdigit, os.listdir('/proc')):
    try: found += [line for line in [open(f'/proc/{pid}/cmdline').read()] if line.startswith('sleep')]
    except OSError: pass
print(found)
"""


@contextmanager
def server(*, user: bool = False, **settings: str) -> Iterator[Carrel]:
    outside = Outside()
    try:
        carrel = Carrel(outside, user=user, **settings)
        try:
            carrel.start()
            yield carrel
        finally:
            carrel.close()
    finally:
        outside.close()


@pytest.mark.parametrize("user", [False, True], ids=["root", "ordinary user"])
def test_nothing_stays(user: bool, tmp_path: Path) -> None:
    with server(user=user, CARREL_ROUTER_SPARES="0") as carrel:
        python = carrel.client.python

        def used() -> list[str]:
            return [each.id for each in carrel.client.sandboxes()]

        new = python.run(LOOK).output
        first = used()
        large = tmp_path / "large"
        large.write_bytes(os.urandom(1 << 20))
        for _ in range(3):
            done = python.run(LEAVE, files={"given": large}, into=tmp_path / "got")
            assert done.exit_code == 0, done
            assert python.run(LOOK).output == new
        until(lambda: set(used()) >= set(first), "the sandbox that was used first")
        assert len(used()) <= 2, "the same sandboxes, as new"
