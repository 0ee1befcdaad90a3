"""The second try of tests that failed (`scripts/again.py`), on small suites of its own."""

from __future__ import annotations

import os
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
        UNSTEADY + "def test_bad(): assert False",
        "import pytest\n@pytest.fixture\ndef it():\n    yield\n    assert False\ndef test_leaks(it): pass",
        "import no_such_module",
    ],
    ids=["failure", "failure beside an unsteady one", "error of a fixture", "a file that cannot be read"],
)
def test_what_fails_twice_fails_the_run(tmp_path: Path, suite: str) -> None:
    code, said = tried(tmp_path, suite)
    assert code != 0 and "UNSTEADY" not in said


def test_many_failures_are_no_luck(tmp_path: Path) -> None:
    suite = "".join(UNSTEADY.replace("unsteady", f"{n}").replace('"ran"', f'"ran{n}"') for n in range(4))
    code, said = tried(tmp_path, suite)
    assert (code, said) == (1, "4 tests failed; at most 3 are tried again\n")
    assert not (tmp_path / "ran4").exists()


def test_a_run_that_broke_off_is_not_mended_by_a_second_try(tmp_path: Path) -> None:
    code, said = tried(tmp_path, "import os\ndef test_gone(): os._exit(3)")
    assert (code, said) == (3, "")
