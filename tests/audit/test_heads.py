from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from carrel.audit import SigningKey
from carrel.audit.keys import SignedHead


def test_nothing_of_a_head_can_be_changed(key: SigningKey, tmp_path: Path) -> None:
    head = SignedHead.signed(key, "context:c", 1000, "ab" * 32, 1000, 1.23456789)
    assert head.genuine() and head.at == 1.234568 and head.key == key.public
    other = SignedHead.signed(SigningKey.load(str(tmp_path)), *head[:5])
    changes: list[dict[str, object]] = [
        {"chain": "context:d"},
        {"seq": 1001},
        {"hash": "ac" * 32},
        {"records": 999},
        {"at": 1.234569},
        {"key": other.key},
        {"signature": other.signature},
        {"signature": head.signature.upper()},
        {"key": "", "signature": ""},
    ]
    for change in changes:
        assert not head._replace(**change).genuine(), change
    assert head._replace(key=other.key, signature=other.signature).genuine(), "by another key, which is told apart"


@given(st.text(max_size=50), st.integers(0, 2**62), st.floats(0, 1e11))
def test_any_head_is_genuine(chain: str, seq: int, at: float) -> None:
    assert SignedHead.signed(_key(), chain, seq, "00" * 32, seq, at).genuine()


def _key() -> SigningKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return SigningKey(Ed25519PrivateKey.from_private_bytes(b"k" * 32))
