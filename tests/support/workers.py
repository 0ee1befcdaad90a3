"""A run of tests: its temporary files, its watch over what is left behind, its workers (pytest-xdist), its summary."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest
from tests.support.children import end_with_parent
from tests.support.leaks import LEFT, Leaks, Watch, complaint, make_directory, remove_directory

PATIENCE_S = 60.0
DIRECTORY = "directory"  # under this name a worker is told where its temporary files go
_stopped = False


def pytest_configure(config: pytest.Config) -> None:
    """A run in one process watches itself. With workers, each watches itself, and the leading process the rest."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    directory = worker[DIRECTORY] if worker else make_directory()
    stop = _stop_once if worker else signal.default_int_handler
    signal.signal(signal.SIGTERM, stop)  # a run that is told to end still tears down
    signal.signal(signal.SIGINT, stop)  # a run in the background ignores it, and so would children
    if worker:
        end_with_parent()  # also with a leader that was killed
    if worker or config.option.basetemp is None:
        config.option.basetemp = f"{directory}/t"
    # Plugins, because hooks of a conftest are not called for fixtures of the whole session.
    config.pluginmanager.register(Watch(Leaks(directory)))
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(Workers())
    else:
        os.environ["TMPDIR"] = tempfile.tempdir = directory
    if not worker:
        config.add_cleanup(lambda: remove_directory(directory))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that failed and then passed, and say where kills landed."""
    found = terminalreporter.stats
    again = {report.nodeid for report in found.get("rerun", ())}
    if unsteady := again - {report.nodeid for kind in ("failed", "error") for report in found.get(kind, ())}:
        terminalreporter.section("UNSTEADY: failed once, then passed; to be mended", yellow=True)
        for name in sorted(unsteady):
            terminalreporter.write_line(name)
    reports = {report.nodeid: report for kind in ("passed", "failed") for report in found.get(kind, ())}
    kills = [value for report in reports.values() for name, value in report.user_properties if name == "kills"]
    if kills:
        from tests.support.kill_load import Tally

        terminalreporter.write_line(str(Tally.sum(kills)))
    for report in reports.values():
        for name, value in report.user_properties:
            if name == "history":
                terminalreporter.write_line(str(value))


def _stop_once(_number: int, _frame: FrameType | None) -> None:
    """Signal handler of a worker: several may tell it to end, and its teardown must not be interrupted."""
    global _stopped
    if not _stopped:
        _stopped = True
        raise KeyboardInterrupt


class Workers:
    """The plugin of the leading process: workers get directories and time to tear down; what they left behind is told."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []

    def pytest_configure_node(self, node: Any) -> None:
        """A worker starts."""
        self._nodes.append(node)
        node.workerinput[DIRECTORY] = make_directory()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """The run ends, perhaps because somebody interrupted it."""
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            self._stop()
        yield
        for node in self._nodes:
            remove_directory(node.workerinput[DIRECTORY])
        if found := [line for node in self._nodes for line in _output(node).get(LEFT, ())]:
            print("\nThe whole session " + complaint(found), file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _stop(self) -> None:
        """Tell the workers to end, and wait: pytest-xdist kills them after a few seconds, with all they have running."""
        pids = {node: node.gateway._rinfo().pid for node in self._nodes if not _output(node)}
        for pid in pids.values():
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and not all(_output(node) or _gone(pid) for node, pid in pids.items()):
            time.sleep(0.05)


def _output(node: Any) -> dict[str, Any]:
    """What a worker handed back when its session had ended."""
    return getattr(node, "workeroutput", {})


def _gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
