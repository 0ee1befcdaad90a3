from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.nodes import passes as passes_module
from carrel.control.nodes.passes import (
    ADMINISTRATOR,
    LIFETIME_S,
    SKEW_S,
    Forwardable,
    Passes,
    digest_of,
    kept_headers,
    require_body,
    require_length,
)
from carrel.errors import LimitExceeded, Unauthorized

KEY = b"k" * 32
REQUEST = Forwardable(
    "POST", b"/v1/sandboxes/c/commands?a=1", [(b"content-type", b"application/json")], digest_of(b"{}")
)


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def two(clock: Clock | None = None, *, key: bytes = KEY) -> tuple[Passes, Passes]:
    """The sender `a`, and the server `b` in its process `boot`."""
    clock = clock or Clock()
    return Passes(key, "a", "boot-a", clock), Passes(KEY, "b", "boot", clock)


def test_a_pass_is_valid_once() -> None:
    a, b = two()
    value = a.make(REQUEST, "tok-1", "b", "boot")
    passed = b.check(value, REQUEST)
    assert (passed.sender, passed.caller, passed.body) == ("a", "tok-1", REQUEST.body)
    with pytest.raises(Unauthorized, match="used before"):
        b.check(value, REQUEST)


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, method="PUT"),
        replace(REQUEST, target=b"/v1/sandboxes/d/commands?a=1"),
        replace(REQUEST, target=b"/v1/sandboxes/c/commands?a=2"),
        replace(REQUEST, headers=[(b"content-type", b"text/plain")]),
        replace(REQUEST, headers=[*REQUEST.headers, (b"carrel-approval", b"apr-1")]),
        replace(REQUEST, headers=[]),
    ],
)
def test_a_pass_is_for_one_request(other: Forwardable) -> None:
    a, b = two()
    with pytest.raises(Unauthorized):
        b.check(a.make(REQUEST, ADMINISTRATOR, "b", "boot"), other)


def test_a_pass_is_for_one_process_of_one_server_and_needs_the_shared_secret() -> None:
    a, b = two()
    for to, boot in (("c", "boot"), ("b", "boot-before"), ("boot", "b")):
        with pytest.raises(Unauthorized):
            b.check(a.make(REQUEST, ADMINISTRATOR, to, boot), REQUEST)
    stranger, b = two(key=b"x" * 32)
    with pytest.raises(Unauthorized):
        b.check(stranger.make(REQUEST, ADMINISTRATOR, "b", "boot"), REQUEST)


def test_a_pass_is_valid_for_seconds() -> None:
    clock = Clock()
    a, b = two(clock)
    value = a.make(REQUEST, ADMINISTRATOR, "b", "boot")
    clock.now += LIFETIME_S + SKEW_S + 0.1
    with pytest.raises(Unauthorized, match="expired"):
        b.check(value, REQUEST)
    value = a.make(REQUEST, ADMINISTRATOR, "b", "boot")
    clock.now -= SKEW_S + 1.0
    with pytest.raises(Unauthorized, match="expired"):
        b.check(value, REQUEST)


def test_used_passes_are_remembered_as_long_as_they_are_valid_and_not_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "MOST_SEEN", 50)
    clock = Clock()
    a, b = two(clock)
    for _ in range(50):
        b.check(a.make(REQUEST, ADMINISTRATOR, "b", "boot"), REQUEST)
    with pytest.raises(LimitExceeded):
        b.check(a.make(REQUEST, ADMINISTRATOR, "b", "boot"), REQUEST)
    clock.now += LIFETIME_S + 2 * SKEW_S + 1
    b.check(a.make(REQUEST, ADMINISTRATOR, "b", "boot"), REQUEST)
    assert len(b._seen) == 1


@given(st.data())
def test_no_changed_byte_of_a_pass_is_accepted(data: st.DataObject) -> None:
    a, b = two()
    value = bytearray(a.make(REQUEST, "tok-1", "b", "boot"))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] = data.draw(st.integers(0, 255).filter(lambda each: each != value[at]))
    with pytest.raises(Unauthorized):
        b.check(bytes(value), REQUEST)


@given(st.binary(max_size=2000))
def test_any_bytes_are_refused(value: bytes) -> None:
    _, b = two()
    with pytest.raises(Unauthorized):
        b.check(value, REQUEST)


def test_the_body_is_the_one_that_was_signed() -> None:
    a, b = two()
    passed = b.check(a.make(REQUEST, ADMINISTRATOR, "b", "boot"), REQUEST)
    require_body(passed, b"{}")
    with pytest.raises(Unauthorized, match="body"):
        require_body(passed, b"{ }")
    for kind, given_length, fine in (
        ("none", None, True), ("none", b"0", True), ("none", b"3", False), ("length 3", b"3", True),
        ("length 3", b"4", False), ("length 3", None, False), ("stream", None, True), ("stream", b"3", False),
        (digest_of(b"abc"), b"3", False), ("", None, False),
    ):  # fmt: skip
        streamed = replace(passed, body=kind)
        if fine:
            require_length(streamed, given_length)
        else:
            with pytest.raises(Unauthorized):
                require_length(streamed, given_length)


def test_a_token_does_not_travel() -> None:
    given = [(b"authorization", b"Bearer x"), (b"cookie", b"c"), (b"host", b"h"), (b"origin", b"o"),
             (b"carrel-forwarded", b"x"), (b"accept", b"*/*"), (b"sec-websocket-protocol", b"carrel.token.x")]  # fmt: skip
    assert kept_headers(given) == [(b"accept", b"*/*")]
