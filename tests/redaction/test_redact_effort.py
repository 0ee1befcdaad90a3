"""Text that is made to be slow to look through: it is withheld beyond some effort, and hides nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.governance.redaction import MOST_WAITING, OutputRedactor
from carrel.control.supervisor.frames import StreamChunk
from carrel.redaction import redact
from carrel.redaction.redact import BLOCK, LOOKS, SPARSE, Redactor

SECRET = b"correct-horse-battery-staple"
LARGE = base64.b64encode(bytes(range(256)) * 32)
REDACTOR = Redactor({"KEY": SECRET})
USUAL = b"2026-11-15T12:33:08 INFO app.worker GET /api/v1/items 200 in 3ms\n" * 4
SPELLINGS = [SECRET, base64.b64encode(SECRET), SECRET.hex().encode(), b"%63" + SECRET[1:], b"\\x63" + SECRET[1:]]
PIECES = st.sampled_from([b" sk-" * 200, b" sk-" * 20, USUAL, b".", *SPELLINGS])


@contextmanager
def effort(looks: int) -> Iterator[None]:
    with patch.object(redact, "LOOKS", looks):
        yield


@given(st.lists(PIECES, max_size=25), st.lists(st.integers(0, 20_000), max_size=20), st.sampled_from([0, 20, 300]))
def test_nothing_is_told_around_what_is_withheld(pieces: list[bytes], cuts: list[int], looks: int) -> None:
    data = b"".join(pieces)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    with effort(looks):
        stream = REDACTOR.stream()
        given = b"".join([*(stream.feed(data[start:stop]) for start, stop in pairwise(places)), stream.finish()])
    assert stream.position == len(data) and stream.held == 0
    for spelling in SPELLINGS:
        parts = (spelling[at : at + 10] for at in range(len(spelling) - 9))
        assert not any(part in given for part in parts), given
    if b"[withheld: " not in given:
        assert given == REDACTOR.stream().finish(data)


@given(st.lists(PIECES, max_size=10), st.integers(0, 20_000))
def test_whoever_goes_on_from_an_offset_is_told_no_more(pieces: list[bytes], offset: int) -> None:
    data = b"".join(pieces)
    skip = min(offset, len(data))
    with effort(20):
        stream = REDACTOR.stream(skip=skip)
        given = stream.feed(data[: len(data) // 2]) + stream.finish(data[len(data) // 2 :])
    assert stream.position == len(data)
    assert not any(SECRET[at : at + 10] in given for at in range(len(SECRET) - 9))


@pytest.mark.parametrize("made", [b" sk-", b".ya29.", b".eyJ", base64.b64encode(LARGE)[:4], LARGE.hex().encode()[:6]])
def test_the_effort_has_an_end(made: bytes) -> None:
    redactor, compared = Redactor({"LARGE": LARGE}), 0
    find = redactor.find

    def counted(data: bytes, floor: int, *, final: bool) -> tuple[list[redact.Found], int, int]:
        nonlocal compared
        answer = find(data, floor, final=final)
        compared += answer[2]
        return answer

    redactor.find = counted  # type: ignore[method-assign]
    data = made * (8 * BLOCK // len(made))
    with effort(1000):
        clean = redactor.data(data)
    most = 2 * (BLOCK + redactor.lookbehind) // len(made)  # what was begun is done
    assert b"that take too long to look through" in clean and compared <= 1000 + len(data) // SPARSE + most


def test_usual_text_is_never_withheld() -> None:
    tokens = b"token = ghp_" + b"aB3" * 12 + b"\n"
    for text in (
        USUAL,
        tokens,
        b'<div class="sk-cube-grid"><div class="sk-cube sk-cube1"></div>\n',
        b'{"a": "\\u4f60"}',
    ):
        data = text * (4 * BLOCK // len(text))
        with effort(2000):
            assert b"withheld" not in REDACTOR.data(data)
    assert LOOKS > 2000


@pytest.mark.parametrize(
    ("line", "many"), [(b"Downloading disk-1 45%\r", 24), (b"task-17\n", 64), (b'"task-17\\n"', 9), (b"risk-%2d\n", 1)]
)
def test_what_was_looked_at_and_parts_of_words_cost_nothing(line: bytes, many: int) -> None:
    """Otherwise a progress bar would be withheld after some minutes: its last lines are looked at with each new one."""
    data = line * (20_000 // len(line))
    with effort(50):
        stream = REDACTOR.stream()
        given = b"".join([stream.feed(data[at : at + many]) for at in range(0, len(data), many)])
    assert given + stream.finish() == data


def test_a_stream_that_is_settled_has_no_effort_anew() -> None:
    cleaned = OutputRedactor(REDACTOR)
    cleaned.feed(StreamChunk("stdout", SECRET[:9]))
    effort = cleaned._streams["stdout"].effort
    cleaned.feed(StreamChunk("stderr", b"." * (MOST_WAITING + 1)))
    assert cleaned._streams["stdout"].effort is effort and not effort.spent
