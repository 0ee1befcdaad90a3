"""The client of image registries (the OCI distribution API, version 2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegistryAccess:
    """Which registries may be used, and how they are reached."""

    allowed: frozenset[str] = frozenset()
    plain_http: frozenset[str] = frozenset()
    unverified: frozenset[str] = frozenset()
    ca_file: str | None = None
    docker_config: str | None = None
    timeout_s: float = 60.0
    downloads: int = 4


class RegistryClient:
    """Talks to registries. One for all; close it at the end."""

    def __init__(self, access: RegistryAccess):
        self._access = access

    async def close(self) -> None:
        """Close the connections."""
