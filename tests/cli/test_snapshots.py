from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_take_list_compare_restore_and_fork(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    try:
        carrel("exec", name, "echo one > f")
        first = json.loads(carrel("snapshot", "--json", name).stdout)
        carrel("exec", name, "echo two > f; touch g")
        second = carrel("snapshot", name).stdout.split()[0].decode()
        table = carrel("snapshots", name).stdout.decode().splitlines()
        assert table[0].split() == ["ID", "STATUS", "AGE", "FILES", "SIZE", "NEW"]
        assert [line.split()[0] for line in table[1:]] == [second, first["id"]]
        assert carrel("diff", name, first["id"], second).stdout == b"~ f\n+ g\n"
        assert carrel("restore", name, first["id"]).returncode == 0
        assert carrel("exec", name, "cat f").stdout == b"one\n"
        assert carrel("fork", name, f"{name}-2", "--snapshot", second).returncode == 0
        assert carrel("exec", f"{name}-2", "cat f").stdout == b"two\n"
        wrong = carrel("restore", name, "snap-absent")
        assert wrong.returncode == 1 and b"hint:" in wrong.stderr and b"Traceback" not in wrong.stderr
    finally:
        carrel("rm", "--yes", "--files", name, f"{name}-2")
