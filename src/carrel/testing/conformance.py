"""Checks every promise of a provider, with or without a test framework.

A check that needs a capability which the provider does not promise is not skipped: instead, the provider must refuse
that capability. So every missing capability is listed in the report.

Under pytest: `@pytest.mark.parametrize(**parameters())`, a fixture that yields a `Harness`,
and `assert (await run_check(check, harness)).kept`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from carrel.errors import CarrelError, Unsupported
from carrel.providers.base import Capability, Provider
from carrel.testing import networks, promises
from carrel.testing.checks import CHECKS, Check, Outcome, Report
from carrel.testing.harness import Harness, MakeProvider, MakeWorkspace

__all__ = ["CHECKS", "applicable", "parameters", "run", "run_check"]

_DECLARED = (promises.__name__, networks.__name__)  # imported for what they declare


def parameters() -> dict[str, object]:
    """Return the arguments of `pytest.mark.parametrize`, with each check as the parameter `check`."""
    return {"argnames": "check", "argvalues": CHECKS, "ids": [one.name for one in CHECKS]}


def applicable(provider: Provider) -> Iterator[Check]:
    """Return the checks whose capabilities this provider promises."""
    return (one for one in CHECKS if not one.gaps(provider))


async def run_check(one: Check, harness: Harness, deadline_s: float = 60) -> Outcome:
    """Run one check against the provider of the harness. One that is slow to start needs a later deadline."""
    began = time.monotonic()
    gaps = one.gaps(harness.provider)
    failure: str | None = None
    try:
        if gaps:
            _is_refused(harness.provider, gaps)
        else:
            async with asyncio.timeout(deadline_s):
                await one.body(harness)
    except (AssertionError, CarrelError, TimeoutError, OSError) as error:
        failure = f"{type(error).__name__}: {error}"
    return Outcome(one, failure, tuple(gaps), time.monotonic() - began)


async def run(make_provider: MakeProvider, make_workspace: MakeWorkspace, images: str = "") -> Report:
    """Run every check. `make_provider` must return an equivalent provider each time; `images` is its directory of
    images.
    """
    harness = Harness(make_provider, make_workspace, images)
    try:
        missing = harness.provider.missing()
        assert missing is None, f"provider '{harness.provider.name}' cannot be used here: {missing}"
        return Report(harness.provider.name, [await run_check(one, harness) for one in CHECKS])
    finally:
        await harness.close()


def _is_refused(provider: Provider, gaps: list[Capability]) -> None:
    for gap in gaps:
        try:
            provider.require(gap)
        except Unsupported as refusal:
            assert gap in str(refusal.extra.get("capabilities")), "the refusal does not name what is lacking"
            assert refusal.hint, "the refusal does not say what to do"
        else:
            raise AssertionError(f"'{gap}' is neither promised nor refused")
