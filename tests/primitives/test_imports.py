from __future__ import annotations

import gc

import pytest

from carrel.primitives.imports import importing


@pytest.fixture(autouse=True)
def thawed() -> object:
    yield
    gc.unfreeze()


def test_nothing_is_collected_meanwhile_and_what_there_is_stays() -> None:
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_a_package_that_is_missing() -> None:
    with pytest.raises(ImportError), importing():
        import no_such_package_at_all  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_whoever_collects_nothing_goes_on_so() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
