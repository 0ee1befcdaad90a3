"""Forks of the test run itself."""

from __future__ import annotations

import threading

from tests.support.children import in_child


def test_a_fork_beside_a_thread_is_no_failure() -> None:
    """Python 3.12 warns of every fork of a process with threads, and some test before may have left one."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert in_child(lambda: 6 * 7) == 42
    finally:
        done.set()
        thread.join()
