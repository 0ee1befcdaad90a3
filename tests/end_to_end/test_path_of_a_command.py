"""The page about the path of a command tells the truth: functions, order, and all modules that take part."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support import call_trace
from tests.support.call_trace import Call, CallTrace, recorded, switch
from tests.support.servers import serving

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "path-of-a-command.md"
MOST_STEPS = 18
RUNS, ENOUGH = 10, 5
STEP = re.compile(r"^(\d+)\. `(carrel\.[\w.]+)`(.*)$", re.MULTILINE)
MODULE = re.compile(r"`(carrel\.[\w.]+)`")


@dataclass(frozen=True)
class Step:
    function: str
    helpers: frozenset[str]


def steps_of_page() -> list[Step]:
    found = STEP.findall(PAGE.read_text())
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    return [Step(function, frozenset(MODULE.findall(rest))) for _, function, rest in found]


def module_of(function: str, calls: Sequence[Call]) -> str | None:
    return next((call.module for call in calls if f"{call.module}.{call.function}" == function), None)


def spawned_on_request(calls: Sequence[Call]) -> bool:
    named = [f"{call.module}.{call.function}" for call in calls]
    request, spawn = "carrel.supervisor.app.Supervisor._start", "carrel.supervisor.reaper.spawn"
    return request in named and spawn in named and named.index(request) < named.index(spawn)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Call]]:
    """The calls of some runs of one command, of all processes in the order of time.

    If the supervisor is still reaping the command before, it starts the command another way, or has just started a
    runner for it: those runs are left out.
    """
    folder = tmp_path_factory.mktemp("calls")
    shutil.copy(call_trace.__file__, folder / "sitecustomize.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        with serving(user=False) as server, server.client.sandbox() as box:
            box.commands.run("true")  # what is imported or cached on first use is no part of the path
            bounds, mine = [], []
            for _ in range(RUNS):
                switch(folder, on=True)
                with CallTrace() as trace:
                    assert box.commands.run("true").exit_code == 0
                switch(folder, on=False)
                mine.append(trace.calls)
                bounds.append((trace.calls[0].at, trace.calls[-1].at))
            theirs = recorded(folder)
    found = [
        sorted([*calls, *(call for call in theirs if first <= call.at <= last)])
        for calls, (first, last) in zip(mine, bounds, strict=True)
    ]
    direct = [calls for calls in found if spawned_on_request(calls)]
    assert len(direct) >= ENOUGH
    return direct


def test_page_has_few_steps() -> None:
    assert 0 < len(steps_of_page()) <= MOST_STEPS


def test_functions_of_page_are_called_in_its_order(runs: list[list[Call]]) -> None:
    wanted = [step.function for step in steps_of_page()]
    for calls in runs:
        first: dict[str, int] = {}
        for call in calls:
            first.setdefault(f"{call.module}.{call.function}", call.at)
        assert [function for function in wanted if function not in first] == []
        assert sorted(wanted, key=lambda function: first[function]) == wanted


def test_no_module_takes_part_that_page_does_not_name(runs: list[list[Call]]) -> None:
    # A module that upkeep of the server happened to call during one run is not in all of them.
    taking_part = frozenset.intersection(*(frozenset(call.module for call in calls) for calls in runs))
    named = {module for step in steps_of_page() for module in (module_of(step.function, runs[0]), *step.helpers)}
    assert taking_part == named
