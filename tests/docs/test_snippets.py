"""Every piece of code in README and docs runs, in the order of its page, against a real server."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("tutorial/*.md")),
    *sorted((ROOT / "docs").glob("how-to/*.md")),
]
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_HERE = ("make ",)  # starts a server or a test run of its own


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    data = tmp_path_factory.mktemp("d")
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", "serve", "--port", "0", "--data-dir", str(data)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert "listens on" in process.stdout.readline()
    yield {**os.environ, "CARREL_DATA_DIR": str(data), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process.terminate()
    process.stdout.close()
    assert process.wait(30) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_page_runs(page, server, tmp_path):
    # Pages name the same context, and one that was deleted keeps its policy: to each its own, whatever ran before.
    blocks = FENCE.findall(page.read_text().replace("report-7", f"report-7-{page.stem}"))
    python = "\n".join(code for kind, code in blocks if kind == "python")
    # Shell between the Python of a page sees what that Python made: both run in the page's order.
    script = []
    for kind, code in blocks:
        if kind == "python":
            script.append(code)
        elif not code.startswith(NOT_HERE):
            line = code.replace(".venv/bin/carrel", "carrel")
            script.append(
                f"import subprocess as _s\n_r = _s.run({line!r}, shell=True, capture_output=True, text=True)\n"
            )
            script.append("assert 'error:' not in _r.stderr and 'Traceback' not in _r.stderr, _r.stderr\n")
    if not script:
        return
    said = tmp_path / "said"
    with said.open("wb") as errors:
        run = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", "\n".join(script)],
            env=server, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
    try:
        assert run.wait(200) == 0, said.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # also what a page that failed had started
        run.wait()
    assert not python or "Traceback" not in said.read_text()


def test_pages_link_to_what_exists():
    for page in [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
