"""The second try of tests that failed (`scripts/again.py`), on small suites of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

AGAIN = Path(__file__).parents[1] / "scripts" / "again.py"
UNSTEADY = """
from pathlib import Path
def test_unsteady():
    here = Path(__file__).with_name("ran")
    ran = here.exists()
    here.touch()
    assert ran
"""


def tried(folder: Path, suite: str) -> tuple[int, str]:
    """A suite run as `scripts/test` does, and what the second try made of it."""
    (folder / "test_it.py").write_text(suite)
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # none of the plugins is needed, and they are slow
    pytest_of = [sys.executable, "-m", "pytest", "-q", "-o", "cache_dir=kept"]
    first = subprocess.run(pytest_of, cwd=folder, env=bare, capture_output=True, check=False).returncode
    second = subprocess.run(
        [sys.executable, str(AGAIN), f"{first}:kept", "0:nothing"],
        cwd=folder, env=bare, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return second.returncode, second.stdout


def test_nothing_is_tried_again_when_all_passed(tmp_path: Path) -> None:
    assert tried(tmp_path, "def test_good(): pass") == (0, "")


def test_a_test_that_passes_alone_is_named_as_unsteady(tmp_path: Path) -> None:
    code, said = tried(tmp_path, UNSTEADY + "def test_good(): pass")
    assert code == 0
    assert said.endswith("to be mended:\n  test_it.py::test_unsteady\n") and "test_good" not in said


@pytest.mark.parametrize(
    "suite",
    [
        "def test_bad(): assert False",
        "import pytest\n@pytest.fixture\ndef it():\n    yield\n    assert False\ndef test_leaks(it): pass",
        "import no_such_module",
    ],
    ids=["failure", "error of a fixture", "a file that cannot be read"],
)
def test_what_fails_twice_fails_the_run(tmp_path: Path, suite: str) -> None:
    code, said = tried(tmp_path, suite)
    assert code != 0 and "UNSTEADY" not in said


def test_each_of_many_failures_is_tried_alone_and_named(tmp_path: Path) -> None:
    suite = "".join(UNSTEADY.replace("unsteady", f"{n}").replace('"ran"', f'"ran{n}"') for n in range(5))
    code, said = tried(tmp_path, suite + "def test_bad(): assert False")
    assert code == 1
    unsteady, bad = said.partition("UNSTEADY")[2].split("FAILED in the run and alone:\n")
    assert re.findall(r"test_it\.py::(\w+)", unsteady) == [f"test_{n}" for n in range(5)]
    assert bad == "  test_it.py::test_bad\n"


def test_a_test_that_fails_only_after_another_passes_alone(tmp_path: Path) -> None:
    """Two that failed are not company for one another."""
    suite = "done = []\ndef test_a(): done.append(1); assert len(done) == 2\ndef test_b(): assert not done\n"
    code, said = tried(tmp_path, suite)
    assert code == 1
    assert said.endswith("to be mended:\n  test_it.py::test_b\nFAILED in the run and alone:\n  test_it.py::test_a\n")


def test_a_run_that_broke_off_is_not_mended_by_a_second_try(tmp_path: Path) -> None:
    code, said = tried(tmp_path, "import os\ndef test_gone(): os._exit(3)")
    assert (code, said) == (3, "")
