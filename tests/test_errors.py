from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel import errors
from carrel.errors import BY_CODE, CarrelError, CommandFailed, Denied, PlatformError, from_problem

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, CarrelError)]


def test_codes_are_a_closed_table_of_all_errors() -> None:
    assert sorted(BY_CODE) == sorted(each.code for each in CLASSES), "two errors share a code"
    assert set(BY_CODE.values()) == set(CLASSES)


def test_the_tree_at_the_top_of_the_module_is_true() -> None:
    for name, status in re.findall(r"[├└]── (\w+)\s+(\d{3}|—)", errors.__doc__ or ""):
        assert status in {"—", str(getattr(errors, name).status)}, name
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    assert drawn == {each.__name__ for each in CLASSES} - {"CarrelError"}


text = st.none() | st.text(max_size=20)


@given(st.sampled_from(sorted(BY_CODE)), st.text(min_size=1, max_size=20), text, text)
def test_an_error_crosses_a_border_unchanged(code: str, detail: str, field: str | None, hint: str | None) -> None:
    error = BY_CODE[code](detail, field=field, hint=hint, rule="r")
    again = from_problem(error.problem(), error.status)
    assert type(again) is type(error)
    assert (again.detail, again.field, again.hint, again.extra) == (detail, field, hint, {"rule": "r"})
    assert again.problem() == error.problem()


keys = st.sampled_from(["code", "detail", "field", "hint", "title", "status", "self", "result", "rule", "type"])
values = (
    st.none()
    | st.integers()
    | st.text(max_size=9)
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from(["not_found", "InvalidRequest", "SystemExit", "command_failed"])
)


@given(st.dictionaries(keys | st.text(max_size=9), values, max_size=8), st.integers(100, 599))
def test_any_problem_is_an_error_and_names_no_class(problem: dict[str, object], status: int) -> None:
    error = from_problem(problem, status)
    assert type(error) in CLASSES
    if problem.get("code") not in list(BY_CODE):
        assert type(error) is PlatformError
    assert error.detail
    error.problem()
    str(error)


def test_extras_never_replace_what_is_fixed() -> None:
    problem = Denied("no", rule="r", status=200, code="fine", type="x", title="Fine").problem()
    assert (problem["status"], problem["code"], problem["rule"]) == (403, "denied_by_policy", "r")
    assert (problem["title"], problem["type"]) == ("Denied by policy", "urn:carrel:problem:denied_by_policy")


def test_words() -> None:
    assert str(Denied("no", hint="ask")) == "no (ask)"
    assert str(Denied("no")) == "no"
    assert (Denied("no", reason="because", rule=5).reason, Denied("no", rule=5).rule) == ("because", None)
    assert Denied("no").reason == "no"
    assert CommandFailed("bad", result=7).result == 7
    with pytest.raises(CarrelError):
        raise PlatformError("x")
