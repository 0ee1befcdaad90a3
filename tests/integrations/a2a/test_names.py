"""Which context and which threads belong to an A2A context."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.integrations.a2a.names import LONGEST, carrel_context, task_thread

_CARREL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@pytest.mark.parametrize("name", ["conversation-42", "team:a", "7f1c3f0e-9d5c-4c53-a0e9-5f0f4e0b9b11", "A" * 128])
def test_a_name_that_carrel_takes_is_the_same(name: str) -> None:
    assert carrel_context(name) == name


@given(st.text(min_size=1, max_size=LONGEST))
def test_every_name_gets_one_that_carrel_takes(name: str) -> None:
    assert _CARREL.fullmatch(carrel_context(name))


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_two_names_never_share_a_context(one: str, other: str) -> None:
    assert (carrel_context(one) == carrel_context(other)) == (one == other)


def test_a_readable_part_stays() -> None:
    assert carrel_context("Ann's plan / 7").startswith("a2a-Ann-s-plan-7-")


@pytest.mark.parametrize("name", ["", "x y" * 100])
def test_a_name_without_measure_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        carrel_context(name)


@given(st.text(min_size=1, max_size=LONGEST), st.uuids())
def test_the_thread_of_a_task_is_nobodys_conversation(name: str, task: object) -> None:
    thread = task_thread(carrel_context(name), str(task))
    assert not _CARREL.fullmatch(thread)
    assert thread.startswith(carrel_context(name))
