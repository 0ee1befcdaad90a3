from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.client.listing import local_target
from carrel.errors import InvalidPath

HERE = Path("/local/target")
segment = st.sampled_from(["..", ".", "", "a", "root", "b c", "\x00", "~", "/"])


@given(st.lists(segment, max_size=6).map("/".join), st.sampled_from([".", "root", "/ws/root", "a"]))
def test_nothing_that_is_listed_leaves_the_directory(path: str, root: str) -> None:
    try:
        place = local_target(HERE, root, path)
    except InvalidPath:
        return
    assert place != HERE
    assert ".." not in place.parts
    assert HERE in place.parents


def test_entries_keep_their_place() -> None:
    assert local_target(HERE, "src", "src/a/b.py") == HERE / "a/b.py"
    assert local_target(HERE, ".", "a/b.py") == HERE / "a/b.py"
    for path in ("other/x", "src", "src/../../x", "/etc/passwd"):
        with pytest.raises(InvalidPath):
            local_target(HERE, "src", path)
