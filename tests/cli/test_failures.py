from __future__ import annotations

import contextlib
import io
import os
import signal
import sys

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from carrel.cli.failures import Terminated, exit_code_of, print_error
from carrel.errors import (
    BY_CODE,
    ApprovalNeeded,
    CarrelError,
    Denied,
    InvalidRequest,
    NotRunning,
    Unauthorized,
)


@given(st.text(), st.text(min_size=1))
def test_a_failure_is_two_lines(detail: str, hint: str) -> None:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert exit_code_of(Denied(detail, hint=hint)) == 1
    assert told.getvalue().count("\n") == 2
    assert "\x1b" not in told.getvalue()


def test_a_wrong_token_is_told_in_the_words_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(Unauthorized("the token is missing or wrong", hint="send a header")) == 1
    told = capsys.readouterr().err
    assert "CARREL_TOKEN" in told and "header" not in told


def test_a_token_for_another_server_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARREL_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("CARREL_TOKEN", raising=False)
    assert exit_code_of(Unauthorized("the token is missing or wrong")) == 1
    assert "CARREL_URL names a server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (InvalidRequest("no", hint="see /docs"), None),
        (NotRunning("it is stopped", hint="deploy_or_resume starts it again"), "`carrel resume` starts it again"),
        (Denied("no", rule="shell(a)", source="settings.json"), "the rule is shell(a) in settings.json"),
        (Denied("no", hint="ask", rule="shell(a)"), "ask"),
        (ApprovalNeeded("ask", hint="wait, then ask with it", approval="apr-1"), "--for-context apr-1"),
        (ApprovalNeeded("ask", hint="then `carrel exec`", approval="apr-1"), "then `carrel exec`"),
    ],
)
def test_hints_speak_to_who_types(capsys: pytest.CaptureFixture[str], error: CarrelError, hint: str | None) -> None:
    assert exit_code_of(error) == 1
    _, *hints = capsys.readouterr().err.splitlines()
    assert len(hints) == (hint is not None) and (hint or "") in "".join(hints)


def test_an_unforeseen_failure_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(RuntimeError("boom")) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told and "--trace" in told
    assert exit_code_of(KeyboardInterrupt()) == 130
    assert exit_code_of(ExceptionGroup("g", [Denied("no")])) == 1
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        assert exit_code_of(error, trace=True) == 1
    assert "test_failures.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "first"),
    [
        (SystemExit(3), 3, None),
        (SystemExit(), 1, None),
        (SystemExit("words"), 1, None),
        (Terminated(signal.SIGTERM), 143, None),
        (typer.Abort(), 130, None),
        (typer.BadParameter(""), 2, "error: Invalid value: "),
        (typer.BadParameter("no such size."), 2, "error: Invalid value: no such size"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "error: /x: No such file"),
        (OSError("odd"), 1, "error: odd"),
        *((BY_CODE[code]("words"), 1, "error: words") for code in sorted(BY_CODE)),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, first: str | None) -> None:
    assert exit_code_of(error) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert (told.err.splitlines() or [None])[0] == first


def test_a_hint_is_optional(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("a\nb\x1b[31m")
    assert capsys.readouterr().err == "error: a b\\x1b[31m\n"


def test_a_reader_that_left_is_not_written_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        before = len(os.listdir("/proc/self/fd"))
        assert exit_code_of(BrokenPipeError()) == 1
        print("more", flush=True)
        assert os.readlink(f"/proc/self/fd/{output.fileno()}") == os.devnull
        assert len(os.listdir("/proc/self/fd")) == before
