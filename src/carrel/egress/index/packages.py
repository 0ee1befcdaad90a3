"""What one sandbox may install, and how much one install has taken. Knows nothing of pages, files or the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from carrel.egress.access import Refused
from carrel.egress.plan import Index
from carrel.policy.verdict import Verdict

IDLE_S = 60.0
"""An install is over when no request came for this long."""


class InstallBudget:
    """What the install that is under way has taken. One for each sandbox; it outlives changes of the policy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._files: dict[str, int] = {}
        self._active = 0
        self._last = clock()

    @property
    def taken(self) -> int:
        """The bytes of the files that were asked for."""
        return sum(self._files.values())

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A request that belongs to an install: to the one under way, or to a new one after a pause."""
        if not self._active and self._clock() - self._last >= IDLE_S:
            self._files.clear()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self.keep()

    def keep(self) -> None:
        """The install goes on: bytes still flow."""
        self._last = self._clock()

    def has(self, file: str) -> bool:
        """Whether a file is counted."""
        return file in self._files

    def fits(self, file: str, size: int, most: int | None) -> bool:
        """Whether a file of this size can be taken with the others."""
        return most is None or self._others(file) + size <= most

    def take(self, file: str, size: int, most: int | None) -> None:
        """Count a file, once and with the largest size it is known by. Raises `Refused` when it does not fit."""
        if most is not None and not self.fits(file, size, most):
            raise _too_much(size, self._others(file), most)
        self._files[file] = max(size, self._files.get(file, 0))

    def give_back(self, file: str) -> None:
        """The file was not delivered after all."""
        self._files.pop(file, None)

    def _others(self, file: str) -> int:
        return self.taken - self._files.get(file, 0)


@dataclass(frozen=True, slots=True)
class Packages:
    """What one sandbox may install. Names are as indexes compare them; `allowed` None allows every package."""

    indexes: tuple[Index, ...]
    """In order: a project that an earlier one has is never looked for on a later one."""
    blocked: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    max_install_bytes: int | None = None
    enabled: bool = True
    budget: InstallBudget = field(default_factory=InstallBudget)

    def check(self, project: str) -> None:
        """Raises `Refused` when the project may not be installed."""
        self.check_enabled()
        if project in self.blocked:
            raise _denied(f"the package {project} is blocked for this agent", f"blocked_packages: {project}")
        if self.allowed is not None and project not in self.allowed:
            raise _denied(f"the package {project} is not among those this agent may install", "allowed_packages")

    def check_enabled(self) -> None:
        """Raises `Refused` when nothing may be installed at all."""
        if not self.enabled:
            raise _denied("this agent may not install packages", "enabled: false")


def _denied(reason: str, rule: str) -> Refused:
    return Refused(Verdict("deny", reason, f"package_managers.pip.{rule}", "sources.json"))


def _too_much(size: int, taken: int, most: int) -> Refused:
    reason = f"this install has taken {_shown(taken)}; {_shown(size)} more is over the {_shown(most)} it may take"
    rule, hint = "package_managers.pip.max_install_size_mb", "install fewer or smaller packages"
    return Refused(Verdict("deny", reason, rule, "sources.json", hint), code="limit_exceeded")


def _shown(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size} bytes"
