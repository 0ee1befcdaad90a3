from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.cli.shown import age, plain, size

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (86_400, "1d"), (864_000, "10d")]
)
def test_age(seconds: int, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text
    assert age((NOW - timedelta(seconds=seconds)).replace(tzinfo=None), NOW) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0B"), (1023, "1023B"), (1024, "1.0K"), (20_480, "20K"), (2**41, "2.0T")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


@given(st.text())
def test_plain_text_cannot_steer_a_terminal(text: str) -> None:
    assert all(c.isprintable() for c in plain(text))
