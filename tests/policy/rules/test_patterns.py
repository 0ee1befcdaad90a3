from __future__ import annotations

import fnmatch
import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from carrel.policy.rules.patterns import path_pattern, pattern

TEXT = st.text("ab*?/", max_size=8)


@given(st.text("ab*", max_size=8), st.text("ab", max_size=10))
def test_stars_match_as_everywhere(written: str, text: str) -> None:
    assert pattern(written).matches(text) == bool(re.fullmatch(fnmatch.translate(written), text))


@given(
    st.lists(st.sampled_from(["a", "b*", "*", "**", "?b"]), max_size=5),
    st.lists(st.sampled_from(["a", "b", "bb", "ab"]), max_size=5),
)
def test_paths_match_as_a_regular_expression_would(parts: list[str], names: list[str]) -> None:
    regex = ""
    for part in parts:
        regex += "(/[^/]+)*" if part == "**" else "/" + part.replace("?", "[^/]").replace("*", "[^/]*")
    path = "/" + "/".join(names)
    expected = re.fullmatch(regex, "" if path == "/" else path) is not None
    assert path_pattern("/" + "/".join(parts)).matches(path) == expected


def test_a_backslash_makes_a_star_a_star() -> None:
    assert path_pattern("/a\\*").matches("/a*")
    assert not path_pattern("/a\\*").matches("/ab")
    assert pattern("a*", [False, True]).literal == "a*"


def test_the_folder_everything_lies_in() -> None:
    assert path_pattern("/a/b/**").fixed == "/a/b"
    assert path_pattern("/a/*/c").fixed == "/a"
    assert path_pattern("/**").fixed == "/"
    assert path_pattern("/a/b").fixed == "/a/b"


def test_long_texts_take_no_time() -> None:
    assert not pattern("*a" * 50 + "b").matches("a" * 20_000)
    assert not path_pattern("/**/a" * 20 + "/b").matches("/a" * 1000)


@given(
    st.lists(st.sampled_from(["a", "b*", "*", "**", "?b"]), max_size=3),
    st.lists(st.sampled_from(["a", "b", "ab"]), max_size=3),
)
def test_below_a_path_is_what_some_longer_path_matches(parts: list[str], names: list[str]) -> None:
    written = path_pattern("/" + "/".join(parts))
    longer = (below for length in range(1, 4) for below in product(["a", "b", "ab"], repeat=length))
    expected = any(written.matches("/" + "/".join([*names, *below])) for below in longer)
    assert written.matches_below("/" + "/".join(names)) == expected
