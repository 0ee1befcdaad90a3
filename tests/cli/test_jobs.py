from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_a_job_from_its_submission_to_its_end(carrel: Carrel) -> None:
    name = f"j{uuid.uuid4().hex[:8]}"
    job = carrel(
        "job", "run", "-c", name, "--label", "a=b", "--", "printf '\\033[31m'; echo out; exit 3"
    ).stdout.decode()
    job = job.strip()
    ended = carrel("job", "wait", job)
    assert ended.returncode == 3 and b"failed: exit code 3" in ended.stdout
    shown = carrel("job", "logs", "-f", job).stdout
    assert shown == b"\x1b[31mout\n"
    table = carrel("job", "ls", name).stdout.decode()
    assert job in table and "failed" in table and "\033" not in table
    facts = json.loads(carrel("job", "show", job, "--json").stdout)
    assert facts["exit_code"] == 3 and facts["labels"] == {"a": "b"}
    events = [json.loads(line)["kind"] for line in carrel("events", "--job", job, "--json").stdout.splitlines()]
    assert events == ["job.queued", "job.started", "job.ended"]
    text = carrel("job", "show", job).stdout.decode()
    assert "state:" in text and "failed" in text
    again = json.loads(carrel("job", "retry", job, "--json").stdout)
    assert again["retry_of"] == job
    assert carrel("job", "wait", again["id"]).returncode == 3
    assert [each["id"] for each in json.loads(carrel("job", "ls", name, "--json").stdout)] == [again["id"], job]


def test_run_with_wait_is_like_the_command_itself(carrel: Carrel, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("from here\n")
    done = carrel(
        "job", "run", "--wait", "--remove", "--file", f"in.txt={tmp_path}/in.txt", "-e", "A=b", "--",
        "cat in.txt; echo $A; exit 7",
    )  # fmt: skip
    assert done.returncode == 7 and done.stdout == b"from here\nb\n"
    signaled = carrel("job", "run", "--wait", "--remove", "--", "kill -TERM $$")
    assert signaled.returncode == 143
    late = carrel("job", "run", "--wait", "--remove", "--timeout", "0.3", "--", "sleep", "60")
    assert late.returncode == 124 and b"run_s" in late.stderr


def test_cancel_waits_for_the_end(carrel: Carrel) -> None:
    name = f"j{uuid.uuid4().hex[:8]}"
    job = carrel("job", "run", "-c", name, "--", "sleep", "60").stdout.decode().strip()
    assert carrel("job", "wait", job, "--timeout", "0.1").returncode == 124
    assert carrel("job", "cancel", job).stdout.strip() == b"cancelled"
    assert carrel("job", "wait", job).returncode == 143


def test_mistakes_are_explained(carrel: Carrel) -> None:
    missing = carrel("job", "show", "job-00000000000000000000")
    assert missing.returncode == 1 and b"there is no job" in missing.stderr
    outside = carrel("job", "run", "--artifact", "../x", "--", "true")
    assert outside.returncode == 1 and b"leaves the workspace" in outside.stderr
    unread = carrel("job", "run", "--file", "/nonexistent", "--", "true")
    assert unread.returncode == 1 and b"cannot be read" in unread.stderr
    assert b"Traceback" not in missing.stderr + outside.stderr + unread.stderr
