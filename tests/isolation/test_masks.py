"""Masks as a value: what is accepted, what is impossible, and that nothing is lost on the way."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest, TooLarge, Unsupported
from carrel.isolation import masks
from carrel.isolation.masks import Masks, check, content, is_possible, pack, split, unmaskable, unpack
from carrel.policy.rules.patterns import path_pattern


@pytest.mark.parametrize(
    "good",
    [
        Masks(),
        Masks(("curl", "[", "g++", "/usr/bin/x"), ("/etc/shadow", "/etc/ssl/**", "/**/id_rsa", "/proc/version")),
        Masks(writable=()),
        Masks(writable=("/workspace", "/workspace/a/b", "/workspace/out/**", "/workspace/**")),
        Masks(("curl",), refusal={"curl": "no"}),
        Masks(readonly=("/workspace/a", "/workspace/a*b/c", "/workspace/**/*.lock", "/workspace/a/**")),
        Masks(("x",) * masks.MOST),
        Masks(("caf\udce9", "naïve")),
    ],
)
def test_what_is_accepted(good: Masks) -> None:
    check(good)


@pytest.mark.parametrize(
    ("bad", "error", "field"),
    [
        (Masks(("x",) * (masks.MOST + 1)), TooLarge, "masks"),
        (Masks(("",)), InvalidRequest, "masks.programs"),
        (Masks(("..",)), InvalidRequest, "masks.programs"),
        (Masks(("a/b",)), InvalidRequest, "masks.programs"),
        (Masks(("/usr/../bin/x",)), InvalidRequest, "masks.programs"),
        (Masks(("/usr//bin",)), InvalidRequest, "masks.programs"),
        (Masks(("/usr/bin/",)), InvalidRequest, "masks.programs"),
        (Masks(("x\0",)), InvalidRequest, "masks.programs"),
        (Masks(("x" * 256,)), InvalidRequest, "masks.programs"),
        (Masks(("half \ud800",)), InvalidRequest, "masks.programs"),
        (Masks(("/workspace/bin/x",)), Unsupported, "masks.programs"),
        (Masks(("/home/agent/x",)), Unsupported, "masks.programs"),
        (Masks((), ("etc/shadow",)), InvalidRequest, "masks.hidden"),
        (Masks((), ("/etc/../x",)), InvalidRequest, "masks.hidden"),
        (Masks((), ("/etc/\\.\\./x",)), InvalidRequest, "masks.hidden"),
        (Masks((), ("/x" * 2048,)), InvalidRequest, "masks.hidden"),
        (Masks((), ("/proc/**",)), Unsupported, "masks.hidden"),
        (Masks(writable=("/etc",)), InvalidRequest, "masks.writable"),
        (Masks(writable=("/workspaces",)), InvalidRequest, "masks.writable"),
        (Masks(writable=("/workspace/../etc",)), InvalidRequest, "masks.writable"),
        (Masks(writable=("/workspace/*.txt",)), Unsupported, "masks.writable"),
        (Masks(writable=("/workspace/**/a",)), Unsupported, "masks.writable"),
        (Masks(readonly=("/etc/hosts",)), InvalidRequest, "masks.readonly"),
        (Masks(readonly=("/workspace",)), InvalidRequest, "masks.readonly"),
        (Masks(readonly=("/workspace/**",)), InvalidRequest, "masks.readonly"),
        (Masks(readonly=("/**/x",)), InvalidRequest, "masks.readonly"),
        (Masks(readonly=("/workspace/../etc",)), InvalidRequest, "masks.readonly"),
        (Masks(readonly=("/workspace/x",) * (masks.MOST + 1)), TooLarge, "masks"),
        (Masks(("a",), refusal={"b": ""}), InvalidRequest, "masks.refusal"),
        (Masks(("a",), refusal={"a": "x" * 4097}), TooLarge, "masks.refusal"),
        (Masks(("a",), refusal={"a": "\ud800"}), InvalidRequest, "masks.refusal"),
    ],
)
def test_what_is_refused(bad: Masks, error: type[InvalidRequest], field: str) -> None:
    with pytest.raises(error) as caught:
        pack(bad)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "pattern",
    [
        "/", "/**", "/proc", "/proc/**", "/proc/*", "/proc/1/maps", "/proc/self/environ", "/proc/net/tcp", "/proc/mounts",
        "/tmp", "/tmp/x", "/tmp/**", "/home/agent/.ssh/**", "/dev/shm/x", "/run/secrets/TOKEN", "/dev", "/dev/**",
    ],
)  # fmt: skip
def test_what_cannot_be_hidden(pattern: str) -> None:
    assert unmaskable(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["/etc/shadow", "/proc/cpuinfo", "/dev/tty", "/workspace/**", "/home/**", "/**/x", "/usr/share/doc", "/tmpfiles"],
)
def test_what_can_be_hidden(pattern: str) -> None:
    assert unmaskable(pattern) is None


PARTS = st.text(st.sampled_from("ab*?[]\\."), min_size=1, max_size=5) | st.just("**")
NAMES = st.text(st.sampled_from("ab[]*?\\."), min_size=1, max_size=5)


def matches(part: masks.Part, name: str) -> bool:
    assert part is not None
    return part == name if isinstance(part, str) else bool(part(name))


@given(PARTS, NAMES)
def test_a_name_means_what_it_means_in_a_rule(part: str, name: str) -> None:
    [own] = split(f"/{part}")
    if own is not None and not part.endswith("\\"):
        assert matches(own, name) == path_pattern(f"/{part}").matches(f"/{name}")


@given(
    st.builds(
        Masks,
        st.tuples(st.text("abc", min_size=1, max_size=3)),
        st.lists(st.text("ab*", min_size=1, max_size=4).map("/etc/{}".format), max_size=3).map(tuple),
        st.none() | st.just(("/workspace/a",)),
    )
)
def test_nothing_is_lost_on_the_way(given_masks: Masks) -> None:
    descriptor = pack(given_masks)
    try:
        assert unpack(content(descriptor)) == given_masks
    finally:
        os.close(descriptor)


GOOD = {"programs": [], "hidden": [], "writable": None, "refusal": {}}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b"{}", b"\xff",
        *(
            json.dumps(GOOD | change).encode()
            for change in (
                {"programs": "curl"}, {"programs": [1]}, {"hidden": None}, {"writable": {}}, {"refusal": []},
                {"refusal": {"a": 1}}, {"programs": ["../x"]}, {"programs": [[]]},
            )
        ),
    ],
)  # fmt: skip
def test_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        unpack(body)


@given(
    st.binary(max_size=50)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
)
def test_nothing_but_a_refusal_comes_of_nonsense(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        unpack(body)


def test_more_than_fits_is_refused() -> None:
    descriptor = os.memfd_create("huge")
    try:
        os.truncate(descriptor, masks.LARGEST + 1)
        with pytest.raises(TooLarge):
            content(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("path", "possible"), [("/a/b*", True), ("/a//b", False), ("/" + "x" * 256, False), ("a", False)]
)
def test_where_there_can_be_a_file(path: str, possible: bool) -> None:
    assert is_possible(path) == possible


def test_the_text_of_a_refusal() -> None:
    given_masks = Masks(("curl", "/usr/bin/wget"), refusal={"curl": "no\n"})
    assert given_masks.text("curl") == "no\n"
    told = given_masks.text("/usr/bin/wget")
    assert told.endswith("}\n")
    body = json.loads(told)
    assert list(body) == ["code", "operation", "rule", "source", "reason", "retry", "approval", "hint"]
    assert (body["code"], body["reason"]) == ("denied_by_policy", "wget is denied in this sandbox")
