"""The conformance suite for providers, also those of third parties. It needs no test framework."""

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
