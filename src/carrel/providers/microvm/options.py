"""How virtual machines are made. Apart from the provider, which takes longer to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicrovmOptions:
    """How the operator wants virtual machines; see `MicrovmSettings` in `carrel.config`."""

    qemu: str = ""
    virtiofsd: str = ""
    kernel: str = ""
    modules: str = ""
    allow_emulation: bool = False
    memory_mb: int = 1024
