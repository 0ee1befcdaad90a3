from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_code_from_everywhere(carrel: Carrel, tmp_path: Path) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    file = tmp_path / "code.py"
    file.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    done = carrel("python", name, str(file), "--", "a", "--b")
    assert (done.stdout, done.returncode) == (b"['a', '--b']\n", 3)
    assert carrel("python", name, stdin=b"print(5)").stdout == b"5\n"
    failed = carrel("python", name, "-c", "1 / 0")
    assert failed.returncode == 1 and b'File "<code>", line 1' in failed.stderr
    assert carrel("python", "--timeout", "0.2", "-c", "import time; time.sleep(9)", name).returncode == 124
    assert carrel("python", name, str(tmp_path / "none")).returncode != 0
    assert carrel("python", "--cell", "x", "-c", "v = 41", name).returncode == 0
    shown = carrel("python", "--cell", "x", "-c", "print('p'); v + 1", name)
    assert (shown.stdout, shown.returncode) == (b"p\n42\n", 0)
    assert b"NameError" in carrel("python", "--cell", "y", "-c", "v", name).stderr
    assert b"its variables are gone" in carrel("python", "--cell", "x", "-c", "import os; os._exit(1)", name).stderr
    carrel("rm", "--yes", name)


def test_ctrl_c_ends_the_code_too(carrel: Carrel, data_dir: Path) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    code = "import time; print('started', flush=True); time.sleep(100)"
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", "python", name, "-c", code],
        env={**os.environ, "CARREL_DATA_DIR": str(data_dir)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"started\n"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        process.stdout.close()
    [command] = json.loads(carrel("ps", name, "--json").stdout)
    assert not command["running"]
    carrel("rm", "--yes", "--files", name)


def test_without_a_context(carrel: Carrel) -> None:
    done = carrel("python", "-c", "import sys; print(6 * 7); sys.exit(3)")
    assert (done.stdout, done.returncode) == (b"42\n", 3)
    assert b"ZeroDivisionError" in carrel("python", "-c", "1 / 0").stderr
    assert carrel("python", "--timeout", "0.2", "-c", "while True: pass").returncode == 124
    assert b"name a file or a context" in carrel("python").stderr
    assert b"need a context" in carrel("python", "--wait", "1", "-c", "1").stderr
    assert b"need a context" in carrel("python", "--cell", "x", "-c", "1").stderr


def test_a_file_runs_in_a_fresh_sandbox(carrel: Carrel, alone: Carrel, tmp_path: Path) -> None:
    file = tmp_path / "report.py"
    file.write_text("import os, sys\nprint(sys.argv[1:], os.environ.get('A'), sys.stdin.read())\nsys.exit(4)\n")
    before = {each["id"] for each in json.loads(carrel("ps", "--json").stdout)}
    done = carrel("python", "-e", "A=b", str(file), "2026", "--", "--all", stdin=b"typed")
    assert (done.stdout, done.returncode) == (b"['2026', '--all'] b typed\n", 4)
    assert {each["id"] for each in json.loads(carrel("ps", "--json").stdout)} <= before, "nothing is left"
    assert alone("python", str(file)).stdout == b"[] None \n", "no server is needed"
    assert carrel("python", "-", stdin=b"print(7)").stdout == b"7\n"
    missing = carrel("python", "./missing.py")
    assert missing.returncode == 1 and b"cannot read ./missing.py: No such file" in missing.stderr
    assert b"need a context" in carrel("python", "--cell", "x", "-c", "1").stderr
