from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
from tests.support.audit_routes import Auditing, auditing

from carrel.audit import AuditEntry, AuditLog, Ending, chain_of
from carrel.cli.audit import _moment

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


async def fill(log: AuditLog) -> None:
    for number in range(30):
        entry = AuditEntry(
            chain_of("c1"), "agent:a", "shell", "run_command", arguments={"command": f"echo {number}\x1b[31m"}
        )
        (await log.begin(entry)).end(Ending("ok", 1.5))
    log.record(
        AuditEntry(chain_of("c2"), "agent:b", "file", "read", "deny", arguments={"path": "/x"}),
        Ending("denied_by_policy"),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Auditing]:
    with auditing(tmp_path) as server:
        server.do(fill)
        yield server


@pytest.fixture
def carrel(alone: Carrel, server: Auditing) -> Carrel:
    def run(*words: str, **settings: object) -> subprocess.CompletedProcess[bytes]:
        return alone("audit", *words, env={"CARREL_URL": server.url, "CARREL_TOKEN": "carrel_x"}, **settings)

    return run


def test_tail_and_search(carrel: Carrel) -> None:
    shown = carrel("tail", "-n", "3")
    lines = shown.stdout.decode().splitlines()
    assert shown.returncode == 0 and len(lines) == 4 and lines[0].startswith("TIME")
    assert "denied_by_policy" in lines[3] and "/x" in lines[3] and "echo 29" in lines[2]
    assert b"\x1b[31m" not in shown.stdout
    found = json.loads(carrel("search", "ECHO 7", "--context", "c1", "--json").stdout)
    assert [each["arguments"] for each in found] == [{"command": "echo 7\x1b[31m"}]
    assert len(json.loads(carrel("search", "--actor", "agent:a", "--limit", "7", "--json").stdout)) == 7
    denied = json.loads(carrel("search", "--decision", "deny", "--since", "1h", "--json").stdout)
    assert [each["context_id"] for each in denied] == ["c2"]
    assert carrel("search", "--since", "1h", "--until", "2h").stdout == b""
    for option, known in (("--kind", b"'network'"), ("--decision", b"'deny'")):
        wrong = carrel("search", option, "nonsense")
        assert wrong.returncode == 2 and known in wrong.stderr
    assert len(json.loads(carrel("search", "--kind", "file", "--json").stdout)) == 1
    wrong = carrel("search", "--since", "yesterday")
    assert wrong.returncode == 2 and b"not a time such as" in wrong.stderr


def test_following(server: Auditing, tmp_path: Path) -> None:
    environ = {**os.environ, "CARREL_URL": server.url, "CARREL_TOKEN": "carrel_x", "CARREL_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "carrel", "audit", "tail", "-f", "-n", "1", "--json"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["name"] == "read"
        tickets = []

        async def begin(log: AuditLog) -> None:
            tickets.append(await log.begin(AuditEntry(chain_of("c3"), "agent:a", "shell", "slow")))

        async def end(log: AuditLog) -> None:
            tickets[0].end()

        for work, result in ((begin, None), (end, "ok")):
            server.do(work)
            line = json.loads(process.stdout.readline())
            assert (line["name"], line["result"]) == ("slow", result)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        process.stdout.close()


def test_export_and_verify_without_a_server(carrel: Carrel, alone: Carrel, server: Auditing, tmp_path: Path) -> None:
    plain, packed = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.zst"
    for path in (plain, packed):
        assert carrel("export", "-o", str(path)).returncode == 0
    assert packed.stat().st_size * 2 < plain.stat().st_size
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "behind")
    assert carrel("export", "-o", str(link)).returncode == 0
    assert link.is_symlink() and link.stat().st_size > 1000
    key = carrel("key").stdout.decode().strip()
    for path in (plain, packed):
        checked = alone("audit", "verify", str(path), "--key", key.upper())
        assert checked.returncode == 0 and checked.stdout.startswith(b"ok: 61 records in 2 chains, 2 signed heads")
        assert checked.stderr == b""
    assert key.encode() in alone("audit", "verify", str(plain)).stderr, "whose key it is has to be compared"
    piped = carrel("export", "--context", "c2", "-o", "-").stdout
    told = json.loads(alone("audit", "verify", "-", "--json", stdin=piped).stdout)
    assert told["ok"] and told["records"] == 1 and told["keys"] == [key] and told["broken"] is None

    server.do(fill)
    later = tmp_path / "later.jsonl"
    carrel("export", "-o", str(later))
    assert alone("audit", "verify", str(later), "--earlier", str(packed)).returncode == 0
    back = alone("audit", "verify", str(plain), "--earlier", str(later))
    assert back.returncode == 1 and b"were removed" in back.stderr

    lines = plain.read_bytes().splitlines(keepends=True)
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b"".join([*lines[:5], lines[5].replace(b"agent:a", b"agent:b"), *lines[6:]]))
    found = alone("audit", "verify", str(broken))
    assert found.returncode == 1 and found.stdout == b"" and b"context:c1, record 4 (line 6)" in found.stderr
    told = json.loads(alone("audit", "verify", str(broken), "--json").stdout)
    assert not told["ok"] and (told["broken"]["chain"], told["broken"]["seq"]) == ("context:c1", 4)
    assert alone("audit", "verify", str(plain), "--earlier", str(broken)).returncode == 1
    other = alone("audit", "verify", str(plain), "--key", "00" * 32)
    assert other.returncode == 1 and b"not trusted" in other.stderr


def test_failures_in_words(alone: Carrel, carrel: Carrel, tmp_path: Path) -> None:
    for words in (("verify", str(tmp_path / "absent")), ("verify", str(tmp_path)), ("verify", "-", "--key", "hush")):
        failed = alone("audit", *words)
        assert failed.returncode == 1 and failed.stderr.startswith(b"error: ") and b"Traceback" not in failed.stderr
    failed = carrel("export", "-o", str(tmp_path / "absent" / "x"))
    assert failed.returncode == 1 and b"cannot write" in failed.stderr
    assert alone("audit", "tail").returncode == 1
    json_key = json.loads(carrel("key", "--json").stdout)
    assert json_key["node"] == "n"


def test_moments() -> None:
    assert _moment(None, "--since") is None
    assert _moment("2030-01-31T12:00+00:00", "--since") == datetime(2030, 1, 31, 12, tzinfo=UTC)
    ago = _moment("2d", "--since")
    assert ago is not None and 172_000 < (datetime.now(UTC) - ago).total_seconds() < 174_000
    for wrong in ("", "2w", "-1h", "tomorrow"):
        with pytest.raises(typer.BadParameter):
            _moment(wrong, "--since")


def test_prune(carrel: Carrel) -> None:
    assert json.loads(carrel("prune", "--json").stdout)["records"] == 61
    done = carrel("prune")
    assert done.returncode == 0 and b"removed" in done.stderr
