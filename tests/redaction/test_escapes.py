from __future__ import annotations

import json
from urllib.parse import quote, unquote_to_bytes

from hypothesis import example, given, settings
from hypothesis import strategies as st

from carrel.redaction.escapes import BACKSLASH, PERCENT, Escaping, View, boundary

CALM = settings(deadline=None)
PIECES = st.sampled_from(
    [
        b"\0",
        b"\\\0",
        b"\xff",
        *rb"""\ \\ \n \" \/ \u00e9 \ud83d\ude00 \x41 \x4 \101 \7 \q %41 %4 % %zz a u0041 n 41 '""".split(),
    ]
)
TEXTS = st.lists(PIECES, max_size=40).map(b"".join)
BOTH = st.sampled_from([PERCENT, BACKSLASH])


def slowly(escaping: Escaping, data: bytes) -> bytes:
    return escaping.unit.sub(lambda found: escaping.decode_one(found[0]), data)


@CALM
@given(BOTH, TEXTS)
@example(BACKSLASH, b"\\\\\0\\\0\\u0041")
def test_the_quick_way_is_the_slow_one(escaping: Escaping, data: bytes) -> None:
    assert escaping.decode(data) == slowly(escaping, data)


@CALM
@given(st.text(max_size=30))
def test_what_encoders_make_is_undone(text: str) -> None:
    plain = text.encode("utf-8", "surrogatepass")
    assert View(PERCENT, quote(plain, safe="").encode()).text == plain
    if text.isascii():
        assert View(BACKSLASH, json.dumps(text)[1:-1].encode()).text == plain
    assert unquote_to_bytes(quote(plain)) == plain


@CALM
@given(BOTH, TEXTS)
def test_every_byte_has_its_place(escaping: Escaping, data: bytes) -> None:
    view = View(escaping, data)
    starts = [view.start(at) for at in range(len(view.text))]
    ends = [view.end(at + 1) for at in range(len(view.text))]
    assert starts == sorted(starts)
    assert ends == sorted(ends)
    covered = 0
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert start <= covered <= end
        covered = end
        assert view.text[at : at + 1] in slowly(escaping, data[start:end])
    assert covered == view.stop
    assert view.start(len(view.text)) == view.stop


@CALM
@given(BOTH, TEXTS, TEXTS)
def test_what_is_cut_is_waited_for(escaping: Escaping, data: bytes, more: bytes) -> None:
    view = View(escaping, data)
    assert slowly(escaping, data + more).startswith(view.text)
    assert len(data) - view.stop < 6


@CALM
@given(TEXTS, st.integers(0, 300))
def test_a_text_can_be_gone_on_with_at_a_boundary(data: bytes, at: int) -> None:
    cut = boundary(data, min(at, len(data)))
    assert min(at, len(data)) - cut in {0, 1}
    whole, rest = slowly(BACKSLASH, data), slowly(BACKSLASH, data[cut:])
    assert whole[len(whole) - max(0, len(rest) - 6) :] == rest[len(rest) - max(0, len(rest) - 6) :]
