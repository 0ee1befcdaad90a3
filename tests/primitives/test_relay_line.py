"""Messages of lines: they are found in whatever pieces they come, and one that does not fit is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.primitives.relay_line import RelayMessage, RelayReader, message

MESSAGES = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda number: (RelayMessage.BEGIN, number)),
    st.binary(min_size=1, max_size=40).map(lambda data: (RelayMessage.DATA, data)),
    st.just((RelayMessage.END, 0)),
)


def written(kind: RelayMessage, what: int | bytes) -> bytes:
    return message(kind, len(what)) + what if isinstance(what, bytes) else message(kind, what)


def joined(found: list[tuple[RelayMessage, int | bytes]]) -> list[tuple[RelayMessage, int | bytes]]:
    """The same with neighbouring bytes together."""
    together: list[tuple[RelayMessage, int | bytes]] = []
    for kind, what in found:
        if together and isinstance(what, bytes) and isinstance(before := together[-1][1], bytes):
            together[-1] = (kind, before + what)
        else:
            together.append((kind, what))
    return together


@given(st.lists(MESSAGES, max_size=12), st.integers(1, 13))
def test_messages_are_found_in_any_pieces(messages, size):
    text = b"".join(written(*each) for each in messages)
    reader, found = RelayReader(), []
    for at in range(0, len(text), size):
        found += reader.read(text[at : at + size])
    assert joined(found) == joined(messages)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="0"):
        RelayReader().read(bytes(5))
