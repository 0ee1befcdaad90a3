"""How gVisor is used. Apart from the provider, which takes longer to import."""

from __future__ import annotations

from dataclasses import dataclass

LIMITS = ("RLIMIT_NOFILE", "RLIMIT_FSIZE")
"""The resource limits of a sandbox in gVisor. The others are budgets of the host's kernel, which it does not use, and
gVisor refuses to set them.
"""


@dataclass(frozen=True)
class GvisorOptions:
    """How the operator wants gVisor to be used; see `GvisorSettings` in `carrel.config`."""

    runsc: str = ""
    platform: str = "systrap"
