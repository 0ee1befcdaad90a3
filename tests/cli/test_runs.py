"""`diff`, `undo` and `log` in a folder that an agent worked on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carrel.client import Client

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def project() -> Iterator[Path]:
    path = Path(os.path.realpath(tempfile.mkdtemp(prefix="carrel-p-")))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def client(data_dir: Path) -> Iterator[Client]:
    url = json.loads((data_dir / "server.json").read_text())["url"]
    with Client(url, (data_dir / "token").read_text().strip()) as client:
        if not any(each.name == "namespace" and each.available for each in client.host().providers):
            pytest.skip("folders need namespaces")
        yield client


def test_changes_of_the_last_run_are_shown_and_undone(carrel: Carrel, client: Client, project: Path) -> None:
    name = f"here-{uuid.uuid4().hex[:8]}"
    nothing = carrel("diff", cwd=project)
    assert nothing.returncode == 1 and b"no agent has worked on" in nothing.stderr and b"hint:" in nothing.stderr
    (project / "sub").mkdir()
    (project / "sub/text").write_text("one\ntwo\n")
    (project / "node_modules").mkdir()
    box = client.sandbox(name, workspace_path=project)
    try:
        box.commands.run("echo 2 > sub/text; echo '\x1b[31m' > new; chmod 700 sub")
        box.stop()
        told = carrel("diff", cwd=project / "sub")
        lines = [line.split() for line in told.stdout.decode().splitlines()]
        assert lines == [
            ["PATH", "BEFORE", "AFTER"],
            ["+", "new", "-", "6B", "644"],
            ["~", "sub", "directory", "755", "directory", "700"],
            ["~", "sub/text", "8B", "2B"],
        ]
        assert b"1 added, 0 removed, 2 changed" in told.stderr and b"node_modules" in told.stderr
        patch = carrel("diff", "--patch", cwd=project).stdout.decode()
        assert "-one\n-two\n+2\n" in patch and "\x1b" not in patch
        assert "new" not in carrel("diff", "--patch", "--path", "text", cwd=project / "sub").stdout.decode()
        assert json.loads(carrel("diff", "--json", cwd=project).stdout)["changed"] == 2
        row = carrel("log", cwd=project).stdout.decode().splitlines()[1].split()
        assert row[1] == name and row[4:8] == ["+1", "-0", "~2", "1"]
        said = carrel("undo", cwd=project, stdin=b"n\n")
        assert said.returncode == 130 and b"remove new" in said.stdout and (project / "new").exists()
        assert carrel("undo", "--dry-run", cwd=project).returncode == 0 and (project / "new").exists()
        some = carrel("undo", "--yes", "--path", "text", cwd=project / "sub")
        assert (
            some.returncode == 0 and (project / "sub/text").read_text() == "one\ntwo\n" and (project / "new").exists()
        )
        (project / "new").write_text("mine")
        rest = json.loads(carrel("undo", "--json", cwd=project).stdout)
        assert rest["left"] == [{"path": "new", "reason": "changed after the run ended"}]
        assert (project / "sub").stat().st_mode & 0o777 == 0o755 and (project / "new").read_text() == "mine"
        runs = json.loads(carrel("log", "--json", cwd=project).stdout)
        assert [each["what"] for each in runs] == ["undo", "undo", name]
        assert carrel("undo", "--yes", runs[1]["id"], cwd=project).returncode == 0
        assert (project / "sub/text").read_text() == "2\n"
        wrong = carrel("undo", "--yes", "--path", "/etc/passwd", cwd=project)
        assert wrong.returncode == 2 and b"is not in" in wrong.stderr
        assert carrel("diff", name, "snap-1", cwd=project).returncode == 2
    finally:
        client.forget(name)
