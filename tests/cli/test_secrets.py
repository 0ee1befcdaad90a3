from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_a_secret_comes_from_a_file_or_from_stdin(carrel: Carrel, tmp_path: Path) -> None:
    context = f"sec-{uuid.uuid4().hex}"
    done = carrel("secret", "set", context, "KEY", stdin=b"open-sesame\n")
    assert done.returncode == 0 and b"version 1" in done.stderr
    (tmp_path / "value").write_bytes(b"open-sesame-2\n")
    assert carrel("secret", "set", context, "KEY", str(tmp_path / "value")).returncode == 0
    assert b"KEY" in carrel("secret", "ls", context).stdout
    [listed] = json.loads(carrel("secret", "ls", context, "--json").stdout)
    assert (listed["name"], listed["version"]) == ("KEY", 2)
    assert carrel("secret", "set", context, "KEY", str(tmp_path / "absent")).returncode != 0
    assert carrel("secret", "rm", context, "KEY").returncode == 0
    assert carrel("secret", "rm", context, "KEY").returncode != 0
