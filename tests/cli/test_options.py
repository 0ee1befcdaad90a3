from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from carrel.cli.options import (
    SandboxOptions,
    contexts,
    environment,
    megabytes,
    networks,
    program,
    takes_sandbox_options,
)

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@given(st.integers(0, 10**9), st.sampled_from(["", "m", "M", "mb", "MiB", " m"]))
def test_megabytes(count: int, unit: str) -> None:
    assert megabytes(f"{count}{unit}", "--memory") == count


@given(st.integers(0, 10**9), st.sampled_from(["g", "G", "gb", "GiB", " g"]))
def test_gigabytes(count: int, unit: str) -> None:
    assert megabytes(f" {count}{unit} ", "--memory") == count * 1024


@pytest.mark.parametrize("text", ["", "m", "much", "-1", "1.5g", "1k", "1t", "1 000", "0x10", "1gg", "1\n2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        megabytes(text, "--disk")
    assert caught.value.param_hint == "--disk"


@given(st.dictionaries(st.from_regex(r"\A[A-Za-z_]\w{0,9}\Z"), st.text(max_size=9), max_size=5))
def test_environment_is_what_was_given(env: dict[str, str]) -> None:
    assert environment([f"{name}={value}" for name, value in env.items()]) == env


def test_environment_of_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED", "a=b")
    monkeypatch.delenv("ABSENT", raising=False)
    assert environment(["PASSED", "EMPTY="]) == {"PASSED": "a=b", "EMPTY": ""}
    assert environment(None) == {} and megabytes(None, "--memory") is None
    for word in ("=x", "ABSENT", ""):
        with pytest.raises(typer.BadParameter):
            environment([word])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["a | b"], "a | b"),
        (["--", "a b"], "a b"),
        (["ls", "-l"], ["ls", "-l"]),
        (["--", "ls", "--"], ["ls", "--"]),
    ],
)
def test_programs(words: list[str], meant: str | list[str]) -> None:
    assert program(words) == meant


def test_dashes_alone_are_no_program() -> None:
    with pytest.raises(typer.BadParameter):
        program(["--"])


def test_completion_knows_the_contexts_and_is_silent_without_a_server(
    carrel: Carrel, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"complete-{uuid.uuid4().hex[:8]}"
    assert carrel("exec", name, "true").returncode == 0
    monkeypatch.delenv("CARREL_URL", raising=False)
    try:
        monkeypatch.setenv("CARREL_DATA_DIR", str(data_dir))
        assert contexts(name[:-3]) == [name]
        assert contexts("no-such") == []
        monkeypatch.setenv("CARREL_DATA_DIR", str(tmp_path))
        assert contexts("") == []
        assert capsys.readouterr() == ("", "")
    finally:
        removed = json.loads(carrel("rm", "-y", "--json", name).stdout)
        assert len(removed) == 1 and os.environ["CARREL_DATA_DIR"] == str(tmp_path)


def test_completion_knows_the_networks() -> None:
    assert networks("") == ["none", "allowlist", "internet", "bridge", "host"]
    assert networks("al") == ["allowlist"]


def test_commands_that_make_sandboxes_share_their_options() -> None:
    seen: list[tuple[str, SandboxOptions]] = []
    app = typer.Typer()

    @app.command()
    @takes_sandbox_options
    def command(name: str, *, sandbox: SandboxOptions) -> None:
        seen.append((name, sandbox))

    words = ["--template", "t", "--network", "none", "--memory", "1g", "--disk", "5m", "--cpus", "0.5", "x"]
    app(args=words, standalone_mode=False)
    limits = {"memory_mb": 1024, "disk_mb": 5, "cpus": 0.5}
    assert seen == [("x", SandboxOptions(template="t", network="none", limits=limits))]
    assert seen[0][1] and not SandboxOptions()


@pytest.mark.parametrize("command", ["run", "exec", "sh", "python", "cp"])
def test_every_command_that_may_make_a_sandbox_has_its_options(alone: Carrel, command: str) -> None:
    shown = alone(command, "--help").stdout.decode()
    for option in ("--template", "--provider", "--trust", "--network", "--memory", "--cpus", "--processes", "--disk"):
        assert option in shown
