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

from carrel.cli.options import contexts, environment, memory_mb, networks, program

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@given(st.integers(0, 10**9), st.sampled_from(["", "m", "M", "mb", "MiB", " m"]))
def test_megabytes(count: int, unit: str) -> None:
    assert memory_mb(f"{count}{unit}") == count


@given(st.integers(0, 10**9), st.sampled_from(["g", "G", "gb", "GiB", " g"]))
def test_gigabytes(count: int, unit: str) -> None:
    assert memory_mb(f" {count}{unit} ") == count * 1024


@pytest.mark.parametrize("text", ["", "m", "much", "-1", "1.5g", "1k", "1t", "1 000", "0x10", "1gg", "1\n2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        memory_mb(text)
    assert caught.value.param_hint == "--memory"


@given(st.dictionaries(st.from_regex(r"\A[A-Za-z_]\w{0,9}\Z"), st.text(max_size=9), max_size=5))
def test_environment_is_what_was_given(env: dict[str, str]) -> None:
    assert environment([f"{name}={value}" for name, value in env.items()]) == env


def test_environment_of_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED", "a=b")
    monkeypatch.delenv("ABSENT", raising=False)
    assert environment(["PASSED", "EMPTY="]) == {"PASSED": "a=b", "EMPTY": ""}
    assert environment(None) == {} and memory_mb(None) is None
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
    assert networks("") == ["none", "allowlist", "bridge", "host"]
    assert networks("al") == ["allowlist"]
