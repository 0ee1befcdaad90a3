"""How a whole run judges its tests: one that fails is run once more; what workers leave behind fails the run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SUITE = re.findall(r"^SUITE := (.*)$", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)[0]
SUITE = SUITE.replace("$(WORKERS)", "2").replace("--hypothesis-profile=same", "")
UNSTEADY = """
from pathlib import Path
def test_unsteady():
    here = Path(__file__).with_name("ran")
    ran = here.exists()
    here.touch()
    assert ran
"""


def start(folder: Path, suite: str) -> subprocess.Popen[str]:
    """A run of a suite of one file."""
    (folder / "conftest.py").write_text(
        "from tests.support import leaks\n"
        "from tests.support.workers import pytest_configure, pytest_terminal_summary\n"
        "leaks.PATIENCE_S = 1.0\n"
    )
    (folder / "test_it.py").write_text(suite)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS.parent}\naddopts = --import-mode=importlib\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", "-p", "pytest_rerunfailures"]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no other plugin is needed, and they are slow
    command += SUITE.split()
    return subprocess.Popen(command, cwd=folder, env=bare, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, suite: str) -> tuple[int, str]:
    """The exit code of a run, and what it said."""
    with start(folder, suite) as process:
        said = process.communicate()[0]
    return process.returncode, said


def test_test_that_passes_second_time_is_named_and_the_run_passes(tmp_path: Path) -> None:
    code, said = run(tmp_path, UNSTEADY + "def test_good(): pass\n")
    assert code == 0 and "2 passed, 1 rerun" in said, said
    assert "assert ran" in said  # why it failed at first
    named = re.search(r"= UNSTEADY.*\n((?:test_it.*\n)+)", said)
    assert named is not None and named[1] == "test_it.py::test_unsteady\n", said


def test_failures_errors_leaks_and_deaths_of_workers_fail_the_run(tmp_path: Path) -> None:
    suite = """
import os, pytest
@pytest.fixture
def broken():
    yield
    assert False
@pytest.fixture(scope="session")
def kept():
    os.mkdir(os.environ["TMPDIR"] + "/kept")
def test_good(kept): pass
def test_bad(): assert False
def test_fixture(broken): pass
def test_leak(): os.mkdir(os.environ["TMPDIR"] + f"/left{os.times().elapsed}")
def test_gone(request):
    # The leader is told that the test may run twice, but not waited for; what is asked after that is answered after that.
    request.config.failures_db.get_test_failures(request.node.nodeid)
    os._exit(3)
"""
    code, said = run(tmp_path, UNSTEADY + suite)
    assert code == 1, said
    assert re.search(r"= 2 failed, .*2 errors, 5 rerun in", said), said
    assert re.search(r"left behind:\n +temporary left", said), said
    assert re.search(r"The whole session left behind:\n +temporary ", said), said
    named = re.search(r"= UNSTEADY.*\n((?:test_it.*\n)+)", said)
    assert named is not None and named[1] == "test_it.py::test_unsteady\n", said


def test_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    code, said = run(tmp_path, "import no_such_module")
    assert code != 0 and "no_such_module" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_tears_down(number: int, tmp_path: Path) -> None:
    """However long it takes: pytest-xdist alone kills a worker that needs more than a few seconds. Workers whose leader was
    killed do it at once.
    """
    suite = """
import os, pathlib, time, pytest
HERE = pathlib.Path(__file__).parent
@pytest.fixture(scope="session")
def server():
    yield
    os.rename(HERE / "up", HERE / "down")
def test_long(server):
    (HERE / "new").write_text(os.environ["TMPDIR"])
    os.rename(HERE / "new", HERE / "up")
    time.sleep(600)
def test_other(): pass
"""
    with start(tmp_path, suite) as process:
        try:
            until = time.monotonic() + 120
            while not (tmp_path / "up").exists():
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            process.send_signal(number)
            said = process.communicate(timeout=120)[0]  # also until the workers have ended
        finally:
            process.kill()
    directory = (tmp_path / "down").read_text()  # of its temporary files
    if number == signal.SIGTERM:
        assert process.returncode == 2, said
        assert not os.path.exists(directory)
    else:
        for left in Path(directory).parent.glob("ct-*"):  # nobody was left to remove them
            shutil.rmtree(left)
