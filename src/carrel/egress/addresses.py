"""Which addresses are not of the public internet: what the wire asks of an address is what `carrel policy` asks."""

from __future__ import annotations

from carrel.policy.addresses import plain, private

__all__ = ["plain", "private"]
