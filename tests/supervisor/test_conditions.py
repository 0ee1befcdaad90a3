from __future__ import annotations

import os
import resource
import subprocess

import pytest

from carrel.supervisor.conditions import conditions


@pytest.mark.parametrize(
    "change",
    [
        lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, 1000)),
        lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda pid: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
        lambda pid: subprocess.run(["/usr/bin/ionice", "-c", "3", "-p", str(pid)], check=True),
    ],
)
def test_what_is_changed_of_another_process_is_seen(change: object) -> None:
    assert callable(change)
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    try:
        assert conditions(child.pid) == conditions()
        change(child.pid)
        assert conditions(child.pid) not in {conditions(), None}
    finally:
        child.communicate()
    assert conditions(child.pid) is None
