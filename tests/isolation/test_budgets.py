"""Budgets of the kernel, held in children of their own: a namespace cannot be left again."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from tests.support.sandboxes import ROOT

from carrel.isolation import budgets, ids, linux, probe

namespaces = pytest.mark.skipif(probe.host().missing is not None, reason="this host cannot make namespaces")
USER = 12_345


def limit(name: str) -> int:
    return int(Path(f"/proc/sys/user/{name}").read_text())


def test_process_is_held_to_every_limit() -> None:
    def action() -> None:
        budgets.limit_process()
        for which, most in budgets.LIMITS.items():
            soft, hard = resource.getrlimit(which)
            assert soft == hard <= most, (which, soft, hard)

    reason = linux.attempt(action)
    assert reason is None, reason


@namespaces
def test_namespace_of_an_ordinary_user_gets_three_quarters_and_a_sandbox_an_eighth() -> None:
    def action() -> None:
        if ROOT:
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        instances = limit("max_inotify_instances")
        before = resource.getrlimit(resource.RLIMIT_SIGPENDING)
        budgets.enter_user_namespace(linux.CLONE_NEWUSER)
        assert limit("max_inotify_instances") == instances * 3 // 4
        assert resource.getrlimit(resource.RLIMIT_SIGPENDING) == before
        assert budgets.sandbox_notifications()["max_inotify_instances"] == max(8, instances * 3 // 4 // 6)
        budgets.hold_notifications({"max_inotify_instances": 1})
        assert limit("max_inotify_instances") == 1

    reason = linux.attempt(action)
    assert reason is None, reason


@namespaces
@pytest.mark.skipif(not ROOT, reason="only root can give a namespace another owner")
def test_namespace_belongs_to_the_owner_of_its_slot() -> None:
    def action() -> None:
        read, write = os.pipe()
        pid = linux.fork_owned(ids.owner(7), linux.CLONE_NEWUSER)
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        try:
            assert os.geteuid() == 0
            assert ids.owner(7) in map(int, Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[:4])
            linux.write_id_maps(f"/proc/{pid}", ids.maps(7, root=True, idmap=True))
        finally:
            os.close(write)
            os.waitpid(pid, 0)

    reason = linux.attempt(action)
    assert reason is None, reason
