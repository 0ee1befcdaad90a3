"""Providers of other packages. A package names a factory in the entry point group `carrel.providers`.

carrel runs their code as the server does, so to install one is to trust it. A provider that cannot be used stays among
the others with the reason, so that requests, the log and `carrel doctor` can name it. What a provider says of its own
isolation is believed only where the operator lists it: `choosing` decides that.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from carrel.errors import ProviderUnavailable
from carrel.providers.base import Capability, Handle, Launch, Provider
from carrel.providers.built_in import BUILT_IN, LEVELS

if TYPE_CHECKING:
    from carrel.spiffe.sandboxes import SandboxIdentities

log = logging.getLogger("carrel.providers")

GROUP = "carrel.providers"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_RESERVED = {"auto", *BUILT_IN}
_LONGEST_REASON = 500


@dataclass(frozen=True)
class ProviderContext:
    """The argument of a factory.

    `run_dir` is for this provider alone. It may not exist yet: make it with mode 0700 when you first need it. `shared`
    maps paths in every isolated sandbox to what is mounted there from the host. `images` is the directory with the
    roots of images, `bundles` the directory for the supervisor's bundle; either may be empty, and then no sandbox needs
    it. `settings` has the variables `CARREL_PROVIDER_NAME_…` of the server's environment, without that prefix and in
    lower case. `identities` gives SPIFFE IDs to sandboxes that are reached over a network (see
    `carrel.providers.remote`); None if the operator has not set `spiffe.source`.
    """

    run_dir: str
    shared: Mapping[str, str]
    images: str
    bundles: str
    settings: Mapping[str, str]
    identities: SandboxIdentities | None = None


Factory = Callable[[ProviderContext], Provider]
"""Returns a provider. It creates and starts nothing: `carrel doctor` calls it too."""


class Unusable(Provider):
    """Stands for a provider that was refused, or is not installed. It only says why."""

    isolation_level = 0
    unsafe = True

    def __init__(self, name: str, reason: str):
        self.name = name
        self._reason = reason

    def capabilities(self) -> frozenset[Capability]:
        return frozenset()

    def missing(self) -> str | None:
        return self._reason

    async def start(self, launch: Launch) -> Handle:
        raise ProviderUnavailable(f"provider '{self.name}' cannot be used here: {self._reason}")

    async def alive(self, handle: Handle) -> bool:
        return False

    async def remove(self, handle: Handle) -> None:
        raise ProviderUnavailable(f"provider '{self.name}' cannot be used here: {self._reason}")


def open_third_party(
    run_dir: str,
    listed: Sequence[str],
    *,
    shared: Mapping[str, str],
    images: str,
    bundles: str,
    identities: SandboxIdentities | None = None,
) -> list[Provider]:
    """Return the providers of other packages, and an `Unusable` for each that is refused or listed in vain."""
    found = list(entry_points(group=GROUP))
    times = Counter(each.name for each in found)
    providers: list[Provider] = []
    for each in found:
        own_dir = os.path.join(run_dir, f"provider-{each.name}")
        context = ProviderContext(own_dir, dict(shared), images, bundles, _settings(each.name), identities)
        provider, reason = _load(each, context, times[each.name])
        if provider is None:
            log.error("the provider '%s' of %s is refused: %s", each.name, origin(each), reason)
            taken = each.name in _RESERVED or times[each.name] > 1 or not _NAME.fullmatch(each.name)
            provider = Unusable(f"{each.name}@{origin(each)}" if taken else each.name, reason)
        providers.append(provider)
    known = {provider.name for provider in providers} | BUILT_IN.keys()
    providers += [
        Unusable(name, "CARREL_SANDBOX_THIRD_PARTY lists it, but no installed package has it")
        for name in listed
        if name not in known
    ]
    return providers


def origin(point: EntryPoint) -> str:
    """Return the package of an entry point, and its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"


def origins() -> dict[str, str]:
    """Return the package of each third-party provider, by the provider's name."""
    return {each.name: origin(each) for each in entry_points(group=GROUP)}


def _load(point: EntryPoint, context: ProviderContext, times: int) -> tuple[Provider | None, str]:
    """Return the provider of an entry point; or None, and why it is refused."""
    name = point.name
    if not _NAME.fullmatch(name):
        return None, "its name is not a word of lower-case letters, digits and '-'"
    if name in _RESERVED:
        return None, f"'{name}' is a name of carrel; the package has to choose another"
    if times > 1:
        return None, "several installed packages have a provider of this name; uninstall all but one"
    try:
        factory: Factory = point.load()
    except Exception as error:
        return None, _words(f"{point.value} cannot be imported", error)
    try:
        provider: object = factory(context)
    except Exception as error:
        return None, _words(f"{point.value} made no provider", error)
    try:
        reason = _difference(provider, name)
    except Exception as error:
        reason = _words("it does not describe itself", error)
    return (None, reason) if reason or not isinstance(provider, Provider) else (provider, "")


def _difference(provider: object, name: str) -> str:
    """Return how an object differs from the interface, or an empty text."""
    if not isinstance(provider, Provider):
        return f"its factory returned a {type(provider).__name__}, which does not derive from carrel.providers.Provider"
    level: object = provider.isolation_level
    if provider.name != name:
        return f"it calls itself {provider.name!r:.50}, and its entry point '{name}'"
    if type(level) is not int or level not in LEVELS:
        return f"its isolation_level is {level!r:.50}, not one of {', '.join(map(str, LEVELS))}"
    if provider.unsafe is not (level == 0):
        return "`unsafe` is true for level 0 and for no other"
    promised: frozenset[object] = frozenset(provider.capabilities())
    strange = [each for each in promised if not isinstance(each, Capability)]
    if strange:
        return f"it promises {strange[0]!r:.50}, which is no capability"
    missing: object = provider.missing()
    if missing is not None and not isinstance(missing, str):
        return f"missing() returns {missing!r:.50}, neither None nor a reason"
    return ""


def _words(what: str, error: Exception) -> str:
    log.info("a provider is refused", exc_info=error)
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_REASON]


def _settings(name: str) -> dict[str, str]:
    prefix = f"CARREL_PROVIDER_{name.upper().replace('-', '_')}_"
    return {key[len(prefix) :].lower(): value for key, value in os.environ.items() if key.startswith(prefix)}
