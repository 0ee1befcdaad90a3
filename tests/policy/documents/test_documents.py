from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import CarrelError, InvalidRequest, UnknownSetting
from carrel.policy.documents import settings, sources
from carrel.policy.documents.documents import MAX_DOCUMENT, path


def test_an_unknown_key_names_the_nearest_and_its_place() -> None:
    with pytest.raises(UnknownSetting) as caught:
        settings.load('{"permissions": {"alow": []}}')
    assert caught.value.field == "permissions.alow"
    assert caught.value.hint == "did you mean 'allow'?"
    with pytest.raises(UnknownSetting) as caught:
        sources.load(
            '{"package_managers": {"pip": {"registries": [{"name": "a", "url": "https://a.example/", "trust": true}]}}}'
        )
    assert caught.value.field == "package_managers.pip.registries[0].trust"
    assert caught.value.hint == "did you mean 'trusted'?"
    with pytest.raises(UnknownSetting) as caught:
        settings.load('{"zzzzzz": 1}')
    assert "context_workspace" in str(caught.value.hint)


def test_a_wrong_value_names_its_place() -> None:
    with pytest.raises(InvalidRequest) as caught:
        settings.load('{"permissions": {"deny": ["shell(a)", 3]}}')
    assert caught.value.field == "permissions.deny[1]"


def test_comments_are_for_people() -> None:
    settings.load('{"_comment": "a", "_comment_2": 1, "permissions": {"_comment": [], "allow": []}}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"permissions": []}',
        '{"a": 1, "a": 2}',
        '{"permissions": {"allow": "x"}}',
        "[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidRequest):
        settings.load(text)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'permissions' twice"):
        settings.load('{"permissions": {"deny": ["shell(a)"]}, "permissions": {}}')
    with pytest.raises(InvalidRequest, match="larger"):
        settings.load(" " * (MAX_DOCUMENT + 1))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["permissions", "allow", "deny", "git", "pip", "x"]), inner, max_size=3)
        ),
    )
)
def test_any_json_is_read_or_refused_with_a_place(value: object) -> None:
    import json

    for load in (settings.load, sources.load):
        try:
            load(json.dumps(value))
        except CarrelError as error:
            assert error.field


def test_places_are_written_as_people_write_them() -> None:
    assert path(("a", "b", 3, "c")) == "a.b[3].c"
    assert path(()) == "document"
