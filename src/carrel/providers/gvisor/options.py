"""How gVisor is used. Apart from the provider, which takes longer to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GvisorOptions:
    """How the operator wants gVisor to be used; see `GvisorSettings` in `carrel.config`."""

    runsc: str = ""
    platform: str = "systrap"
