"""The report of `carrel doctor`: the features of the host, and the status of each provider."""

from __future__ import annotations

import getpass
import os
import platform

from carrel.isolation import probe
from carrel.models import Check, HostReport
from carrel.providers.base import Provider
from carrel.providers.process import ProcessProvider


def host_report(providers: dict[str, Provider]) -> HostReport:
    """Return the whole report. The first call takes a moment."""
    statuses = [provider.status() for provider in providers.values()]
    if "process" not in providers:
        off = ProcessProvider("/", "/").status()
        statuses.append(
            off.model_copy(update={"available": False, "reason": "unsafe; CARREL_SANDBOX_ALLOW_PROCESS is not set"})
        )
    checks = [
        Check.model_validate({"name": f.name, "status": f.status, "found": f.found, "why": f.why, "remedy": f.remedy})
        for f in probe.host().findings
    ]
    return HostReport(
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        user=_user(),
        checks=checks,
        providers=statuses,
    )


def _user() -> str:
    try:
        return f"{getpass.getuser()} (uid {os.geteuid()})"
    except (KeyError, OSError):
        return f"uid {os.geteuid()}"
