"""What any provider must do, as a suite that a provider of somebody else's can be held to. Needs no test framework."""

from __future__ import annotations

from carrel.testing.checks import CHECKS, Check, Outcome, Report
from carrel.testing.conformance import applicable, parameters, run, run_check
from carrel.testing.harness import Harness, Running, workspaces_in

__all__ = [
    "CHECKS",
    "Check",
    "Harness",
    "Outcome",
    "Report",
    "Running",
    "applicable",
    "parameters",
    "run",
    "run_check",
    "workspaces_in",
]
