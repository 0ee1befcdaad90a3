"""The report of `carrel doctor`: the features of the host, every isolation level, and the status of each provider."""

from __future__ import annotations

import getpass
import os
import platform
from collections.abc import Collection

from carrel.isolation import probe
from carrel.models import Check, HostReport, LevelStatus, ProviderStatus
from carrel.providers.base import Provider
from carrel.providers.built_in import BUILT_IN, LEVELS
from carrel.providers.choosing import believed_level
from carrel.providers.third_party import origins
from carrel.providers.trust import RULES

NO_PROVIDER = "this version of carrel has no provider of this level"


def host_report(providers: dict[str, Provider], listed: Collection[str]) -> HostReport:
    """Return the whole report; the first call takes a moment. `listed` are the third-party providers whose level the
    operator believes.
    """
    statuses = [each.status() if each.name in BUILT_IN else _third_party(each, listed) for each in providers.values()]
    statuses += [
        ProviderStatus(
            name=each.name,
            isolation_level=each.level,
            unsafe=each.level == 0,
            available=False,
            reason=each.off,
            capabilities=[],
        )
        for each in BUILT_IN.values()
        if each.name not in providers
    ]
    checks = [
        Check.model_validate({"name": f.name, "status": f.status, "found": f.found, "why": f.why, "remedy": f.remedy})
        for f in probe.host().findings
    ]
    return HostReport(
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        user=_user(),
        checks=checks,
        levels=[_level(level, statuses) for level in sorted(LEVELS, reverse=True)],
        providers=sorted(statuses, key=lambda each: -each.isolation_level),
    )


def _level(level: int, statuses: list[ProviderStatus]) -> LevelStatus:
    own = [each for each in statuses if each.isolation_level == level]
    there = [each.name for each in own if each.available]
    lacking = [f"{each.name}: {each.reason}" for each in own if not each.available]
    return LevelStatus(
        level=level,
        meaning=LEVELS[level],
        enough_for=[trust for trust, rule in RULES.items() if rule.least_level <= level],
        available=bool(there),
        providers=there,
        missing=lacking or ([] if there else [NO_PROVIDER]),
    )


def _third_party(provider: Provider, listed: Collection[str]) -> ProviderStatus:
    """Return the status of a provider of another package, with the level that counts."""
    level = believed_level(provider, listed)
    package = provider.name.partition("@")[2] or origins().get(provider.name, "")
    status = provider.status().model_copy(update={"isolation_level": level, "package": package})
    if provider.isolation_level == level:
        return status
    note = (
        f"it claims level {provider.isolation_level}, which carrel does not check: it counts as 0 until "
        "CARREL_SANDBOX_THIRD_PARTY lists it"
    )
    return status.model_copy(update={"reason": f"{status.reason}; {note}" if status.reason else note})


def _user() -> str:
    try:
        return f"{getpass.getuser()} (uid {os.geteuid()})"
    except (KeyError, OSError):
        return f"uid {os.geteuid()}"
