"""Signed heads: a server's word that a chain had this hash at this place at this time. Pure."""

from __future__ import annotations

import json
from typing import NamedTuple

from carrel.audit.keys import SigningKey, signed

Headlike = tuple[str, int, str, int, float, str, str]
"""A head as the store gives it back."""
_DOMAIN = b"carrel audit head v1\n"


class Head(NamedTuple):
    """A signature over a place in a chain. `records` is how many there are since the head before, so that the heads of
    a chain are a chain themselves: one that was taken away leaves a gap.
    """

    chain: str
    seq: int
    hash: str
    records: int
    at: float
    key: str
    signature: str

    @classmethod
    def signed(cls, key: SigningKey, chain: str, seq: int, hash: str, records: int, at: float) -> Head:
        """A head by this key."""
        at = round(at, 6)
        return cls(chain, seq, hash, records, at, key.public, key.sign(_message(chain, seq, hash, records, at)))

    def genuine(self) -> bool:
        """Whether its key signed what it says. Whose key that is, is another question."""
        return signed(self.key, self.signature, _message(self.chain, self.seq, self.hash, self.records, self.at))


def _message(chain: str, seq: int, hash: str, records: int, at: float) -> bytes:
    return _DOMAIN + json.dumps([chain, seq, hash, records, at], separators=(",", ":")).encode()
