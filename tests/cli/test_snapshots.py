from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_take_list_compare_restore_and_fork(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    try:
        carrel("exec", name, "echo one > f")
        first = json.loads(carrel("snapshot", "--json", name).stdout)
        carrel("exec", name, "echo two > f; touch g")
        said = carrel("snapshot", name).stdout.decode()
        assert "None" not in said
        second = said.split()[0]
        table = carrel("snapshots", name).stdout.decode().splitlines()
        assert table[0].split() == ["ID", "STATUS", "AGE", "FILES", "SIZE", "NEW"]
        assert [line.split()[0] for line in table[1:]] == [second, first["id"]]
        told = carrel("diff", name, first["id"], second).stdout.splitlines()
        assert [line for line in told if b".context.json" not in line] == [b"~ f", b"+ g"]  # upkeep writes that one
        assert carrel("restore", name, first["id"]).returncode == 0
        assert carrel("exec", name, "cat f").stdout == b"one\n"
        assert carrel("fork", name, f"{name}-2", "--snapshot", second, "--no-secrets").returncode == 0
        assert carrel("exec", f"{name}-2", "cat f").stdout == b"two\n"
        wrong = carrel("restore", name, "snap-absent")
        assert wrong.returncode == 1 and b"hint:" in wrong.stderr and b"Traceback" not in wrong.stderr
    finally:
        carrel("rm", "--yes", "--files", name, f"{name}-2")


def test_download(carrel: Carrel, data_dir: Path, tmp_path: Path) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    try:
        carrel("exec", name, "mkdir -p deep && echo one > deep/f && chmod 750 deep/f")
        made = json.loads(carrel("snapshot", "--json", name).stdout)["id"]
        target = tmp_path / "work.tar"
        done = carrel("download", name, made, "-o", str(target))
        assert done.returncode == 0 and done.stdout == b"" and done.stderr == f"wrote {target}\n".encode()
        piped = carrel("download", name, made, "-o", "-").stdout
        with tarfile.open(target) as archive, tarfile.open(fileobj=io.BytesIO(piped)) as same:
            member = next(each for each in archive.getmembers() if each.name.endswith("deep/f"))
            assert member.mode == 0o750
            assert archive.getnames() == same.getnames()
        wrong = carrel("download", name, "snap-absent", "-o", str(tmp_path / "never.tar"))
        assert wrong.returncode == 1 and b"hint:" in wrong.stderr
        assert os.listdir(tmp_path) == ["work.tar"], "a failed download leaves nothing"
        master, slave = pty.openpty()
        command = [sys.executable, "-m", "carrel", "download", name, made, "-o", "-"]
        screen = subprocess.run(command, stdout=slave, stderr=subprocess.PIPE, check=False)
        os.close(slave)
        os.close(master)
        assert screen.returncode == 2 and b"terminal" in screen.stderr
    finally:
        carrel("rm", "--yes", "--files", name)
