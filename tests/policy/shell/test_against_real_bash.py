"""Compares what the reader finds in a text with what real Bash and dash run.

The shells run in a root of stubs that record how they were called (`tests.support.real_shell`). A program that ran and
was not found fails the test. Texts that ask are not run: whatever they did would be no surprise.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.real_shell import WRAPPERS, RealShell
from tests.support.shell_checking import is_judged, unpredicted
from tests.support.shell_texts import texts

from carrel.policy.shell import Dialect, base, finder
from carrel.policy.shell.finder import Found, find
from carrel.policy.shell.syntax import Word

CORPUS = Path(__file__).parents[1] / "corpus"
COUNT = int(os.environ.get("CARREL_SHELL_TEXTS", "1500"))
SEED = int(os.environ.get("CARREL_SHELL_SEED", "1"))
DIALECTS: dict[str, Dialect] = {"bash": "bash", "dash": "sh"}
RUN_OTHERS = frozenset({*WRAPPERS, "bash", "dash", "sh"})


def corpus() -> list[tuple[str, str, str]]:
    """Theme, what is expected, and text, of every entry."""
    found = []
    for path in sorted(CORPUS.glob("*.txt")):
        for entry in path.read_bytes().decode().removeprefix("%% ").split("\n%% "):
            expected, _, text = entry.partition("\n")
            found.append((path.stem, expected, text.removesuffix("\n")))
    return found


ENTRIES = corpus()


def judged(found_in: Sequence[str], shell: str) -> list[tuple[str, Found]]:
    """The texts of which the reader claims to know everything, with what it found."""
    found = [(text, find(text, dialect=DIALECTS[shell], cwd="/work")) for text in found_in]
    return [(text, each) for text, each in found if is_judged(each)]


def missed(found: Sequence[tuple[str, Found]], ran: Sequence[list[tuple[str, ...]]]) -> list[tuple[str, object]]:
    """The texts that ran something that was not found, with what that was."""
    both = zip(found, ran, strict=True)
    return [(text, more) for (text, each), programs in both if (more := unpredicted(each, programs))]


def summary(text: str) -> str:
    """What is found in a text, as the corpus writes it."""
    found = find(text, cwd="/work")
    if found.asks:
        return "asks"
    names = dict.fromkeys(str(command.arguments[0]) for command in found.commands)
    said = " ".join(["runs", *(shlex.quote(name) for name in names), *(["…"] if found.opaque else [])])
    return said.replace("\n", "⏎")


def test_corpus_is_large_and_everyday_commands_never_ask() -> None:
    assert len({text for _, _, text in ENTRIES}) >= 1000
    assert not [text for theme, expected, text in ENTRIES if theme == "everyday" and expected == "asks"]


@pytest.mark.parametrize("theme", sorted({theme for theme, _, _ in ENTRIES}))
def test_corpus_is_read_as_it_says(theme: str) -> None:
    read = [(text, expected, summary(text)) for at, expected, text in ENTRIES if at == theme]
    assert not [each for each in read if each[1] != each[2]]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("shell", "share"), [("bash", 0.6), ("dash", 0.4)])
def test_real_shells_run_nothing_of_the_corpus_that_was_not_found(
    real_shell: RealShell, shell: str, share: float
) -> None:
    found = judged([text for _, _, text in ENTRIES], shell)
    assert len(found) > len(ENTRIES) * share
    ran = real_shell.run([text for text, _ in found], shell)
    assert sum(bool(each) for each in ran) > len(found) / 2
    assert not missed(found, ran)
    if shell == "bash":
        # Every other text had the real wrappers in its path: those that use one get the other path too.
        again = [
            (each, number % 2 == 1)
            for number, each in enumerate(found)
            if any(isinstance(name := command.arguments[0], str) and base(name) in RUN_OTHERS
                   for command in each[1].commands)
        ]  # fmt: skip
        assert len(again) > 100
        ran = real_shell.run([text for (text, _), _ in again], shell, wrappers=[real for _, real in again])
        assert not missed([each for each, _ in again], ran)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("shell", "share", "least"), [("bash", 1.0, 0.3), ("dash", 0.2, 0.1)])
def test_real_shells_run_nothing_generated_that_was_not_found(
    real_shell: RealShell, shell: str, share: float, least: float
) -> None:
    made = texts(int(COUNT * share), SEED * 1_000_000)
    found = judged(made, shell)
    ran = real_shell.run([text for text, _ in found], shell)
    print(f"{len(made)} texts, {len(found)} without a question, {sum(map(len, ran))} programs ran")
    assert len(found) > len(made) * least
    assert not missed(found, ran)


MUTATIONS = {
    "substitutions are not looked into": (Word, "programs", property(lambda _: ())),
    "wrappers run nothing": (finder, "unwrap", lambda _: None),
    "eval is a command as any other": (finder, "BUILTINS", {}),
    "functions are not walked": (finder._Finder, "_body", lambda *_: None),
}


@pytest.mark.parametrize("mutation", sorted(MUTATIONS))
def test_comparison_notices_a_broken_reader(
    real_shell: RealShell, monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    found = judged(["a $(b)", "eval 'b x'", "env b", "f() { b; }; f", "a; b"], "bash")
    ran = real_shell.run([text for text, _ in found], wrappers=[True] * len(found))
    assert missed(found, ran)
