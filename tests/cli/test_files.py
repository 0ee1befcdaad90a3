from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.cli.files import split_target

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def context(carrel: Carrel) -> Iterator[str]:
    name = f"cli:{uuid.uuid4().hex[:12]}"
    yield name
    carrel("rm", "--yes", name)


def test_files_go_in_and_out(carrel: Carrel, context: str, tmp_path: Path) -> None:
    source = tmp_path / "in.bin"
    source.write_bytes(os.urandom(300_000))
    assert carrel("cp", str(source), f"{context}:data/renamed.bin").returncode == 0
    assert carrel("cp", str(source), f"{context}:data/").returncode == 0
    assert carrel("cp", f"{context}:data/renamed.bin", str(tmp_path / "out.bin")).returncode == 0
    assert (tmp_path / "out.bin").read_bytes() == source.read_bytes()
    assert carrel("cp", f"{context}:data/in.bin", "-").stdout == source.read_bytes()
    assert carrel("cp", "-", f"{context}:typed.txt", stdin=b"from a pipe").returncode == 0
    assert carrel("exec", context, "cat typed.txt").stdout == b"from a pipe"
    entries = json.loads(carrel("ls", context, "--recursive", "--json").stdout)
    assert {entry["path"] for entry in entries} >= {"data", "data/in.bin", "data/renamed.bin", "typed.txt"}
    shown = carrel("ls", context, "data").stdout.decode()
    assert "renamed.bin" in shown
    assert "293K" in shown


def test_directories_go_in_and_out(carrel: Carrel, context: str, tmp_path: Path) -> None:
    (tmp_path / "tree/inner").mkdir(parents=True)
    (tmp_path / "tree/inner/a").write_text("a")
    (tmp_path / "back").mkdir()
    assert carrel("cp", str(tmp_path / "tree"), f"{context}:.").returncode == 0
    assert carrel("cp", f"{context}:tree", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/tree/inner/a").read_text() == "a"
    assert carrel("cp", f"{context}:tree", str(tmp_path / "fresh")).returncode == 0
    assert (tmp_path / "fresh/inner/a").read_text() == "a"


def test_what_is_wrong_is_said(carrel: Carrel, context: str, tmp_path: Path) -> None:
    for words in (["a", "b"], [f"{context}:a", f"{context}:b"]):
        done = carrel("cp", *words)
        assert done.returncode == 2
        assert b"exactly one side" in done.stderr
    done = carrel("cp", str(tmp_path / "absent"), f"{context}:x")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert carrel("ls", "no-such-context").returncode == 1
    assert carrel("cp", "no-such-context:file", str(tmp_path)).returncode == 1
    assert carrel("cp", "-", f"{context}:", stdin=b"").returncode == 1


def test_names_from_a_sandbox_cannot_steer_the_terminal(carrel: Carrel, context: str) -> None:
    carrel("exec", context, "touch \"$(printf 'a\\033[31mb[red]')\"")
    shown = carrel("ls", context).stdout
    assert b"\x1b[31mb" not in shown
    assert b"\\x1b[31mb[red]" in shown


names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,20}\Z")


@given(names, st.text(alphabet=st.characters(exclude_characters="\0:"), max_size=20))
def test_a_target_is_its_two_parts(context: str, path: str) -> None:
    assert split_target(f"{context}:{path}") == (context, path or ".")


@given(names, st.text(max_size=20))
def test_a_path_with_colons_can_be_spelled(context: str, path: str) -> None:
    assert split_target(f"{context}:./{path}") == (context, f"./{path}")
    assert split_target(f"./{context}:{path}") == (None, f"./{context}:{path}")
    assert split_target(f"/{path}") == (None, f"/{path}")


@given(st.text(max_size=60))
def test_any_text_is_split_without_loss(text: str) -> None:
    context, path = split_target(text)
    if context is None:
        assert path == text
    else:
        assert text in {f"{context}:{path}", f"{context}:"}
