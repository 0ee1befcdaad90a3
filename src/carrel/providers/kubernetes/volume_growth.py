"""Lets the claim of the shared volume grow before it is full. The storage class has to allow that.

The claim is asked to double when more than 80 % are used, up to a maximum. Where it has not got yet what it was asked
for, nothing more is asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from typing import Any

from carrel.errors import CarrelError, PlatformError
from carrel.providers.kubernetes.api import KubernetesApi

log = logging.getLogger("carrel.volumes")

FULL = 0.8
LOOK_EVERY_S = 30.0
GI = 1 << 30
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|)")
_FACTORS = {"": 1, **{f"{letter}i": 1 << 10 * (power + 1) for power, letter in enumerate("KMGTPE")}}
_FACTORS |= {letter: int(10 ** (3 * (power + 1))) for power, letter in enumerate("kMGTPE")}


def bytes_of(quantity: str) -> int:
    """Return how many bytes a quantity of Kubernetes means. Raises `ValueError`."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        raise ValueError(f"'{quantity[:40]}' is not a size")
    return math.ceil(float(found[1]) * _FACTORS[found[2]])


def grown(requested: int, capacity: int, used: float, most: int) -> int | None:
    """Return how many bytes a claim should ask for now; None if it is to stay as it is. `used` is a part of 1."""
    if used <= FULL or capacity < requested or requested >= most:
        return None
    return min(2 * requested, most)


def used_part(directory: str) -> float:
    """Return which part of a mounted volume is used. Blocking."""
    found = os.statvfs(directory)
    return 1 - found.f_bavail / found.f_blocks if found.f_blocks else 0.0


class VolumeGrowth:
    """The claim of one volume. `path` is that of the claim in the API, `directory` where the volume is mounted here."""

    def __init__(self, api: KubernetesApi, path: str, directory: str, most_bytes: int):
        self._api = api
        self._path = path
        self._directory = directory
        self._most = most_bytes
        self._said = ""

    async def run(self) -> None:
        """Look from time to time. A failure is logged once, and tried again."""
        while True:
            try:
                await self.look(await asyncio.to_thread(used_part, self._directory))
                self._said = ""
            except (CarrelError, OSError) as error:
                said = error.detail if isinstance(error, CarrelError) else str(error)
                if said != self._said:
                    log.warning("the claim of the shared volume cannot grow: %s", said)
                self._said = said
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self, used: float) -> int | None:
        """Have the claim grow if it is time; return how many bytes it asks for then. `used` is a part of 1."""
        if used <= FULL:
            return None
        claim = await self._api.get(self._path)
        if claim is None:
            raise PlatformError(f"there is no claim at {self._path}")
        if (claim.get("status") or {}).get("phase") != "Bound":
            return None  # it has no volume yet
        requested, capacity = _sizes(claim)
        wanted = grown(requested, capacity, used, self._most)
        if wanted is not None:
            size = f"{wanted // GI}Gi" if wanted % GI == 0 else str(wanted)
            await self._api.patch(self._path, {"spec": {"resources": {"requests": {"storage": size}}}})
            log.info("%.0f %% of the shared volume are used: its claim asks for %s now", used * 100, size)
        return wanted


def _sizes(claim: dict[str, Any]) -> tuple[int, int]:
    """Return how many bytes a claim asks for, and how many it has."""
    try:
        requested = bytes_of(str(claim["spec"]["resources"]["requests"]["storage"]))
        return requested, bytes_of(str(claim["status"]["capacity"]["storage"]))
    except (KeyError, TypeError, ValueError) as error:
        raise PlatformError(f"the claim of the shared volume has no size: {error}") from error
