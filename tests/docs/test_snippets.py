"""Every piece of code in README and docs runs, in the order of its page, against a real server.

The pages run one after the other on one server, and then once more in the reverse order: so each page is run on a server
that all the others have used, and twice by the same reader. They see what a reader has: a home, no variable of ours, and
the files of a clone, but what they write into the folder is not left in this one.
The first time a page has a fresh interpreter, as a reader has; the second time it is forked, which spares its imports.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.cli_process import CliServer
from tests.support.fork_server import start

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("tutorial/*.md")),
    *sorted((ROOT / "docs").glob("how-to/*.md")),
]
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_HERE = ("make ",)  # starts a server or a test run of its own
CONTEXTS = re.compile(r"""\.sandbox\(\s*"([^"]+)"|contexts=\["([^"]+)"\]|context_id="([^"]+)"|filespace\("([^"]+)"\)""")


@pytest.fixture(scope="module")
def reader(tmp_path_factory, carrel_forks):
    """The environment of somebody who reads the pages on the machine of a server that runs with its defaults."""
    home = tmp_path_factory.mktemp("home")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CARREL_", "XDG_"))}
    env |= {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    commands = CliServer(tmp_path_factory.mktemp("cli"), env)
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    )
    assert process.stdout is not None
    assert "listens on" in process.stdout.readline()
    programs = tmp_path_factory.mktemp("bin")
    (programs / "carrel").write_text(f'#!/bin/sh\nexec {shlex.join(commands.command())} "$@"\n')
    (programs / "carrel").chmod(0o755)
    yield env | {"PATH": f"{programs}:{env['PATH']}"}
    commands.close()
    process.terminate()
    process.stdout.close()
    assert process.wait(30) == 0


@pytest.fixture
def clone(tmp_path):
    """A folder with everything that a clone has."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for entry in ROOT.iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_page_runs(page, reader, clone):
    run_page(page, reader, clone, subprocess.Popen, "-W", "error")


@pytest.mark.parametrize("page", [*reversed(PAGES)], ids=lambda page: page.stem)
def test_code_on_page_runs_once_more(page, reader, clone):
    run_page(page, reader, clone, start)


def run_page(page, reader, clone, begin, *options):
    blocks = FENCE.findall(page.read_text())
    python = "\n".join(code for kind, code in blocks if kind == "python")
    # Shell between the Python of a page sees what that Python made: both run in the page's order.
    script = ["import warnings as _w\n_w.simplefilter('error')\n"]
    for kind, code in blocks:
        if kind == "python":
            script.append(code)
        elif not code.startswith(NOT_HERE):
            line = code.replace(".venv/bin/carrel", "carrel")
            script.append(
                f"import subprocess as _s\n_r = _s.run({line!r}, shell=True, capture_output=True, text=True)\n"
            )
            script.append("assert 'error:' not in _r.stderr and 'Traceback' not in _r.stderr, _r.stderr\n")
    if len(script) == 1:
        return
    said = clone.parent / "said"
    with said.open("wb") as errors, open(os.devnull, "wb") as nowhere:
        run = begin(
            [sys.executable, *options, "-c", "\n".join(script)],
            env=reader, cwd=str(clone), stdout=nowhere, stderr=errors, start_new_session=True,
        )  # fmt: skip
    try:
        assert run.wait(200) == 0, said.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # also what a page that failed had started
        run.wait()
    assert not python or "Traceback" not in said.read_text()


def test_each_page_uses_one_context_of_its_own():
    page_of: dict[str, str] = {}
    for page in PAGES:
        names = {"".join(names) for names in CONTEXTS.findall(page.read_text())}
        assert len(names) <= 1, f"{page.name} has more than one name for its example: {names}"
        for name in names:
            assert page_of.setdefault(name, page.stem) == page.stem, f"two pages use {name}"
    assert len(page_of) > 8, "the pattern does not find the contexts any more"
