from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.cli.failures import exit_code_of
from carrel.cli.shown import age, plain, size
from carrel.cli.streams import signal_number
from carrel.errors import Denied

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


@given(st.text(), st.text(min_size=1))
def test_a_failure_is_two_lines(detail: str, hint: str) -> None:
    import contextlib
    import io

    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert exit_code_of(Denied(detail, hint=hint)) == 1
    assert told.getvalue().count("\n") == 2
    assert "\x1b" not in told.getvalue()


@pytest.mark.parametrize(
    ("name", "number"), [("SIGTERM", 15), ("KILL", 9), ("9", 9), ("odd", 0), (None, 0), ("999", 0)]
)
def test_signal_number(name: str | None, number: int) -> None:
    assert signal_number(name) == number


def test_an_unforeseen_failure_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(RuntimeError("boom")) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert exit_code_of(KeyboardInterrupt()) == 130
    assert exit_code_of(ExceptionGroup("g", [Denied("no")])) == 1
