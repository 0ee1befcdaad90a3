"""What leaves holds no secret, whatever the spelling and however the bytes come in; what holds none is left alone."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shlex
import uuid
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.redaction import Redactor
from carrel.redaction.redact import DEEPEST, RELEASED

CALM = settings(deadline=None)
SECRETS = {
    "PASSWORD": "hunter2-Zwölf",
    "QUOTED": 'it\'s a "pass\\word"/+= &<x>',
    "NESTED": 'a "pass\\word',
    "OVERLAP": "&<x>overlapping",
    "KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "SHORT": "pin4",
    "PICTURE": "k\U0001f511y-\U0001f511!",
    "LINES": "first line of the secret\nsecond line of the secret\nx\n",
}
BINARY = bytes([0, 255, 13, 10, 128, 37, 92, 7])
REDACTOR = Redactor(SECRETS)
KNOWN = Redactor({**SECRETS, "BINARY": BINARY}, shapes=False)
VALUES = [*(value.strip().encode() for value in SECRETS.values()), BINARY.strip()]
TOKENS = [
    b"ghp_" + b"Ab3" * 12,
    b"AKIAIOSFODNN7EXAMPLE",
    b"Authorization: Bearer abc.def-123456",
    b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    b"-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0\nab==\n-----END PRIVATE KEY-----",
    b"xoxb-123456789012-abcdefghijkl",
]


def in_json(value: bytes) -> bytes:
    return json.dumps(value.decode())[1:-1].encode()


def in_json_of_go(value: bytes) -> bytes:
    text = json.dumps(value.decode(), ensure_ascii=False)[1:-1].replace("/", "\\/")
    return text.replace("<", "\\u003c").replace("&", "\\u0026").replace("+", "\\u002B").encode()


def by_backslash(value: bytes) -> bytes:
    return b"".join(bytes([c]) if chr(c).isalnum() or c > 127 else b"\\" + bytes([c]) for c in value)


def some_percent(value: bytes) -> bytes:
    forms = ("%%%02x", "%%%02X", "%c")
    return b"".join(
        bytes([c]) if form == "%c" else (form % c).encode() for c, form in zip(value, forms * 99, strict=False)
    )


TEXTS: list[Callable[[bytes], bytes]] = [
    in_json,
    in_json_of_go,
    lambda value: shlex.quote(value.decode()).encode(),
    lambda value: value.replace(b"'", b"'\\''"),
    by_backslash,
    lambda value: quote_plus(value.decode()).encode(),
]
BYTES: list[Callable[[bytes], bytes]] = [
    lambda value: value,
    base64.b64encode,
    base64.urlsafe_b64encode,
    lambda value: base64.b64encode(value).rstrip(b"="),
    lambda value: base64.b64encode(b"user:" + value + b"\n"),
    lambda value: base64.b64encode(b"zz" + value),
    lambda value: base64.encodebytes(b"x" * 50 + value + b"y" * 50),
    lambda value: base64.encodebytes(b"x" * 55 + value).replace(b"\n", b"\r\n"),
    lambda value: quote(base64.b64encode(value), safe="").encode(),
    lambda value: json.dumps(base64.encodebytes(b"x" * 50 + value).decode())[1:-1].encode(),
    lambda value: quote(value, safe="").encode(),
    lambda value: quote(value).lower().encode() if value == value.lower() else quote(value).encode(),
    lambda value: b"".join(b"%%%02x" % c for c in value),
    some_percent,
    lambda value: value.hex().encode(),
    lambda value: value.hex().upper().encode(),
    lambda value: (
        (b"61" * 28 + value.hex().encode() + b"62" * 9)[:60] + b"\n" + (b"61" * 28 + value.hex().encode())[60:]
    ),
    lambda value: b"".join(b"\\x%02x" % c for c in value),
    lambda value: b"".join(b"\\%03o" % c for c in value),
]
SPELLED = [spell(value) for spell in BYTES for value in VALUES] + [
    spell(value) for spell in TEXTS for value in VALUES if value != BINARY.strip()
]
FRAGMENTS = st.one_of(
    st.sampled_from([*SPELLED, *TOKENS]),
    st.sampled_from([*SPELLED, *TOKENS]).flatmap(
        lambda whole: st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))).map(
            lambda ends: whole[min(ends) : max(ends)]
        )
    ),
    st.sampled_from(
        [b"%", b"%2", b"\\", b"\\\\", b"\\u00", b"\\x", b"\n", b"\r", b" ", b"a", b"-----BEGIN ", b"\x1b[1m"]
    ),
    st.binary(max_size=3),
)
STREAMS = st.lists(FRAGMENTS, max_size=6).map(b"".join)
CHUNKS = st.lists(st.integers(1, 30), max_size=60)


def in_chunks(redactor: Redactor, data: bytes, sizes: list[int], skip: int = 0) -> bytes:
    stream, out, at = redactor.stream(skip=skip), [], 0
    for size in [*sizes, len(data)]:
        out.append(stream.feed(data[at : at + size]))
        at += size
        assert stream.position + stream.held == max(min(at, len(data)), skip)
    out.append(stream.finish())
    assert stream.held == 0
    return b"".join(out)


@pytest.mark.parametrize("spell", range(len(BYTES) + len(TEXTS)))
def test_every_spelling_goes_from_the_middle_of_a_text(spell: int) -> None:
    how = [*BYTES, *TEXTS][spell]
    for value in VALUES if spell < len(BYTES) else VALUES[:-1]:
        spelled = how(value)
        core = spelled.strip(b"=\r\n")[1:-1] if spelled != value and how not in TEXTS else spelled
        for around in ((b"", b""), (b"before ", b" after"), (b"x=", b"&y"), (b"\n", b"\r\n")):
            clean = KNOWN.data(around[0] + spelled + around[1])
            assert b"[secret:" in clean, (spelled, clean)
            assert core not in clean
            assert value not in clean
            assert clean.startswith(around[0])
            assert clean.endswith(around[1])


@CALM
@given(STREAMS, CHUNKS)
@example(b"x" * 20 + VALUES[4], [21, 1, 1, 1])
@example(b"\\" * 41 + in_json(VALUES[1]), [40, 1, 1, 3])
@example(b"%2Fa%62", [1, 1, 1, 1, 1])
def test_chunks_make_no_difference(data: bytes, sizes: list[int]) -> None:
    whole = REDACTOR.data(data)
    assert in_chunks(REDACTOR, data, sizes) == whole
    assert in_chunks(REDACTOR, data, [1] * len(data)) == whole


@CALM
@given(STREAMS)
def test_nothing_known_is_left(data: bytes) -> None:
    clean = REDACTOR.data(data)
    for value in VALUES[:-1]:
        assert value not in clean
        assert value.hex().encode() not in clean
        assert base64.b64encode(value)[: len(value) * 8 // 6] not in clean


@CALM
@given(st.lists(st.binary(max_size=40) | st.sampled_from(SPELLED), max_size=30).map(b"".join), st.data())
def test_the_middle_is_the_same_from_the_middle(data: bytes, draw: st.DataObject) -> None:
    whole = KNOWN.data(data)
    at = draw.draw(st.integers(0, len(data)))
    assert KNOWN.lookbehind < 2000
    late = in_chunks(KNOWN, data, [], skip=at)
    assert whole.endswith(late)
    start = max(0, at - KNOWN.lookbehind)
    assert in_chunks(KNOWN, data[start:], draw.draw(CHUNKS), skip=at - start) == late
    stream = KNOWN.stream()
    before = stream.feed(data[:at])
    assert before + in_chunks(KNOWN, data, [], skip=stream.position) == whole


def test_a_long_stream_is_the_same_from_any_place() -> None:
    draw = random.Random(5)
    parts = [
        draw.choice([draw.randbytes(30), draw.choice(SPELLED), draw.choice(TOKENS), b"\\" * 9]) for _ in range(2500)
    ]
    data = b" ".join(parts)
    redactor = Redactor(SECRETS)
    assert len(data) > 3 * redactor.lookbehind
    for _ in range(20):
        at = draw.randrange(len(data))
        start = max(0, at - redactor.lookbehind)
        assert in_chunks(redactor, data[start:], [], at - start) == in_chunks(redactor, data, [70_000], at)


@CALM
@given(st.binary(max_size=300), CHUNKS)
def test_bytes_without_secrets_pass(data: bytes, sizes: list[int]) -> None:
    assert in_chunks(REDACTOR, data, sizes) == data


ORDINARY = [
    "2026-11-15T12:33:08Z INFO worker[12] GET /api/v1/items?page=2 200 in 12.3ms\n",
    "commit 3fd197e2a4b3fd25361f94b4727c3e64f772454d9\n",
    hashlib.sha512(b"x").hexdigest(),
    str(uuid.UUID(int=0x12345678123456781234567812345678)),
    "task-12345678901234567890123456789012345 disk-images risk-assessment-2026-11-15-and-more-words-to-come",
    '<div class="sk-toggleable__content sk-parallel-item sk-container-id-1 sk-estimator-doc-link">',
    'carrel_operation_duration_seconds_bucket_with_a_rather_long_name_2{le="0.1"} 3',
    "npm_config_registry=https://example.org npm_package_devDependencies_typescript=5",
    "Authorization is required. Authorization: required. authorization: Bearer <token>",
    "the line -----BEGIN PRIVATE KEY----- starts a key and -----END PRIVATE KEY----- ends it",
    "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIEAgAAuTANBgkqhkiG9w0BAQUFADBa\n-----END CERTIFICATE-----\n",
    "github_pat_ ghp_ AKIA eyJ SG. hf_ sk- xoxb- AIza -----BEGIN ",
    "AKIAISASHORTWORD AKIALOOKSLIKEAWORDBUTLONG ghp_shortone eyJhbGciOiJIUzI1NiJ9.nojwt",
    "data:image/png;base64," + base64.b64encode(random.Random(1).randbytes(200_000)).decode(),
    base64.encodebytes(random.Random(2).randbytes(100_000)).decode(),
    base64.urlsafe_b64encode(random.Random(3).randbytes(200_000)).decode(),
    random.Random(4).randbytes(100_000).hex(),
    "100% of %20 and %zz, C:\\new\\users\\x41, \\u00e9, '\\'' and \"\\\"\"",
    "grüße, 世界, \U0001f511",
]


@pytest.mark.parametrize("text", ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_text_passes(text: str) -> None:
    assert Redactor({"A": "correct horse", "B": "s3cr3t-value"}).text(text) is text
    assert Redactor().text(text) is text


def test_what_stands_for_a_secret() -> None:
    redactor = Redactor({"OUTER": "abcdefghij", "INNER": "cdef", "NEXT": "hijklmno"})
    assert redactor.text("1abcdefghij2cdef3") == "1[secret:OUTER]2[secret:INNER]3"
    assert redactor.text("abcdefghijklmno") == "[secret:OUTER][secret:NEXT]"
    assert Redactor(["abcdefghij"]).text("1abcdefghij2") == "1[secret]2"
    assert Redactor({"TWIN": "abcdefghij", "OTHER": " abcdefghij\n"}).text("abcdefghij\n") == "[secret:TWIN]\n"
    assert Redactor([b"\xffab\xfe"]).data(b"-\xffab\xfe-") == b"-[secret]-"
    assert "abcdefghij" not in repr(redactor)


def test_what_stands_for_a_secret_can_be_written_another_way() -> None:
    own = Redactor({"KEY": "very-secret", "OTHER": "key-holder"}, written="placeholder-of-{}".format)
    assert own.text("a very-secret b") == "a placeholder-of-KEY b"
    speaking = Redactor({"KEY": "holder-of"}, written="placeholder-of-{}".format)
    assert speaking.text("a holder-of b") == "a *** b"


@pytest.mark.parametrize("name", ["secret", "redacted", "secret:X", "[secret:"])
def test_a_label_never_speaks_a_secret(name: str) -> None:
    redactor = Redactor({"X": name})
    assert name not in redactor.text(f"a {name} b {TOKENS[0].decode()}")


@pytest.mark.parametrize("value", ["", "abc", b"abc", "  abc \n", "\n\n\n\n\n"])
def test_what_is_too_short_is_refused_with_the_reason(value: str | bytes) -> None:
    with pytest.raises(InvalidRequest, match="found everywhere") as caught:
        Redactor({"GOOD": "long enough", "PIN": value})
    assert caught.value.field == "value"
    assert "PIN" in caught.value.detail


@pytest.mark.parametrize("name", ["", "1a", "a b", "a]b", "a" * 129, "ä"])
def test_names_that_could_write_into_the_output_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Redactor({name: "long enough"})
    assert caught.value.field == "name"


def test_nothing_is_held_without_reason() -> None:
    stream = REDACTOR.stream()
    for text in (b"$ ", b"make all\r\n", b"100 %.", b"done: 3\n", b"caf\xc3\xa9 "):
        assert stream.feed(text) == text
        assert stream.held == 0
    assert stream.feed(b"it is hun") == b"it is "
    assert stream.held == 3
    assert stream.feed(b"dred ") == b"hundred "
    assert stream.feed(b"hunter2-Zw") == b""
    assert stream.feed("ölf!".encode()[1:]) == b"hunter2-Zw" + "ölf!".encode()[1:]


def test_at_most_the_longest_is_held() -> None:
    stream = REDACTOR.stream()
    for _ in range(100):
        stream.feed(b"-----BEGIN PRIVATE KEY-----\n" + b"QUJD" * 16 + b"\n" + (b"QUJD" * 16 + b"\n") * 20)
        assert stream.held <= REDACTOR.lookbehind


def test_a_quiet_terminal_is_not_kept_waiting() -> None:
    stream = REDACTOR.stream()
    assert stream.feed(b"$ h") == b"$ "
    assert stream.release() == b"h"
    assert (stream.release(), stream.held) == (b"", 0)
    assert stream.feed(b"u") == b""
    assert stream.release() == b"u"
    assert stream.feed(b"nter") == b""
    assert stream.held > RELEASED
    assert stream.release() == b""
    assert stream.feed("2-Zwölf\r\n".encode()) == b"[secret:PASSWORD]\r\n"
    assert stream.feed(b"h") + stream.release() + stream.feed(b"at ") + stream.finish() == b"hat "


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_secret_that_comes_byte_by_byte_does_not_go_through(size: int) -> None:
    stream, secret, given = Redactor({"KEY": "very-secret-key"}).stream(), b"very-secret-key", b""
    for at in range(0, len(secret), size):
        given += stream.feed(secret[at : at + size]) + stream.release()
    assert given + stream.finish() == secret[: RELEASED - RELEASED % size] + b"[secret:KEY]"


def test_a_secret_that_the_end_cuts_off() -> None:
    assert REDACTOR.text("key wJalrXUtnFEMI/K7MDENG/bPxRfi") == "key [secret:KEY]"
    assert REDACTOR.text("key hunter2-Zwö") == "key [secret:PASSWORD]"
    assert REDACTOR.text("key wJalrXUtn") == "key wJalrXUtn"
    assert REDACTOR.text("key hunter2-Zwö x") == "key hunter2-Zwö x"
    half = b"-----BEGIN RSA PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0\nMIIEvQIBADANBgkqh"
    assert REDACTOR.data(b"a " + half) == b"a [redacted:private-key]"


def test_lines_of_a_longer_secret_go_one_by_one() -> None:
    assert REDACTOR.text("| second line of the secret\r\n") == "| [secret:LINES]\r\n"
    shown = SECRETS["LINES"].replace("\n", "\r\n")
    assert REDACTOR.text(shown) == "[secret:LINES]\r\n"


def test_values_keep_their_shape() -> None:
    redactor = Redactor({"A": "12345678", "B": "s3cr3t-value"})
    value = {
        "argv": ["curl", "-u", "me:s3cr3t-value", b"s3cr3t-value"],
        "s3cr3t-value": None,
        "x-s3cr3t-value": True,
        "pair": (12345678, 1.5, 7),
        "headers": {"authorization": "Bearer abcdefgh12", "Accept": "*/*"},
    }
    assert redactor.value(value) == {
        "argv": ["curl", "-u", "me:[secret:B]", b"[secret:B]"],
        "[secret:B]": None,
        "x-[secret:B]": True,
        "pair": ("[secret:A]", 1.5, 7),
        "headers": {"authorization": "Bearer [redacted:authorization]", "Accept": "*/*"},
    }
    assert redactor.value({"s3cr3t-value": 1, "[secret:B]": 2}) == {"[secret:B]": 1, "[secret:B]'": 2}
    assert redactor.value({"n": 10**5000})["n"] == 10**5000
    deep: object = "s3cr3t-value"
    for _ in range(DEEPEST + 50):
        deep = [deep]
    assert "s3cr3t" not in str(redactor.value(deep))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@CALM
@given(JSON)
def test_values_without_secrets_are_equal(value: object) -> None:
    assert Redactor({"A": "correct horse battery"}).value(value) == value


@CALM
@given(st.text(st.characters(exclude_characters="\\", exclude_categories=("Cs",)), max_size=60), st.text(max_size=60))
def test_any_text_around_a_secret_stays(before: str, after: str) -> None:
    redactor = Redactor({"A": "correct horse battery"}, shapes=False)
    assert redactor.text(f"{before}correct horse battery{after}") == f"{before}[secret:A]{after}"


@CALM
@given(
    st.dictionaries(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), st.text("abc", min_size=4, max_size=8), max_size=5),
    st.text("abcd", max_size=60),
    CHUNKS,
)
def test_overlapping_secrets_of_few_letters(secrets: dict[str, str], text: str, sizes: list[int]) -> None:
    redactor = Redactor(secrets, shapes=False)
    data = text.encode()
    clean = redactor.data(data)
    assert in_chunks(redactor, data, sizes) == clean
    for value in secrets.values():
        assert value not in clean.decode()
    covered = [False] * len(text)
    for value in secrets.values():
        for at in range(len(text)):
            if text.startswith(value, at):
                covered[at : at + len(value)] = [True] * len(value)
    kept = "".join(letter for letter, inside in zip(text, covered, strict=True) if not inside)
    left = clean.decode()
    for name in [*(f"[secret:{name}]" for name in secrets), "***"]:
        left = left.replace(name, "")
    assert left == kept or not any(len(value) >= 8 for value in secrets.values()) or kept.startswith(left)
