from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.cli import main

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_sync_list_put_get_and_remove(carrel: Carrel, tmp_path: Path) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    local = tmp_path / "in.csv"
    local.write_bytes(b"1,2\n")
    try:
        assert carrel("filespace", "put", name, "data/in.csv", str(local)).returncode == 0
        made = json.loads(carrel("filespace", "put", name, "piped", "--json", stdin=b"hello").stdout)
        assert made["size"] == 5
        carrel("exec", name, "echo made > out")
        assert carrel("sync", name).stdout == b"pushed 1 files, 5B, deleted 0; pulled 2 files, 9B, deleted 0\n"
        assert carrel("exec", name, "cat data/in.csv").stdout == b"1,2\n"
        table = carrel("filespace", "ls", name).stdout.decode().splitlines()
        assert table[0].split() == ["MODE", "SIZE", "UPDATED", "PATH"]
        assert [line.split()[-1] for line in table[1:]] == ["data/in.csv", "out", "piped"]
        found = json.loads(carrel("filespace", "ls", name, "data/", "--json").stdout)
        assert [each["path"] for each in found] == ["data/in.csv"]
        assert carrel("filespace", "get", name, "out").stdout == b"made\n"
        assert carrel("filespace", "get", name, "out", str(tmp_path)).returncode == 0
        assert (tmp_path / "out").read_bytes() == b"made\n"
        (tmp_path / "link").symlink_to(tmp_path / "behind")
        assert carrel("filespace", "get", name, "out", str(tmp_path / "link")).returncode == 0
        assert (tmp_path / "link").is_symlink() and (tmp_path / "behind").read_bytes() == b"made\n"
        assert carrel("filespace", "rm", name, "piped").returncode == 0
        done = json.loads(carrel("sync", name, "--pull", "--json").stdout)
        assert (done["direction"], done["pull_deleted"]) == ("pull", 1)
        assert carrel("sync", name, "--push").stdout == b"pushed 0 files, 0B, deleted 0\n"
        for wrong in (("rm", name, "absent"), ("put", name, "x", str(tmp_path / "absent")), ("put", name, "../x")):
            failed = carrel("filespace", *wrong, stdin=b"")
            assert failed.returncode == 1 and b"error:" in failed.stderr and b"Traceback" not in failed.stderr
        assert carrel("sync", name, "--push", "--pull").returncode == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["behind", "in.csv", "link", "out"]
    finally:
        carrel("rm", "--yes", "--files", name)


def test_all_of_it_goes_only_when_it_is_meant(carrel: Carrel, data_dir: Path) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    environ = {**os.environ, "CARREL_DATA_DIR": str(data_dir)}

    def there() -> bool:
        return bool(json.loads(carrel("filespace", "ls", name, "--json").stdout))

    def at_terminal(answer: bytes) -> tuple[int, bytes]:
        master, slave = pty.openpty()
        try:
            os.write(master, answer)
            command = [sys.executable, "-m", "carrel", "filespace", "rm", name, "--all"]
            done = subprocess.run(command, stdin=slave, capture_output=True, env=environ, timeout=60, check=False)
            return done.returncode, done.stderr
        finally:
            os.close(slave)
            os.close(master)

    assert carrel("filespace", "put", name, "a", stdin=b"1").returncode == 0
    refused = carrel("filespace", "rm", name, "--all")
    assert refused.returncode == 2 and b"give --yes" in refused.stderr and there()
    status, asked = at_terminal(b"n\n")
    assert status == 1 and f"filespace of {name}, for good?".encode() in asked and there()
    assert at_terminal(b"y\n")[0] == 0 and not there()
    assert carrel("filespace", "put", name, "a", stdin=b"1").returncode == 0
    assert carrel("filespace", "rm", name, "--all", "--yes").returncode == 0 and not there()


@pytest.mark.parametrize("word", ["ls", "get", "put", "rm"])
def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str], word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["filespace", word, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count(f"carrel filespace {word}") >= 2
