"""Unpacking of layers, and assembly of root file systems from them, in a process of its own."""

from __future__ import annotations

from dataclasses import astuple, dataclass

LAYER_RECORD = "layer.json"


@dataclass(frozen=True)
class LayerLimits:
    """What one layer may unpack to."""

    max_bytes: int = 16 << 30
    max_entries: int = 1_000_000
    max_ratio: int = 200
    """Unpacked bytes for each byte of the layer's blob, beyond the first 64 MiB."""

    def words(self) -> list[str]:
        """Return the limits as arguments of the process."""
        return [str(each) for each in astuple(self)]
