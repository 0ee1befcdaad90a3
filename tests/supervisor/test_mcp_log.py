from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carrel.supervisor.mcp_log import Log


@given(
    pieces=st.lists(st.text(max_size=20).map(str.encode), max_size=20),
    kept=st.integers(1, 60),
    limit=st.integers(1, 30),
)
def test_the_newest_is_kept_and_read_piece_by_piece(pieces: list[bytes], kept: int, limit: int) -> None:
    log, whole = Log(kept), b"".join(pieces)
    for piece in pieces:
        log.add(piece)
    assert (log.size, log.dropped) == (len(whole), max(0, len(whole) - kept))
    text, at = "", 0
    while True:
        part = log.read(at, limit)
        assert part["offset"] == max(at, log.dropped)
        assert part["next"] - part["offset"] <= limit
        if part["offset"] == log.size:
            break
        assert part["next"] > part["offset"]
        text, at = text + part["text"], part["next"]
    if limit >= 4 and log.dropped == 0:
        assert text == whole.decode()
    assert log.read(0, kept)["text"] == whole[log.dropped :].decode(errors="replace")


@given(data=st.binary(max_size=50), limit=st.integers(1, 60))
def test_any_bytes(data: bytes, limit: int) -> None:
    log, at = Log(), 0
    log.add(data)
    while at < log.size:
        part = log.read(at, limit)
        assert at < part["next"] <= log.size
        part["text"].encode()
        at = part["next"]


def test_our_own_lines_begin_on_a_line_of_their_own() -> None:
    log = Log()
    log.say(b"one")
    log.add(b"half")
    log.say(b"two\nthree")
    assert log.read(0, 100)["text"] == "one\nhalf\ntwo three\n"
    assert log.read(100, 10) == {"offset": 19, "next": 19, "dropped": 0, "log_bytes": 19, "text": ""}
