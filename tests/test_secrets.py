from __future__ import annotations

import base64
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from carrel.errors import CarrelError, InvalidRequest, PlatformError, TooLarge
from carrel.redaction import spellings
from carrel.secrets import KEY_FILE, LARGEST, SHORTEST, Sealed, Vault, checked_name, checked_value

CALM = settings(deadline=None)
NAMES = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.-]{0,127}\Z")
SCOPES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
KINDS = st.sampled_from(["context", "template"])
PLACES = st.tuples(KINDS, SCOPES, NAMES)
VALUES = st.binary(min_size=4, max_size=200).filter(lambda value: len(value.strip()) >= SHORTEST)
VAULT = Vault(os.urandom(32))


@CALM
@given(PLACES, VALUES)
def test_what_is_sealed_opens(place: tuple[str, str, str], value: bytes) -> None:
    sealed = VAULT.seal(*place, value)  # type: ignore[arg-type]
    assert VAULT.unseal(*place, sealed).get_secret_value() == value  # type: ignore[arg-type]
    assert value not in sealed.data
    assert VAULT.seal(*place, value).data != sealed.data  # type: ignore[arg-type]


@CALM
@given(PLACES, PLACES, VALUES)
def test_it_opens_nowhere_else(one: tuple[str, str, str], other: tuple[str, str, str], value: bytes) -> None:
    sealed = VAULT.seal(*one, value)  # type: ignore[arg-type]
    if one != other:
        with pytest.raises(PlatformError, match="changed in the database"):
            VAULT.unseal(*other, sealed)  # type: ignore[arg-type]


@CALM
@given(VALUES, st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_is_found(value: bytes, where: int, change: int) -> None:
    sealed = VAULT.seal("context", "c", "A", value)
    data = bytearray(sealed.data)
    data[where % len(data)] ^= change
    for broken in (bytes(data), sealed.data[: where % len(data)]):
        with pytest.raises(PlatformError):
            VAULT.unseal("context", "c", "A", Sealed(sealed.key_id, broken))


def test_another_key_is_told_by_its_name() -> None:
    other = Vault(os.urandom(32))
    sealed = VAULT.seal("context", "c", "A", "hush-hush")
    with pytest.raises(PlatformError, match=f"{VAULT.key_id}.*{other.key_id}") as caught:
        other.unseal("context", "c", "A", sealed)
    assert caught.value.field == "secret_key"
    assert VAULT.key_id != other.key_id


def test_nothing_shows_a_value_or_a_key() -> None:
    key = os.urandom(32)
    vault = Vault(key)
    sealed = vault.seal("context", "c", "A", "hush-hush")
    opened = vault.unseal("context", "c", "A", sealed)
    shown = f"{vault!r} {sealed!r} {opened!r} {opened} {vars(vault)}"
    assert "hush" not in shown
    assert str(sealed.data) not in shown
    assert key.hex()[:16] not in shown
    assert base64.b64encode(key).decode() not in shown


@pytest.mark.parametrize("name", ["", "1A", "a b", "a/b", "..", ".a", "-a", "A\n", "ä", "a" * 129, "a\0"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_name(name)
    assert caught.value.field == "name"
    with pytest.raises(InvalidRequest):
        VAULT.seal("context", "c", name, "hush-hush")


@pytest.mark.parametrize(("kind", "scope"), [("context", ""), ("context", "a b"), ("other", "c"), ("template", "a/b")])
def test_places_that_cannot_be_are_refused(kind: str, scope: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        VAULT.seal(kind, scope, "A", "hush-hush")  # type: ignore[arg-type]
    assert caught.value.field == "scope"


def test_values_have_a_least_and_a_greatest_size() -> None:
    assert checked_value("1234") == b"1234"
    assert len(checked_value(b"x" * LARGEST)) == LARGEST
    with pytest.raises(TooLarge):
        checked_value(b"x" * (LARGEST + 1))
    for short in ("", "abc", "  abc\n"):
        with pytest.raises(InvalidRequest, match="found everywhere") as caught:
            checked_value(short)
        assert not short or short not in str(caught.value).replace("because", "")
    assert SHORTEST == spellings.SHORTEST, "what is stored can be taken out of outputs"


def test_the_key_is_made_once_and_kept(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: Vault.open(str(tmp_path)).key_id, range(16)))
    assert len(set(made)) == 1
    assert [each.name for each in tmp_path.iterdir()] == [KEY_FILE]
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    text = (tmp_path / KEY_FILE).read_text()
    assert Vault(base64.b64decode(text)).key_id == made[0]
    assert Vault.open("/nowhere", SecretStr(text)).key_id == made[0]


def test_a_key_that_cannot_be_used_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    for content, mode in (
        ("", 0o600),
        ("not base64", 0o600),
        ("YWJj", 0o600),
        (base64.b64encode(bytes(32)).decode(), 0o644),
    ):
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(PlatformError) as caught:
            Vault.open(str(tmp_path))
        assert caught.value.field == "data_dir"
        assert path.read_text() == content
        assert not content or content not in str(caught.value)
        path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(PlatformError):
        Vault.open(str(tmp_path))
    path.unlink()
    path.mkdir(0o700)
    with pytest.raises(PlatformError):
        Vault.open(str(tmp_path))
    with pytest.raises(PlatformError):
        Vault.open(str(tmp_path / "missing"))


@pytest.mark.parametrize("text", ["", "YWJj", "not base64!", base64.b64encode(bytes(33)).decode()])
def test_a_key_that_is_none_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(CarrelError) as caught:
        Vault.open("/nowhere", SecretStr(text or " "))
    assert caught.value.field == "secret_key"
    assert not text or text not in str(caught.value)
