from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.policy.shell.sed_awk import Effects, awk_reasons, read_sed


def sed(script: str) -> Effects:
    """Read a script of sed."""
    found = Effects()
    read_sed(script, found)
    return found


@pytest.mark.parametrize(
    ("script", "writes"),
    [
        ("w out", ["out"]),
        ("1,5w out", ["out"]),
        ("/a/,/b/w out\np", ["out"]),
        ("s/a/b/gw out", ["out"]),
        ("s/a/b/w /dev/stdout", []),
        ("\\,a,w out", ["out"]),
        ("a text w out", []),
        ("s/w/e/", []),
        ("y/we/ew/", []),
        ("/w/p", []),
        ("# w out", []),
    ],
)
def test_files_a_sed_script_writes(script: str, writes: list[str]) -> None:
    found = sed(script)
    assert (found.writes, found.texts, found.asks) == (writes, [], [])


def test_commands_a_sed_script_runs() -> None:
    assert sed("1e id").texts == ["id"]
    assert sed("a\\\ntext\n1e id").texts == ["id"]
    assert sed("e").asks
    assert sed("s/a/b/e").asks


@pytest.mark.parametrize("script", ["s/a", "s", "/a", "k", "s/a/b/k", "\\", "1,"])
def test_sed_script_that_is_not_supported_asks(script: str) -> None:
    assert sed(script).asks


def test_awk_strings_and_expressions_do_not_count() -> None:
    assert list(awk_reasons('/a|b/ { print "| > system()" } # | sh')) == []
    assert list(awk_reasons('$1 ~ /"/ { system("id") }')) == ["runs commands"]
    assert list(awk_reasons('a / 2 | "sh" / 3')) == ["reads from or writes to a command"]
    assert list(awk_reasons('"not closed')) == ["uses a construct that this reader does not support"]


@given(st.text('/"\\[]|#;{}a \n'))
def test_any_program_is_read(program: str) -> None:
    sed(program)
    list(awk_reasons(program))
