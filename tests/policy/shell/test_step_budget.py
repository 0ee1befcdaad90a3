from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.policies import policy
from tests.support.repeated import FRAGMENTS, calls_of, repeated

from carrel.policy.rules.decide import decide_file, decide_network, decide_shell
from carrel.policy.rules.patterns import pattern
from carrel.policy.rules.rules import match_words, parse
from carrel.policy.shell.arguments import Unknown
from carrel.policy.shell.finder import find
from carrel.policy.shell.step_budget import SPARE_STEPS, STEPS_PER_CHARACTER, StepBudget, TooComplex, size_of

WHOLE = 65_536


def test_budget_ends_after_its_steps() -> None:
    budget = StepBudget(10)
    budget.spend(SPARE_STEPS + 10 * STEPS_PER_CHARACTER)
    with pytest.raises(TooComplex):
        budget.spend()


def test_size_of_a_text_and_of_arguments() -> None:
    assert size_of("a bc") == 4
    assert size_of(["a", "bc"]) == 5


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_reading_twice_the_text_calls_at_most_twice_the_functions(fragment: str) -> None:
    once, twice = (calls_of(lambda n=n: find(repeated(fragment, n), cwd="/w")) for n in (512, 1024))  # type: ignore[misc]
    assert twice <= 2.2 * once + 1000
    assert twice <= 100_000 + 250 * 1024


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), min_size=2, max_size=4))
def test_fragments_together_stay_within_the_bound(fragments: list[str]) -> None:
    text = repeated("".join(fragments), 3000)
    assert calls_of(lambda: find(text, cwd="/w")) <= 200_000 + 250 * len(text)


@pytest.mark.parametrize(
    "text",
    [
        "eval " * 3_000,
        "f(){ f; };" * 6_500,
        "a " + "x" * 60_000 + "{1..999}",
        "[a] " * 16_000,
        "".join(f"f{n}(){{ a; }};" for n in range(700)) + "f1;" * 2500,
    ],
    ids=["eval", "functions", "braces", "brackets", "calls"],
)
def test_text_that_takes_very_many_steps_asks(text: str) -> None:
    verdict = decide_shell(policy(["shell(a:*)", "shell(ls:*)"]), text[:WHOLE])
    assert verdict.verdict == "ask"
    assert any(
        "too complex to decide" in part.verdict.reason or "calls itself" in part.verdict.reason
        for part in verdict.parts
    )


def test_deny_found_before_the_steps_ran_out_stays_a_deny() -> None:
    verdict = decide_shell(policy(["shell(a:*)"], ["shell(curl:*)"]), "eval 'curl x'; " + "eval " * 3_000)
    assert verdict.verdict == "deny"
    assert any("too complex to decide" in part.verdict.reason for part in verdict.parts)


def test_ordinary_long_script_is_still_decided() -> None:
    text = "set -e\n" + "".join(f'grep -r "error {n}" logs | sort > out-{n}.txt\n' for n in range(400))
    rules = policy(["shell(grep:*)", "shell(sort:*)", "shell(set:*)", "file(write:/workspace/c/**)"])
    assert decide_shell(rules, text).verdict == "allow"
    assert decide_shell(rules, f"bash -c '{text}'").verdict == "ask"  # no rule allows bash
    assert find(f"bash -c 'bash -c \"{'ls; ' * 300}\"'").asks == ()


def test_arguments_known_only_at_run_time_need_no_deep_recursion() -> None:
    rule = parse("shell(git push origin:*)", "s", 0, {}, "p")
    assert match_words(rule, ["git", *[Unknown("$a", "any")] * 20_000], deny=True) == "maybe"


def test_very_many_rules_for_very_many_commands_ask() -> None:
    rules = policy(["shell(git status:*)"], [f"shell(*y{n}:*)" for n in range(2000)])
    assert decide_shell(rules, "git status; git status -s").verdict == "allow"
    many = decide_shell(rules, "".join(f"git status {n};" for n in range(900)))
    assert many.verdict == "ask"
    assert "too complex" in many.reason


def test_pattern_with_many_stars_calls_few_functions() -> None:
    written, text = pattern("*" + "a*" * 500 + "b" * 500), "a" * 60_000
    assert not written.matches(text)
    assert calls_of(lambda: written.matches(text)) < 2000


def test_find_tests_known_only_at_run_time_are_looked_at_once() -> None:
    once, twice = (calls_of(lambda n=n: find("find . " + '-"$a" ' * n)) for n in (300, 600))  # type: ignore[misc]
    assert twice <= 2.2 * once


def test_path_longer_than_any_file_asks_and_host_longer_than_any_name_is_denied() -> None:
    rules = policy(["file(read:/**)"])
    assert decide_file(rules, "read", "/" + "a/" * 2047).verdict == "allow"
    path = decide_file(rules, "read", "/" + "a/" * 500_000)
    assert (path.verdict, "longer than 4096" in path.reason) == ("ask", True)
    host = decide_network(rules, "a." * 500_000)
    assert (host.verdict, "longer than 255" in host.reason) == ("deny", True)
