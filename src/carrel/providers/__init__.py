"""Providers, which run sandboxes, and the choice of a provider for a request.

Each name is imported on first use, so that a zygote can be started before the models are imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carrel.isolation.masks import Masks
    from carrel.providers.base import Capability, Handle, Launch, Provider
    from carrel.providers.choosing import choose, open_providers
    from carrel.providers.third_party import ProviderContext

__all__ = ["Capability", "Handle", "Launch", "Masks", "Provider", "ProviderContext", "choose", "open_providers"]

_HOMES = {
    "Capability": "carrel.providers.base",
    "Handle": "carrel.providers.base",
    "Launch": "carrel.providers.base",
    "Masks": "carrel.isolation.masks",
    "Provider": "carrel.providers.base",
    "ProviderContext": "carrel.providers.third_party",
    "choose": "carrel.providers.choosing",
    "open_providers": "carrel.providers.choosing",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'carrel.providers' has no attribute '{name}'")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
