"""Which files are a program, in roots made for the test and in that of this host."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.isolation import programs
from carrel.isolation.programs import ProgramCatalogue, is_called, is_unchanged


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A merged root with alternatives, a multi-call binary, hard links and versions."""
    for directory in ("usr/bin", "usr/sbin", "usr/local/bin", "etc/alternatives", "opt/tool/bin"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "sbin").symlink_to("usr/sbin")
    for name in ("curl", "nc.openbsd", "mawk", "busybox", "python3.11", "bzip2", "perl", "x86_64-linux-gnu-gcc-12"):
        (tmp_path / "usr/bin" / name).write_text(name)
    (tmp_path / "usr/local/bin/curl").write_text("another curl")
    (tmp_path / "opt/tool/bin/tool").write_text("tool")
    for link, target in {
        "usr/bin/nc": "/etc/alternatives/nc",
        "etc/alternatives/nc": "/usr/bin/nc.openbsd",
        "usr/bin/netcat": "/etc/alternatives/netcat",
        "etc/alternatives/netcat": "/usr/bin/nc.openbsd",
        "usr/bin/awk": "/etc/alternatives/awk",
        "etc/alternatives/awk": "/usr/bin/mawk",
        "usr/bin/wget": "busybox",
        "usr/bin/ls": "busybox",
        "usr/bin/python": "python3",
        "usr/bin/python3": "python3.11",
        "usr/bin/gcc": "gcc-12",
        "usr/bin/gcc-12": "x86_64-linux-gnu-gcc-12",
        "usr/bin/cc": "gcc",
        "usr/bin/tool": "../../opt/tool/bin/tool",
        "usr/bin/loop": "loop",
        "usr/bin/dangling": "nowhere",
        "usr/bin/X11": ".",
    }.items():
        (tmp_path / link).symlink_to(target)
    os.link(tmp_path / "usr/bin/bzip2", tmp_path / "usr/bin/bunzip2")
    os.link(tmp_path / "usr/bin/perl", tmp_path / "usr/bin/perl5.36.0")
    return tmp_path


@pytest.mark.parametrize(
    ("program", "paths"),
    [
        ("curl", ["/usr/local/bin/curl", "/usr/bin/curl"]),
        ("/usr/bin/curl", ["/usr/bin/curl"]),
        ("/bin/curl", ["/bin/curl"]),
        ("nc", ["/usr/bin/nc", "/etc/alternatives/nc", "/usr/bin/nc.openbsd"]),
        ("awk", ["/usr/bin/awk", "/etc/alternatives/awk"]),
        ("wget", ["/usr/bin/wget"]),
        ("busybox", ["/usr/bin/busybox"]),
        ("python", ["/usr/bin/python", "/usr/bin/python3", "/usr/bin/python3.11"]),
        ("python3", ["/usr/bin/python3", "/usr/bin/python3.11"]),
        ("gcc", ["/usr/bin/gcc", "/usr/bin/gcc-12", "/usr/bin/x86_64-linux-gnu-gcc-12"]),
        ("cc", ["/usr/bin/cc"]),
        ("perl", ["/usr/bin/perl", "/usr/bin/perl5.36.0"]),
        ("bunzip2", ["/usr/bin/bunzip2"]),
        ("tool", ["/usr/bin/tool", "/usr/bin/../../opt/tool/bin/tool"]),
        ("dangling", ["/usr/bin/dangling"]),
        ("X11", ["/usr/bin/X11"]),
        ("absent", []),
        ("/opt/absent/x", []),
        ("/usr/bin", []),
    ],
)
def test_where_a_program_is_masked(root: Path, program: str, paths: list[str]) -> None:
    assert ProgramCatalogue(str(root)).find(program) == paths


def test_a_link_to_itself_ends(root: Path) -> None:
    assert ProgramCatalogue(str(root)).find("loop") == ["/usr/bin/loop"]


def test_an_empty_root_has_no_programs(tmp_path: Path) -> None:
    catalogue = ProgramCatalogue(str(tmp_path))
    assert (catalogue.directories, catalogue.find("sh")) == ((), [])


def test_directories_that_are_one_are_looked_into_once(root: Path) -> None:
    assert ProgramCatalogue(str(root)).directories == ("/usr/local/bin", "/usr/sbin", "/usr/bin")


def test_every_program_of_this_host_is_masked_at_its_own_name() -> None:
    catalogue = ProgramCatalogue()
    for directory in catalogue.directories:
        for name in os.listdir(directory):
            assert os.path.isdir(f"{directory}/{name}") or f"{directory}/{name}" in catalogue.find(name)


def old(root: Path) -> ProgramCatalogue:
    """A catalogue of a root in which nothing has just changed."""
    catalogue = ProgramCatalogue(str(root))
    catalogue.find("nc")
    catalogue.find("tool")
    catalogue.find("/opt/later/x")
    return catalogue


def test_what_was_found_is_good_until_a_directory_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_unchanged(old(root).stamps, str(root)), "what has just changed may change again unseen"
    monkeypatch.setattr(programs, "_JUST_NOW_NS", 0)
    for change in (
        lambda: (root / "usr/bin/new").write_text(""),
        lambda: (root / "etc/alternatives/nc").unlink(),
        lambda: (root / "opt/tool/bin/tool").rename(root / "opt/tool/bin/was"),
        lambda: (root / "opt/later").mkdir(),
        lambda: shutil.rmtree(root / "usr/local/bin"),
    ):
        stamps = old(root).stamps
        assert is_unchanged(stamps, str(root))
        change()
        assert not is_unchanged(stamps, str(root))


@pytest.mark.parametrize(
    ("own", "name", "same"),
    [
        ("nc", "nc", True),
        ("nc.openbsd", "nc", True),
        ("python3.11", "python3", True),
        ("python3", "python", True),
        ("x86_64-linux-gnu-gcc-12", "gcc", True),
        ("dash", "sh", False),
        ("git-shell", "sh", False),
        ("gsh", "sh", False),
        ("busybox", "wget", False),
        ("netcat", "nc", False),
        ("rsync", "nc", False),
        ("pythonic", "python", False),
    ],
)
def test_a_name_that_says_it_is_the_program(own: str, name: str, same: bool) -> None:
    assert is_called(own, name) is same


NAMES = st.text("abc.-1", min_size=1, max_size=6)


@given(NAMES, NAMES)
def test_a_program_is_called_by_its_name_with_something_apart(name: str, more: str) -> None:
    assert is_called(name, name)
    assert is_called(f"{name}-{more}", name)
    assert is_called(f"{name}.{more}", name)
    assert is_called(f"{more}-{name}", name)
    assert not is_called(f"x{name}y", name)
