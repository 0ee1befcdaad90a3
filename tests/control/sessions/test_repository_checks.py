"""The check of git configurations, compared with what git itself reads in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.control.sessions.repository_checks import LARGEST_CONFIG, is_harmless_config

CLONED = b"""[core]
\trepositoryformatversion = 0
\tfilemode = true
[remote "origin"]
\turl = git@example.org:a/b.git
\tfetch = +refs/heads/*:refs/remotes/origin/*
# a comment \\
[branch "main"]
\tremote = origin
\tmerge = refs/heads/main
"""
PIECES = st.sampled_from(
    ["[core]", "[Core]", '[core "x"]', "[core.x]", "[ core]", "[include]", '[remote "o"]', "[remote]", "[alias]", "\n",
     "\n", "\n", "\t", " ", "=", " = ", "url", "bare", "fsmonitor", "hooksPath", "path", "st", "!evil", "evil", "true",
     "\\\n", "\\", '"', "#", ";", "]", "[", "\r", "\r\n", "\x0b", "\xa0", "\ufeff", "\x85", "ext::sh", "url=a"]
)  # fmt: skip


def test_configuration_of_a_clone_is_harmless() -> None:
    assert is_harmless_config(CLONED)
    assert is_harmless_config(b"")


@pytest.mark.parametrize(
    "line",
    [
        "[core]\nfsmonitor = x", "[core]\nsshCommand = x", "[core]\nhooksPath = x", "[core] fsmonitor = x",
        "[alias]\nst = !x", "[include]\npath = x", '[includeIf "onbranch:x"]\npath = x', "[credential]\nhelper = x",
        '[filter "x"]\nclean = x', '[diff "x"]\ntextconv = x', '[submodule "x"]\nupdate = !x', "[core]\nworktree = /",
        "[extensions]\nworktreeConfig = true", '[remote "x"]\nurl = ext::sh', '[remote "x"]\nuploadpack = x',
        '[url "x"]\ninsteadOf = y', "[core]\nbare = \\\nfsmonitor = x", '[core]\nbare = "\nfsmonitor = x', "\ufeff[core]",
        "[core]\r\nbare = true", "[core]\nbare = true\0",
    ],
)  # fmt: skip
def test_other_keys_and_forms_are_not_harmless(line: str) -> None:
    assert not is_harmless_config(CLONED + line.encode() + b"\n")


def test_large_and_unreadable_configurations_are_not_harmless() -> None:
    assert not is_harmless_config(b"\n" * (LARGEST_CONFIG + 1))
    assert not is_harmless_config(b"\xff")


@settings(max_examples=200)
@given(pieces=st.lists(PIECES, max_size=14))
def test_git_finds_no_other_key_in_a_harmless_configuration(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str]
) -> None:
    """Only forms that are accepted cost a run of git."""
    content = ("[core]\n" + "".join(pieces)).encode()
    if not is_harmless_config(content) or content == b"[core]\n":
        return
    file: Path = tmp_path_factory.getbasetemp() / "config"
    file.write_bytes(content)
    read = subprocess.run(["git", "config", "--file", file, "--list"], capture_output=True, text=True, check=False)
    keys = {line.partition("=")[0] for line in read.stdout.splitlines()}
    assert keys <= {"core.bare", "core.x.bare", "remote.url", "remote.o.url"}, (content, keys)
