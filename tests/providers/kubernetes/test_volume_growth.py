"""When the claim of the shared volume grows, and by how much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.providers.kubernetes.volume_growth import FULL, GI, bytes_of, grown


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("1Gi", GI), ("1.5Gi", 3 * GI // 2), ("500Mi", 500 << 20), ("1k", 1000), ("2T", 2 * 10**12), ("7", 7)],
)
def test_quantities_are_read(quantity, size):
    assert bytes_of(quantity) == size


@pytest.mark.parametrize("quantity", ["", "Gi", "1 Gi", "-1", "1Gib", "1e3x"])
def test_what_is_no_quantity_is_refused(quantity):
    with pytest.raises(ValueError, match="not a size"):
        bytes_of(quantity)


def test_a_claim_doubles_when_it_is_nearly_full():
    assert grown(GI, GI, 0.81, 10 * GI) == 2 * GI
    assert grown(8 * GI, 8 * GI, 0.81, 10 * GI) == 10 * GI
    assert grown(GI, GI, FULL, 10 * GI) is None
    assert grown(2 * GI, GI, 0.99, 10 * GI) is None, "it waits for what it has asked for"
    assert grown(10 * GI, 10 * GI, 0.99, 10 * GI) is None


@given(st.integers(1, 1 << 50), st.integers(1, 1 << 50), st.floats(0, 1), st.integers(1, 1 << 50))
def test_a_claim_never_shrinks_nor_passes_its_maximum(requested, capacity, used, most):
    wanted = grown(requested, capacity, used, most)
    assert wanted is None or requested < wanted <= most
