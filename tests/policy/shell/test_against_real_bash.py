"""Compares what the reader finds in a text with what real Bash and dash run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from tests.support.real_shell import RealShell
from tests.support.shell_checking import is_judged, unpredicted
from tests.support.shell_texts import texts

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
