from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carrel.policy.shell.commands import read
from carrel.policy.shell.syntax import TextFacts, identifiers

NAMES = st.sampled_from("abcd")


def asks(text: str) -> bool:
    facts = TextFacts()
    read(text, facts)
    facts.conclude()
    return bool(facts.asks)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=8), NAMES, NAMES)
def test_a_value_known_at_run_time_is_followed_through_every_copy(
    copies: list[tuple[str, str]], source: str, used: str
) -> None:
    text = "; ".join([f"{source}=$(cmd)", *(f"{to}=${of}" for to, of in copies), f"echo $(({used}))"])
    reached = {source}
    for _ in copies:
        reached |= {to for to, of in copies if of in reached}
    assert asks(text) == (used in reached)


def test_a_name_is_followed_too() -> None:
    assert asks("x='r[$(y)]'; z=x; echo $((z))")
    assert not asks("x=5; z=x; echo $((z))")
    assert not asks("x='r[1]'; echo $((x))")


def test_words_that_could_be_variables() -> None:
    assert identifiers("a1+2b c_d 0x1f") == {"a1", "c_d"}


def test_counting_programs_print_numbers() -> None:
    for text in ("wc -l < f", "ls | wc -l", "a | b | grep -c x", "nproc", "date +%s", "id -u"):
        assert not asks(f"n=$({text}); echo $((n + 1))"), text
        assert not asks(f"echo $(( `{text}` ))"), text
    for text in (
        "wc -l f",
        "wc",
        "ls; wc -l",
        "wc -l; ls",
        "grep -c x f",
        "grep -c $x",
        "date",
        "wc -l && a",
        "x=1 wc -l",
        "{ a; wc -l; }",
    ):
        assert asks(f"n=$({text}); echo $((n + 1))"), text
