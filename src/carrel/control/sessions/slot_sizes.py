"""How many slots a pool has: what an administrator asked for since the start, else the template, else the settings."""

from __future__ import annotations

from collections.abc import Callable

from carrel.config import PoolSettings
from carrel.control.sessions.slot_table import SlotCounts
from carrel.control.sessions.templates import BUILT, Templates


class PoolSizes:
    """The sizes of the pools of one server."""

    def __init__(self, settings: PoolSettings, templates: Templates, share: Callable[[int], int]):
        """`share` returns the part of a size that this worker keeps."""
        self._share = share
        self._settings = settings
        self._templates = templates
        self._providers: dict[str, int] = {}
        self._resized: dict[str, int] = {}

    def resize_provider(self, name: str, size: int) -> None:
        """Give the pools of a provider another size, unless their template has one."""
        self._providers[name] = size

    def resize_template(self, name: str, size: int) -> None:
        """Give the pools of a template another size."""
        self._resized[name] = size

    async def of(self, provider: str, template: str | None) -> SlotCounts:
        """Return the sizes of a pool; `InvalidRequest` when its template cannot be used any more."""
        size, most = self._providers.get(provider, self._settings.size), self._settings.max
        if template is not None:
            asked = (await self._templates.get(template)).recipe.pool
            if asked is not None:
                size, most = asked.size, asked.max or most
            size = self._resized.get(template, size)
        size = min(size, self._settings.max)
        most = max(size, min(most, self._settings.max))
        return SlotCounts(self._share(size), self._share(most))

    async def rebuilt(self, template: str | None, image: str | None) -> bool:
        """Whether an image was built for a template, which now has another one."""
        if template is None or image is None or not image.startswith(BUILT):
            return False
        build = (await self._templates.get(template)).build
        return build is None or build.image != image
