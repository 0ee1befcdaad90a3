from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_ps_and_rm(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    assert carrel("exec", name, "true").returncode == 0
    listed = {each["context_id"]: each for each in json.loads(carrel("ps", "--json").stdout)}
    assert listed[name]["state"] == "running"
    assert listed[name]["commands"] == 0
    table = carrel("ps").stdout.decode().splitlines()
    columns = ["CONTEXT", "ID", "STATE", "PROVIDER", "NETWORK", "AGE", "COMMANDS", "CPU", "MEMORY", "PEAK"]
    assert table[0].split() == columns
    line = next(each for each in table if name in each)
    assert listed[name]["id"] in line
    refused = carrel("rm", name)
    assert refused.returncode == 2
    assert b"--yes" in refused.stderr
    removed = carrel("rm", "--yes", "--json", name, "absent-context")
    assert removed.returncode == 1
    assert b"absent-context" in removed.stderr
    assert [each["state"] for each in json.loads(removed.stdout)] == ["terminated"]
    assert name not in carrel("ps").stdout.decode()
    ended = {each["context_id"]: each["state"] for each in json.loads(carrel("ps", "--all", "--json").stdout)}
    assert ended[name] == "terminated"


def test_the_files_of_what_was_terminated_before_can_be_removed(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    carrel("exec", name, "echo kept > f")
    assert carrel("rm", "--yes", name).returncode == 0
    again = carrel("rm", "--yes", name)
    assert again.returncode == 1 and b"no sandbox named" in again.stderr
    removed = carrel("rm", "--yes", "--files", name)
    assert removed.returncode == 0, removed.stderr
    try:
        assert carrel("exec", name, "ls f").returncode == 2
    finally:
        carrel("rm", "--yes", "--files", name)


def test_rm_wants_names_or_all(carrel: Carrel) -> None:
    assert carrel("rm").returncode == 2
    assert carrel("rm", "x", "--all", "--yes").returncode == 2


def test_an_unsafe_sandbox_is_labelled(carrel: Carrel) -> None:
    done = carrel("run", "--keep", "--provider", "process", "--trust", "high", "true")
    kept = done.stderr.split(b"kept as ")[1].split(b";")[0].decode()
    try:
        line = next(each for each in carrel("ps").stdout.decode().splitlines() if kept in each)
        assert "process UNSAFE" in line
    finally:
        carrel("rm", "-y", kept)


def test_stop_keeps_the_files(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    try:
        carrel("exec", name, "echo kept > f")
        stopped = carrel("stop", "--json", name, "absent-context")
        assert stopped.returncode == 1
        assert b"absent-context" in stopped.stderr
        assert [each["state"] for each in json.loads(stopped.stdout)] == ["stopped"]
        assert carrel("exec", name, "cat f").stdout == b"kept\n"
    finally:
        carrel("rm", "--yes", "--files", name)


def test_resume_starts_it_again(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    try:
        carrel("exec", name, "echo kept > f")
        assert carrel("stop", name).returncode == 0
        table = carrel("resume", name).stdout.decode().splitlines()
        assert table[0].split()[0] == "CONTEXT" and table[1].split()[0] == name and table[1].split()[2] == "running"
        again = json.loads(carrel("resume", "--json", name).stdout)
        assert again["state"] == "running" and again["id"] == table[1].split()[1], "one that runs is left as it is"
        assert carrel("exec", name, "cat f").stdout == b"kept\n"
        absent = carrel("resume", "absent-context")
        assert absent.returncode == 1 and b"hint:" in absent.stderr
    finally:
        carrel("rm", "--yes", "--files", name)


def test_usage(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    try:
        carrel("exec", name, "head -c 3000000 /dev/urandom > f; sync")
        table = carrel("usage").stdout.decode().splitlines()
        assert table[0].split() == ["CONTEXT", "ID", "STATE", "USED", "LIMIT", "SHARE", "ENFORCED", "BY"]
        assert any(line.split()[0] == name and line.split()[4] == "1.0G" for line in table[1:] if line)
        assert any(line.split()[0] == "snapshots" for line in table if line)
        shown = json.loads(carrel("usage", "--json", name).stdout)
        assert [each["context_id"] for each in shown] == [name]
        assert shown[0]["bytes"] >= 3_000_000 and shown[0]["limit_bytes"] == 1024**3
        assert shown[0]["enforced_by"] in {"kernel", "watch"} and shown[0]["id"].startswith("sbx-")
        assert carrel("usage", "absent-context").returncode == 1
        parts = json.loads(carrel("usage", "--disk", "--json").stdout)["parts"]
        assert next(part for part in parts if part["name"] == "workspaces")["bytes"] >= 3_000_000
        carrel("rm", "--yes", name)
        kept = next(each for each in json.loads(carrel("ps", "-a", "--json").stdout) if each["context_id"] == name)
        assert kept["files_kept"] and b"kept" in carrel("ps", "-a").stdout
        shown = {each["context_id"]: each for each in json.loads(carrel("usage", "--json").stdout)}
        assert (shown[name]["state"], shown[name]["bytes"] >= 3_000_000) == ("terminated", True)
    finally:
        carrel("rm", "--yes", "--files", name)


def test_forget_deletes_everything_of_a_context(carrel: Carrel) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    assert carrel("exec", name, "echo kept > f").returncode == 0
    refused = carrel("forget", name)
    assert refused.returncode == 2 and b"--yes" in refused.stderr
    done = carrel("forget", "--yes", "--json", name, "absent-context")
    assert done.returncode == 1 and b"nothing is known" in done.stderr
    assert json.loads(done.stdout) == [name]
    assert carrel("exec", name, "cat f").returncode != 0, "it begins anew"
    assert carrel("forget", "--yes", name).returncode == 0
